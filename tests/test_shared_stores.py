"""Configurations that span hosts name a store that all hosts reach; the default is one host's."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CONNECTOR = "KVPoolConnector"
SHARED = re.compile(r"(mooncake|s3)://\S")
SPAN_HOSTS = {
    "configs/helm/kvpool/values.yaml",  # what the chart's engines-config.yaml puts in
    "configs/kubernetes/00-namespace.yaml",
    "configs/mooncake_decode.json",
    "configs/mooncake_prefill.json",
    "configs/systemd/README.md",
    "configs/tiers.json",
    "examples/06_mooncake_hosts/hosts.env",
}
ONE_HOST = {
    "configs/ascend_decode.yaml": "a directory that all hosts mount",
    "configs/ascend_both.yaml": "a directory that all hosts mount",
    "configs/ascend_prefill.yaml": "a directory that all hosts mount",
    "configs/embedded.json": "engines of one machine",
    "configs/files.json": "one machine, or a directory that all hosts mount",
    "configs/helm/kvpool/templates/engines-config.yaml": "the store is in values.yaml",
    "configs/hybrid.yaml": "one engine",
    "configs/router.toml": "names the file that has the store",
    "examples/02_vllm_embedded.sh": "two engines of one machine",
    "examples/demo.py": "two engines of one machine",
    "examples/ascend/first_run.py": "engines of one machine",
}


def files_with_connectors() -> set[str]:
    paths = [path for name in ("configs", "examples") for path in (ROOT / name).rglob("*")]
    return {
        str(path.relative_to(ROOT))
        for path in paths
        if path.is_file() and path.suffix != ".pyc" and CONNECTOR in path.read_text(errors="ignore")
    }


def test_every_configuration_is_known_to_span_hosts_or_not() -> None:
    assert files_with_connectors() <= SPAN_HOSTS | ONE_HOST.keys()


@pytest.mark.parametrize("name", sorted(SPAN_HOSTS))
def test_configuration_that_spans_hosts_names_a_shared_store(name: str) -> None:
    assert SHARED.search((ROOT / name).read_text())
