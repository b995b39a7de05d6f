"""examples/06_mooncake_hosts: its scripts, up to the programs they start, and its values."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vllm_kvpool.config import KVPoolConfig, read_config
from vllm_kvpool.router.config import RouterConfig, load_config
from vllm_kvpool.storage.tiers import parse_tiers

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "examples" / "06_mooncake_hosts"
SCRIPTS = sorted(FOLDER.glob("*.sh"))
PROGRAMS = ("KVPOOL", "MOONCAKE_MASTER", "VLLM")
TIMEOUT_S = 30


def bash(*arguments: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", *arguments],
        env={"PATH": os.environ["PATH"], **environment},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Programs that print what they are started with, and a home."""
    program = tmp_path / "program"
    program.write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    program.chmod(0o755)
    return {"HOME": str(tmp_path), **dict.fromkeys(PROGRAMS, str(program))}


@pytest.fixture
def values(environment: dict[str, str]) -> dict[str, str]:
    """Return the variables that hosts.env sets."""
    script = f"set -aeu; . {shlex.quote(str(FOLDER / 'hosts.env'))}; env -0"
    done = bash("-c", script, environment=environment)
    assert done.returncode == 0, done.stderr
    pairs = [entry.partition("=") for entry in done.stdout.split("\0") if entry]
    return {name: value for name, _, value in pairs if name.isupper() and name != "PATH"}


@pytest.fixture
def router(values: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> RouterConfig:
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    return load_config(FOLDER / "router.toml")


def started(script: str, *arguments: str, environment: dict[str, str]) -> list[str]:
    """Run a script and return the arguments of the program it starts."""
    done = bash(str(FOLDER / script), *arguments, environment=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


@pytest.mark.parametrize("path", [*SCRIPTS, FOLDER / "hosts.env"], ids=lambda path: path.name)
def test_bash_understands_it(path: Path) -> None:
    done = bash("-n", str(path), environment={})
    assert (done.returncode, done.stderr) == (0, "")
    assert path.suffix != ".sh" or os.access(path, os.X_OK)
    assert path.suffix != ".sh" or "set -euo pipefail" in path.read_text()


def test_the_master_listens_where_engines_look(
    environment: dict[str, str], values: dict[str, str]
) -> None:
    host, port = values["MASTER_HOST"], values["MASTER_PORT"]
    assert started("master.sh", environment=environment)[:2] == [
        f"--rpc_address={host}",
        f"--rpc_port={port}",
    ]
    assert values["STORE"].startswith(f"mooncake://{host}:{port}?")


# Files that start a master, by the way they write its command.
MASTERS = [
    "configs/helm/kvpool/templates/mooncake-master.yaml",
    "configs/kubernetes/10-mooncake-master.yaml",
    "configs/systemd/mooncake-master.service",
    "examples/03_mooncake/README.md",
    "examples/06_mooncake_hosts/master.sh",
]


@pytest.mark.parametrize("path", MASTERS)
def test_lease_of_a_started_master_outlasts_a_store_call(path: str) -> None:
    """A call counts as hung after `call_timeout_s`; until then its cells are not evicted."""
    (lease_ms,) = re.findall(r"--default_kv_lease_ttl=(\d+)", (ROOT / path).read_text())
    assert int(lease_ms) > KVPoolConfig().call_timeout_s * 1e3


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_engine_is_started_with_the_pool(
    role: str, environment: dict[str, str], values: dict[str, str]
) -> None:
    arguments = started("engine.sh", role, "10.9.9.9", "--x", "a b", environment=environment)
    assert arguments[:2] == ["serve", values["MODEL"]]
    assert arguments[-2:] == ["--x", "a b"]
    options = dict(zip(arguments[2:-2:2], arguments[3:-2:2], strict=True))
    assert options["--host"] == "10.9.9.9"
    assert options["--port"] == values["ENGINE_PORT"]
    assert options["--tensor-parallel-size"] == values[f"{role.upper()}_TP"]
    assert int(options["--shutdown-timeout"]) > 0
    transfer = json.loads(options["--kv-transfer-config"])
    assert (transfer["kv_connector"], transfer["kv_role"]) == ("KVPoolConnector", "kv_both")
    config = read_config(transfer["kv_connector_extra_config"], env={})
    assert config.store_urls == (values["STORE"],)
    assert parse_tiers(config.store_urls, environ={})


@pytest.mark.parametrize("arguments", [(), ("prefill",), ("both", "10.0.0.1"), ("", "10.0.0.1")])
def test_an_engine_without_role_and_address_is_not_started(
    arguments: tuple[str, ...], environment: dict[str, str]
) -> None:
    done = bash(str(FOLDER / "engine.sh"), *arguments, environment=environment)
    assert done.returncode != 0
    assert "usage: " in done.stderr
    assert done.stdout == ""


def test_the_router_is_started_with_a_token_that_it_keeps(
    environment: dict[str, str], router: RouterConfig
) -> None:
    token = Path(router.admin.token_file)
    expected = ["router", "--config", str(FOLDER / "router.toml")]
    assert started("router.sh", environment=environment) == expected
    first = token.read_text()
    assert re.fullmatch("[0-9a-f]{64}", first)
    assert token.stat().st_mode & 0o777 == 0o600
    assert token.parent.stat().st_mode & 0o777 == 0o700
    assert started("router.sh", environment=environment) == expected
    assert token.read_text() == first


def test_the_router_knows_the_hosts(router: RouterConfig, values: dict[str, str]) -> None:
    port = values["ENGINE_PORT"]
    *running, spare = router.replicas
    assert {(replica.url, replica.role) for replica in running} == {
        (f"http://{values[f'{role.upper()}_{number}']}:{port}", role)
        for role in ("prefill", "decode")
        for number in (1, 2)
    }
    assert (spare.url, spare.role) == (f"http://{values['SPARE_1']}:{port}", "spare")
    assert router.front.listen == f"{values['ROUTER_HOST']}:{values['ROUTER_PORT']}"
    assert router.admin.listen == f"127.0.0.1:{values['ADMIN_PORT']}"


def test_spare_engine_is_started_and_stopped_where_it_is(
    router: RouterConfig, values: dict[str, str], environment: dict[str, str], tmp_path: Path
) -> None:
    """`ssh` is a shell here, in a copy of the folder."""
    folder = tmp_path / "copy"
    shutil.copytree(FOLDER, folder)
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text('#!/bin/sh\necho "$5" >>"$HOME/hosts"\nexec sh -c "$6"\n')
    ssh.chmod(0o755)
    path = f"{ssh.parent}:{os.environ['PATH']}"
    spare = router.replicas[-1]
    for command in (spare.start, spare.stop):
        assert command[0] == str(FOLDER / "spare.sh")
        done = subprocess.run(
            [str(folder / "spare.sh"), *command[1:]],
            env={**environment, "PATH": path},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        if command == spare.start:
            deadline = time.monotonic() + TIMEOUT_S
            while not (log := folder / "engine.log").exists() or not log.read_text().strip():
                assert time.monotonic() < deadline, done
                time.sleep(0.05)
            assert json.loads(log.read_text())[:2] == ["serve", values["MODEL"]]
            assert (folder / "engine.pid").exists()
    assert not (folder / "engine.pid").exists()
    assert (tmp_path / "hosts").read_text().split() == [values["SPARE_1"]] * 2


def test_the_readme_names_what_is_there(values: dict[str, str]) -> None:
    readme = (FOLDER / "README.md").read_text()
    for path in FOLDER.iterdir():
        assert path.name == "README.md" or path.name in readme, path.name
    for address in re.findall(r"\b10(?:\.\d+){3}\b", readme):
        assert address in values.values()
