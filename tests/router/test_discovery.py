"""Engines by configuration, file and DNS: what is added, changed and removed, and when."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import httpx
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.router.scenes import Scene
from tests.support.router_rig import run
from tests.support.server_process import free_ports
from tests.support.waiting import until
from vllm_kvpool.errors import ConfigError
from vllm_kvpool.router.config import RouterConfig, read_config
from vllm_kvpool.router.control.events import (
    Added,
    Decode,
    DecodeEnded,
    Event,
    Load,
    Outcome,
    Remove,
    ReplicaLoaded,
    ReplicaSpec,
    SetRole,
)
from vllm_kvpool.router.control.states import Goal, ReplicaId, Role
from vllm_kvpool.router.ops.discovery import Discovery
from vllm_kvpool.router.run import read_again


def entry(url: str, role: str = "decode", name: str = "") -> str:
    return f'[[replicas]]\nurl = "{url}"\nrole = "{role}"\n' + (f'id = "{name}"\n' if name else "")


def config(*urls: str, **discovery: str) -> RouterConfig:
    replicas = [{"url": url, "role": "decode"} for url in urls]
    return read_config({"replicas": replicas, "discovery": discovery})


def added(name: str, url: str, role: Role = Role.DECODE) -> Added:
    return Added(spec=ReplicaSpec(replica_id=ReplicaId(name), url=url), role=role)


class Bench:
    """A controller whose engines load at once, and what it was told by a discovery."""

    def __init__(self) -> None:
        self.scene = Scene()
        self.events: list[Event] = []
        self.decodes: list[Decode] = []
        """Running requests."""

    @asynccontextmanager
    async def discovery(
        self, given: RouterConfig, every_s: float = 60.0
    ) -> AsyncIterator[Discovery]:
        """Start a discovery, and stop it at the end."""
        fleet = self.scene.controller.state.fleet
        discovery = Discovery(given, fleet, self.post, every_s=every_s)
        discovery.start()
        yield discovery
        await discovery.stop()

    def post(self, event: Event) -> None:
        self.step(event)
        self.events.append(event)

    def step(self, event: Event) -> None:
        for action in self.scene.step(event):
            if isinstance(action, Load):
                self.step(ReplicaLoaded(action.replica))
            elif isinstance(action, Decode):
                self.decodes.append(action)

    def arrive(self, name: str) -> None:
        """Let a request arrive, and note the replica that decodes it."""
        self.decodes += [each for each in self.scene.arrived(name) if isinstance(each, Decode)]

    def end(self, decode: Decode) -> None:
        self.decodes.remove(decode)
        self.step(
            DecodeEnded(request_id=decode.request_id, replica=decode.replica, outcome=Outcome.OK)
        )

    @property
    def ids(self) -> dict[str, str]:
        """Ids of the replicas by URL."""
        return {each.spec.url: each.replica_id for each in self.scene.controller.state.fleet}


async def test_configuration_that_is_read_again_changes_its_own_replicas_alone() -> None:
    bench = Bench()
    events = bench.events
    async with bench.discovery(config("http://a:1", "http://b:1/")) as discovery:
        assert events == [added("replica-1", "http://a:1"), added("replica-2", "http://b:1")]
        discovery.reload(config("http://a:1", "http://b:1"))
        assert len(events) == 2
        flipped = {"url": "http://b:1", "role": "prefill"}
        new = {"url": "http://c:1", "role": "decode", "id": "c"}
        discovery.reload(read_config({"replicas": [flipped, new]}))
        assert events[2:] == [
            Remove(ReplicaId("replica-1")),
            SetRole(ReplicaId("replica-2"), Role.PREFILL),
            added("c", "http://c:1"),
        ]


A, B, C, D = (f"http://{name}:1" for name in "abcd")
# The entries of a file (`a=x`: with this id), those that it has later, and their ids then.
NAMES = """
first goes, last comes: a b -> b c: b=2 c=1
first comes: a b -> c a b: a=1 b=2 c=3
all change places: a b c -> c a b: a=1 b=2 c=3
several come in front: a b -> c d b a: a=1 b=2 c=3 d=4
all are others: a b -> c d: c=1 d=2
given id like a default: b -> a=2 b c: a=2 b=1 c=3
given id of a later place: a=2 b -> a=2 b: a=2 b=1
default that a later one is given: d -> a c=1: c=1 a=2
mixed: a=x b -> a=x b: a=x b=2
"""


def named(text: str) -> dict[str, str]:
    """Return ids by URL; the number 2 stands for `replica-2`."""
    pairs = [each.partition("=") for each in text.split()]
    return {
        f"http://{url}:1": f"replica-{name}" if name.isdigit() else name for url, _, name in pairs
    }


def entries(of: Mapping[str, str] | Sequence[Mapping[str, object]]) -> RouterConfig:
    """Return a configuration with these engines, given as ids by URL or as fields."""
    if isinstance(of, Mapping):
        of = [{"url": url, "id": name} for url, name in of.items()]
    return read_config({"replicas": [{"role": "decode", **each} for each in of]})


@pytest.mark.parametrize("case", NAMES.strip().splitlines())
async def test_replica_without_an_id_keeps_its_name_and_a_new_one_gets_a_free_one(
    case: str, caplog: pytest.LogCaptureFixture
) -> None:
    _, change, ids = case.split(": ")
    before, after = map(named, change.split(" -> "))
    bench = Bench()
    async with bench.discovery(entries(before)) as discovery:
        discovery.reload(entries(after))
        assert bench.ids == named(ids)
        num_events = len(bench.events)
        discovery.reload(entries(after))
        assert len(bench.events) == num_events
        assert not caplog.messages


async def test_engine_that_is_refused_while_another_drains_is_added_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its id is that of an engine which still answers a request; no file or name is watched."""
    bench = Bench()
    async with bench.discovery(entries({A: "d"}), every_s=0.001) as discovery:
        bench.arrive("r")
        discovery.reload(entries({B: "d"}))
        await asyncio.sleep(0.01)
        assert bench.ids == {A: "d"}
        said = "engine d at http://b:1 is not added, and is tried again: d at"
        assert caplog.text.count(said) == 1
        bench.end(*bench.decodes)
        await until(lambda: bench.ids == {B: "d"})


@pytest.mark.parametrize(
    ("changed", "names"),
    [
        ({"start": ["new"], "stop": ["old"]}, "start"),
        ({"start": ["old"], "stop": ["new"]}, "stop"),
        ({"start": ["new"], "stop": ["new"]}, "start and stop"),
        ({"start": ["old"], "stop": ["old"], "id": "b"}, "id"),
        ({"id": "b"}, "start and stop and id"),
    ],
)
async def test_change_that_a_replica_cannot_take_is_named_once_until_it_is_taken_back(
    changed: dict[str, object], names: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = {"url": A, "start": ["old"], "stop": ["old"]}
    bench = Bench()
    async with bench.discovery(entries([first])) as discovery:
        warning = f"engine replica-1 at {A} keeps its {names}: take it out of its source"
        for each, count in ((changed, 1), (changed, 1), (first, 1), (changed, 2)):
            discovery.reload(entries([{"url": A, **each}]))
            assert caplog.text.count(warning) == count
        assert len(bench.events) == 1
        discovery.reload(entries({B: ""}))
        discovery.reload(entries([{"url": A, **changed}, {"url": B}]))
        assert bench.ids[A] == changed.get("id", "replica-2")
        assert len(caplog.messages) == 2


async def test_replica_that_a_person_has_added_under_a_known_id_is_left_alone() -> None:
    bench = Bench()
    async with bench.discovery(entries({A: "x", B: ""})) as discovery:
        bench.step(Remove(ReplicaId("x")))
        bench.step(added("x", C))
        discovery.reload(entries([{"url": A, "id": "x", "role": "prefill"}, {"url": B}]))
        discovery.reload(entries({B: ""}))
        assert bench.ids == {B: "replica-2", C: "x"}
        assert bench.events[2:] == []


URLS = (A, B, C, D)
IDS = ("", "", "replica-2", "x")


class Reloads(RuleBasedStateMachine):
    """A configuration that changes while requests come and end."""

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench()
        fleet = self.bench.scene.controller.state.fleet
        self.discovery = Discovery(entries({A: ""}), fleet, self.bench.post, every_s=60.0)
        self.wanted: dict[str, str] = {}
        self.specs: set[ReplicaSpec] = set()
        """Replicas that remained, without a pending removal, after the last step."""
        self.number = 0

    @rule(
        engines=st.lists(
            st.tuples(st.sampled_from(URLS), st.sampled_from(IDS)),
            min_size=1,
            unique_by=(lambda each: each[0], lambda each: each[1] or each[0]),
        )
    )
    def reload(self, engines: list[tuple[str, str]]) -> None:
        self.wanted = dict(engines)
        self.discovery.reload(entries(self.wanted))

    @rule()
    def arrive(self) -> None:
        self.number += 1
        self.bench.arrive(f"r{self.number}")

    @precondition(lambda self: self.bench.decodes)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.bench.end(data.draw(st.sampled_from(self.bench.decodes)))

    @rule()
    def settle(self) -> None:
        """Let requests end, replicas leave, and refused engines be tried again."""
        while self.bench.decodes:
            self.bench.end(self.bench.decodes[0])
        self.discovery._apply()
        self.discovery._apply()
        missing = self.wanted.keys() - self.bench.ids.keys()
        # The id that the file gives it is another replica's, which stays.
        others = {self.wanted[url] for url in missing}
        assert "" not in others
        assert others <= set(self.bench.ids.values())
        assert self.bench.ids.keys() <= self.wanted.keys()

    @invariant()
    def ids_are_unique(self) -> None:
        assert len(set(self.bench.ids.values())) == len(self.bench.ids)

    @invariant()
    def what_stays_in_the_file_stays_a_replica(self) -> None:
        fleet = self.bench.scene.controller.state.fleet
        specs = {each.spec for each in fleet if each.goal is not Goal.REMOVE}
        assert all(each in specs for each in self.specs if each.url in self.wanted)
        self.specs = specs


TestReloads = Reloads.TestCase
TestReloads.settings = settings(stateful_step_count=30)


async def test_a_file_is_watched_and_one_that_is_wrong_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "engines.toml"
    bench = Bench()
    events = bench.events

    def write(text: str) -> None:
        new = tmp_path / "new"
        new.write_text(text)
        new.replace(path)

    async with bench.discovery(config(file=str(path)), every_s=0.01):
        await until(lambda: "discovery.file: " in caplog.text)
        write(entry("http://a:1", "prefill") + entry("http://b:1", name="b"))
        await until(lambda: len(events) == 2)
        assert set(events) == {added("a:1", A, Role.PREFILL), added("b", B)}
        for wrong, said in (
            (entry("http://b:1", "decoder"), "choose one of prefill, decode, both"),
            (entry("http://b:1/v1"), "without /v1"),
            (entry("http://b:1", name="b c"), "id is 'b c'"),
            (entry("http://b:1", "spare"), "write how to start it (start)"),
            (entry("http://b:1") + 'start = ["go"]\n', "start without stop"),
        ):
            write(wrong)
            await until(lambda said=said: said in caplog.text)
        path.unlink()
        await asyncio.sleep(0.05)
        assert len(events) == 2
        write(entry("http://b:1", name="b"))
        await until(lambda: len(events) == 3)
        assert events[2] == Remove(ReplicaId("a:1"))


async def test_a_file_that_is_being_written_is_left_alone(tmp_path: Path) -> None:
    """A truncated one names fewer engines, or none, and is good TOML all the same."""
    path = tmp_path / "engines.toml"
    bench = Bench()
    events = bench.events

    path.write_text(entry("http://a:1") + entry("http://b:1"))
    async with bench.discovery(config(file=str(path)), every_s=0.02):
        await until(lambda: len(events) == 2)
        for number in range(20):
            path.write_text(f"{entry('http://a:1')}{'#' * number}\n")
            await asyncio.sleep(0.005)
        path.write_text(entry("http://a:1") + entry("http://b:1") + entry("http://c:1"))
        await until(lambda: len(events) == 3)
        assert events[2] == added("c:1", "http://c:1")
        path.write_text("")
        await until(lambda: len(events) == 6)


async def test_each_address_of_a_name_is_an_engine(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    events = bench.events
    given = config(prefill_dns="localhost:8100", decode_dns="no-such-name.invalid:8200")
    async with bench.discovery(given, every_s=0.01):
        await until(lambda: "no-such-name.invalid:8200 cannot be resolved" in caplog.text)
        await until(lambda: events)
        await asyncio.sleep(0.05)
        assert added("127.0.0.1:8100", "http://127.0.0.1:8100", Role.PREFILL) in events
        assert len(events) == len(set(events)) <= 2, "each once"
    assert caplog.text.count("cannot be resolved") == 1


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
