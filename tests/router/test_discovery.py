"""Engines by configuration, file and DNS: what is added, changed and removed, and when."""

import asyncio
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import httpx
import pytest

from tests.support.router_rig import run
from tests.support.server_process import free_ports
from tests.support.waiting import until
from vllm_kvpool.errors import ConfigError
from vllm_kvpool.router.config import RouterConfig, read_config
from vllm_kvpool.router.control.events import Added, Event, Remove, ReplicaSpec, SetRole
from vllm_kvpool.router.control.states import ReplicaId, Role
from vllm_kvpool.router.ops.discovery import Discovery
from vllm_kvpool.router.run import read_again


def entry(url: str, role: str = "decode", name: str = "") -> str:
    return f'[[replicas]]\nurl = "{url}"\nrole = "{role}"\n' + (f'id = "{name}"\n' if name else "")


def config(*urls: str, **discovery: str) -> RouterConfig:
    replicas = [{"url": url, "role": "decode"} for url in urls]
    return read_config({"replicas": replicas, "discovery": discovery})


def added(name: str, url: str, role: Role = Role.DECODE) -> Added:
    return Added(spec=ReplicaSpec(replica_id=ReplicaId(name), url=url), role=role)


def test_a_configuration_that_is_read_again_changes_its_own_replicas_alone() -> None:
    events: list[Event] = []
    discovery = Discovery(config("http://a:1", "http://b:1/"), events.append)
    discovery.start()
    assert events == [added("replica-1", "http://a:1"), added("replica-2", "http://b:1")]
    discovery.reload(config("http://a:1", "http://b:1"))
    assert len(events) == 2
    both = (
        {"url": "http://b:1", "role": "prefill"},
        {"url": "http://c:1", "role": "decode", "id": "c"},
    )
    discovery.reload(read_config({"replicas": list(both)}))
    assert events[2:] == [
        Remove(ReplicaId("replica-1")),
        SetRole(ReplicaId("replica-2"), Role.PREFILL),
        added("c", "http://c:1"),
    ]


async def test_a_file_is_watched_and_one_that_is_wrong_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "engines.toml"
    events: list[Event] = []

    def write(text: str) -> None:
        new = tmp_path / "new"
        new.write_text(text)
        new.replace(path)

    discovery = Discovery(config(file=str(path)), events.append, every_s=0.01)
    discovery.start()
    await until(lambda: "discovery.file: " in caplog.text)
    write(entry("http://a:1", "prefill") + entry("http://b:1", name="b"))
    await until(lambda: len(events) == 2)
    assert set(events) == {
        added("a:1", "http://a:1", Role.PREFILL),
        added("b", "http://b:1"),
    }
    write(entry("http://b:1", "decoder"))
    await until(lambda: "choose one of prefill, decode, both" in caplog.text)
    write(entry("http://b:1/v1"))
    await until(lambda: "without /v1" in caplog.text)
    write(entry("http://b:1", name="b c"))
    await until(lambda: "id is 'b c'" in caplog.text)
    path.unlink()
    await asyncio.sleep(0.05)
    assert len(events) == 2
    write(entry("http://b:1", name="b"))
    await until(lambda: len(events) == 3)
    assert events[2] == Remove(ReplicaId("a:1"))
    await discovery.stop()


async def test_a_file_that_is_being_written_is_left_alone(tmp_path: Path) -> None:
    """A truncated one names fewer engines, or none, and is good TOML all the same."""
    path = tmp_path / "engines.toml"
    events: list[Event] = []

    path.write_text(entry("http://a:1") + entry("http://b:1"))
    discovery = Discovery(config(file=str(path)), events.append, every_s=0.02)
    discovery.start()
    await until(lambda: len(events) == 2)
    for number in range(20):
        path.write_text(f"{entry('http://a:1')}{'#' * number}\n")
        await asyncio.sleep(0.005)
    path.write_text(entry("http://a:1") + entry("http://b:1") + entry("http://c:1"))
    await until(lambda: len(events) == 3)
    assert events[2] == added("c:1", "http://c:1")
    path.write_text("")
    await until(lambda: len(events) == 6)
    await discovery.stop()


def test_each_address_of_a_name_is_an_engine(caplog: pytest.LogCaptureFixture) -> None:
    events: list[Event] = []

    async def main() -> None:
        given = config(prefill_dns="localhost:8100", decode_dns="no-such-name.invalid:8200")
        discovery = Discovery(given, events.append, every_s=0.01)
        discovery.start()
        await until(lambda: "no-such-name.invalid:8200 cannot be resolved" in caplog.text)
        await until(lambda: events)
        await asyncio.sleep(0.05)
        assert added("127.0.0.1:8100", "http://127.0.0.1:8100", Role.PREFILL) in events
        assert len(events) == len(set(events)) <= 2, "each once"
        await discovery.stop()

    run(main)
    assert caplog.text.count("cannot be resolved") == 1


def test_what_cannot_be_added_is_tried_again(tmp_path: Path) -> None:
    events: list[Event] = []
    is_there, num_refused = True, 0

    def post(event: Event) -> None:
        nonlocal num_refused
        if is_there:
            num_refused += 1
            raise ConfigError("is there already, and is being removed")
        events.append(event)

    async def main() -> None:
        nonlocal is_there
        path = tmp_path / "engines.toml"
        path.write_text(entry("http://a:1"))
        discovery = Discovery(config(file=str(path)), post, every_s=0.01)
        discovery.start()
        await until(lambda: num_refused > 1)
        is_there = False
        await until(lambda: events)
        assert events == [added("a:1", "http://a:1")]
        await discovery.stop()

    run(main)


OLD = '[[tenants]]\nname = "one"\nkey = "the old key of one"\n'
NEW = OLD.replace("old", "new")


def test_sighup_reads_replicas_and_keys_again_each_without_the_other(tmp_path: Path) -> None:
    front, admin = free_ports(2)
    path, keys = tmp_path / "router.toml", tmp_path / "keys.toml"
    head = (
        f'[front]\nlisten = "127.0.0.1:{front}"\nkeys_file = "{keys}"\n'
        f'[admin]\nlisten = "127.0.0.1:{admin}"\ntoken = "t"\n'
    )
    path.write_text(head + entry("http://127.0.0.1:9", name="one"))
    keys.touch(mode=0o600)
    keys.write_text(OLD)
    command = [sys.executable, "-m", "vllm_kvpool", "router", "--config", str(path)]

    def ids() -> list[str]:
        url = f"http://127.0.0.1:{admin}/replicas"
        try:
            # Without `verify` it costs 1 ms, and else 60: it reads all certificates.
            answer = httpx.get(url, headers={"Authorization": "Bearer t"}, verify=False)
        except httpx.TransportError:
            return []
        return [each["id"] for each in answer.json()["replicas"]]

    def status() -> int:
        headers = {"Authorization": "Bearer the new key of one"}
        url = f"http://127.0.0.1:{front}/tokenize"
        return httpx.post(url, content=b"{}", headers=headers, verify=False).status_code

    async def main(process: subprocess.Popen[bytes]) -> None:
        await until(lambda: ids() == ["one"])
        assert status() == 401
        path.write_text("nonsense")
        keys.write_text(NEW)
        process.send_signal(signal.SIGHUP)
        await until(lambda: status() != 401)
        path.write_text(head + entry("http://127.0.0.1:10", name="two"))
        keys.write_text("nonsense")
        process.send_signal(signal.SIGHUP)
        await until(lambda: ids() == ["two"])

    with subprocess.Popen(command, env=os.environ) as process:
        try:
            run(lambda: main(process))
        finally:
            process.terminate()
    assert process.returncode == 0


def test_what_cannot_be_read_again_keeps_nothing_else_from_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """At a SIGHUP each part is tried, whichever of the others are bad."""
    num_read = [0, 0, 0]

    def part(number: int, why: str = "") -> None:
        num_read[number] += 1
        if why:
            raise ConfigError(why)

    read_again((partial(part, 0, "bad replicas"), partial(part, 1, "bad keys"), partial(part, 2)))
    assert num_read == [1, 1, 1]
    for why in ("bad replicas", "bad keys"):
        assert f"SIGHUP: what could not be read stays as it was: {why}" in caplog.text
