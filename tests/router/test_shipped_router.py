"""The shipped configurations of the router run in front of the engines that they name.

Replaced are addresses, and the path of the token's file. Engines are scripted ones.
"""

import re
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
import yaml

from tests.support.server_process import free_ports

CONFIGS = Path(__file__).parents[2] / "configs"
ENGINE = re.compile(r"(?<=://)10\.0\.0\.\d+:8000|kvpool-(?:prefill|decode):8000")
TOKEN_FILE = re.compile(r'(?<=token_file = ")[^"]+')
TOKEN = "of-this-test"
LIMIT_S = 60.0


def texts() -> dict[str, str]:
    """By file: what a router is configured with."""
    manifests = yaml.safe_load_all((CONFIGS / "kubernetes" / "30-router.yaml").read_text())
    (of_pods,) = (each["data"]["router.toml"] for each in manifests if each["kind"] == "ConfigMap")
    return {
        "router.toml": (CONFIGS / "router.toml").read_text(),
        "kubernetes/30-router.yaml": of_pods,
    }


@pytest.mark.parametrize("name", texts())
def test_shipped_router_serves_a_request_by_all_engines_that_it_names(
    name: str, tmp_path: Path
) -> None:
    text = texts()[name]
    num_engines = len(ENGINE.findall(text))
    front, admin, *ports = free_ports(2 + num_engines)
    numbers = iter(ports)
    text = ENGINE.sub(lambda _: f"127.0.0.1:{next(numbers)}", text)
    text = text.replace('"0.0.0.0:8000"', f'"127.0.0.1:{front}"')
    text = text.replace('"127.0.0.1:8001"', f'"127.0.0.1:{admin}"')
    token = tmp_path / "admin-token"
    token.touch(0o600)
    token.write_text(TOKEN)
    text = TOKEN_FILE.sub(str(token), text)
    config = tmp_path / "router.toml"
    config.write_text(text)
    engines = [sys.executable, "-m", "tests.support.scripted_engine", "--port", str(ports[0])]
    engines += ["--count", str(num_engines), "--pool", str(tmp_path / "pool")]
    router = [sys.executable, "-m", "vllm_kvpool", "router", "--config", str(config)]
    log = tmp_path / "log"
    with log.open("wb") as out:
        started = [subprocess.Popen(each, stdout=out, stderr=out) for each in (engines, router)]
        try:
            states = states_when_up(f"http://127.0.0.1:{admin}", num_engines, log)
            # Half of the engines of each file compute prompts.
            half = num_engines // 2
            assert states == ["decode"] * half + ["prefill"] * half
            answer = httpx.post(
                f"http://127.0.0.1:{front}/v1/completions",
                json={"model": "scripted", "prompt": "a b c", "max_tokens": 4},
                timeout=LIMIT_S,
            )
            assert answer.status_code == 200, answer.text
        finally:
            for each in reversed(started):
                each.terminate()
                each.wait(LIMIT_S)


def states_when_up(admin: str, num_engines: int, log: Path) -> list[str]:
    """The states of the replicas once all serve, sorted."""
    deadline = time.monotonic() + LIMIT_S
    states: list[str] = []
    while len(states) < num_engines or set(states) - {"prefill", "decode"}:
        assert time.monotonic() < deadline, f"{states}\n{log.read_text()}"
        time.sleep(0.05)
        try:
            headers = {"Authorization": f"Bearer {TOKEN}"}
            found = httpx.get(f"{admin}/state", headers=headers, timeout=LIMIT_S).json()
        except httpx.TransportError:
            continue
        states = [each["state"] for each in found["replicas"]]
    return sorted(states)
