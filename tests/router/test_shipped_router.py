"""configs/router.toml runs as it is in front of the engines that it names.

Replaced are the addresses, and the path of the token's file. Engines are scripted ones.
"""

import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import httpx

from tests.support.server_process import free_ports

CONFIG = Path(__file__).parents[2] / "configs" / "router.toml"
ENGINES = re.compile(r"http://10\.0\.0\.\d+:8000")
LIMIT_S = 60.0


def test_shipped_router_serves_a_request_by_all_engines_that_it_names(tmp_path: Path) -> None:
    text = CONFIG.read_text()
    num_engines = len(ENGINES.findall(text))
    front, admin, *ports = free_ports(2 + num_engines)
    numbers = iter(ports)
    text = ENGINES.sub(lambda _: f"http://127.0.0.1:{next(numbers)}", text)
    text = text.replace('"0.0.0.0:8000"', f'"127.0.0.1:{front}"')
    text = text.replace('"127.0.0.1:8001"', f'"127.0.0.1:{admin}"')
    token = tmp_path / "admin-token"
    text = text.replace("/etc/kvpool/admin-token", str(token))
    config = tmp_path / "router.toml"
    config.write_text(text)
    engines = [sys.executable, "-m", "tests.support.scripted_engine", "--port", str(ports[0])]
    engines += ["--count", str(num_engines), "--pool", str(tmp_path / "pool")]
    router = [sys.executable, "-m", "vllm_kvpool.cli", "router", "--config", str(config)]
    log = tmp_path / "log"
    with log.open("wb") as out:
        started = [subprocess.Popen(each, stdout=out, stderr=out) for each in (engines, router)]
        try:
            states = states_when_up(f"http://127.0.0.1:{admin}", token, log)
            assert states == {each["id"]: each["role"] for each in tomllib.loads(text)["replicas"]}
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


def states_when_up(admin: str, token: Path, log: Path) -> dict[str, str]:
    """The state of each replica once none is loading."""
    deadline = time.monotonic() + LIMIT_S
    states: dict[str, str] = {}
    while not states or set(states.values()) - {"prefill", "decode"}:
        assert time.monotonic() < deadline, f"{states}\n{log.read_text()}"
        time.sleep(0.05)
        try:
            headers = {"Authorization": f"Bearer {token.read_text().strip()}"}
            found = httpx.get(f"{admin}/state", headers=headers, timeout=LIMIT_S).json()
        except (OSError, httpx.TransportError):
            continue
        states = {each["id"]: each["state"] for each in found["replicas"]}
    return states
