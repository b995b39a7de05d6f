"""The documents say what the code does: options, metrics, example configurations."""

import json
import re
import subprocess
import sys
import tomllib
from dataclasses import fields
from enum import Enum
from pathlib import Path

import msgspec
import pytest
import yaml

from tests.support.router_sections import SECTIONS
from vllm_kvpool.config import (
    ENV_PREFIX,
    EmbedsConfig,
    KVPoolConfig,
    RequestOptions,
    read_config,
    read_embeds_config,
)
from vllm_kvpool.metrics import METRICS
from vllm_kvpool.router.config import controller_of
from vllm_kvpool.router.config import load_config as load_router_config
from vllm_kvpool.router.ops.admin_api import ROUTES
from vllm_kvpool.router.ops.metrics import PREFIX, ROUTER_METRICS
from vllm_kvpool.storage.tiers import parse_tiers

ROOT = Path(__file__).parent.parent


def table(document: str, columns: int) -> list[list[str]]:
    """The rows of all tables with so many columns whose first cell is `code`."""
    rows = []
    for line in (ROOT / "docs" / document).read_text().splitlines():
        cells = [c.strip() for c in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == columns and cells[0].startswith("`"):
            rows.append(cells)
    return rows


def written(value: object) -> str:
    return json.dumps(value.value if isinstance(value, Enum) else value)


def test_every_option_is_documented_with_its_default() -> None:
    expected = [
        [f"`{f.name}`", f"`{written(f.default)}`", f"`{ENV_PREFIX}{f.name.upper()}`"]
        for f in fields(KVPoolConfig)
    ]
    assert [row[:3] for row in table("configuration.md", 4) if ENV_PREFIX in row[2]] == expected


def test_every_option_of_embeddings_is_documented_with_its_default() -> None:
    expected = [
        [f"`{f.name}`", f"`{written(f.default)}`", f"`{ENV_PREFIX}{f.name.upper()}`"]
        for f in fields(EmbedsConfig)
    ]
    assert [row[:3] for row in table("embeddings.md", 4)] == expected


def test_every_request_option_is_documented_with_its_default() -> None:
    expected = [[f"`{f.name}`", f"`{written(f.default)}`"] for f in fields(RequestOptions)]
    assert [row[:2] for row in table("configuration.md", 3)] == expected


def test_every_metric_is_documented() -> None:
    expected = [
        [f"`{m.name}`", m.kind.value, ", ".join(m.labels), m.help] for m in METRICS.values()
    ]
    assert table("metrics.md", 4) == expected
    [lowest] = re.findall(
        r"but four are\s+the lowest: ([^.]*)\.", (ROOT / "docs/metrics.md").read_text()
    )
    found = re.findall(r"`(\w+)`", lowest)
    assert found == [name for name, metric in METRICS.items() if metric.lowest]


def test_every_metric_of_the_router_is_documented() -> None:
    expected = [
        [f"`{PREFIX}{m.name}`", m.kind.value, ", ".join(m.labels), m.help]
        for m in ROUTER_METRICS.values()
    ]
    assert table("router_admin.md", 4) == expected


def test_every_route_of_the_admin_address_is_documented() -> None:
    documented = [route for route, _ in table("router_admin.md", 2)]
    assert documented == [f"`{method} {path}`" for method, path in ROUTES]


def test_every_option_of_the_router_is_documented_with_its_default() -> None:
    expected = []
    for name, section in SECTIONS.items():
        head = f"[[{name}]]" if name == "replicas" else f"[{name}]"
        for field in msgspec.structs.fields(section):
            given = field.default
            if given is msgspec.NODEFAULT and field.default_factory is not msgspec.NODEFAULT:
                given = field.default_factory()
            default = "needed" if field.required else f"`{json.dumps(msgspec.to_builtins(given))}`"
            expected.append([f"`{head}`", f"`{field.name}`", default])
    assert [row[:3] for row in table("router.md", 4)] == expected


def test_the_example_of_the_router_is_accepted() -> None:
    config = load_router_config(ROOT / "configs" / "router.toml")
    controller_of(config)


def test_requirements_of_the_readme_are_those_of_the_package() -> None:
    """README names the same first Python, and the same first and last vLLM, as pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [vllm] = project["optional-dependencies"]["vllm"]
    found = re.fullmatch(r"vllm>=([\d.]+),<0\.(\d+)", vllm)
    assert found is not None, vllm
    readme = (ROOT / "README.md").read_text()
    assert f"| vLLM | {found[1]} to 0.{int(found[2]) - 1} " in readme
    assert f"| Python | {project['requires-python'].removeprefix('>=')} to " in readme


CONFIGS = sorted(path for path in (ROOT / "configs").iterdir() if path.suffix in (".json", ".yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_example_configurations_are_accepted(path: Path) -> None:
    """YAML has all options of an engine (`vllm serve --config`)."""
    transfer = yaml.safe_load(path.read_text())
    transfer = transfer.get("kv-transfer-config", transfer)
    if "ec_connector" in transfer:
        assert transfer["ec_connector"] == "KVPoolECConnector"
        read_embeds_config(transfer.get("ec_connector_extra_config", {}), env={})
        return
    assert transfer["kv_connector"] == "KVPoolConnector"
    config = read_config(transfer.get("kv_connector_extra_config", {}), env={})
    if any(config.store_urls):
        credentials = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x"}
        assert parse_tiers(config.store_urls, environ=credentials)


def test_the_example_without_vllm_runs() -> None:
    example = ROOT / "examples" / "01_embedded_no_vllm.py"
    done = subprocess.run(
        [sys.executable, str(example)], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("True")
