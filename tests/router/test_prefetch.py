"""Which cells are brought where: told once, by few processes, while somebody loads."""

from collections.abc import Mapping

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from vllm_kvpool.identity.cell_names import ChunkNames, KeyPrefix
from vllm_kvpool.router.control import prefetch
from vllm_kvpool.router.control.events import ReplicaSpec
from vllm_kvpool.router.control.fleet import Fleet
from vllm_kvpool.router.control.prefetch import (
    MAX_HOSTS,
    Begin,
    Bring,
    End,
    HostPrefetches,
    KnownCells,
    Wish,
)
from vllm_kvpool.router.control.prefix_index import SPAN_BYTES
from vllm_kvpool.router.control.requests import Ask, Request, RequestId
from vllm_kvpool.router.control.states import Cause, ReplicaId

STEMS = (KeyPrefix("a@", 100),)
LONG, OTHER, UNKNOWN = (1, 2), (1, 3), (9,)


def known() -> KnownCells:
    """A prompt of four chunks, and one that begins alike, which has three."""
    cells = KnownCells()
    cells.learn(LONG, 2 * SPAN_BYTES, ChunkNames(STEMS, ("a", "b", "c", "d")))
    cells.learn(OTHER, 2 * SPAN_BYTES, ChunkNames(STEMS, ("a", "b", "x")))
    return cells


def bring(host: str, *chunks: str) -> Bring:
    return Bring(host, ChunkNames(STEMS, chunks))


def test_a_process_lives_from_the_first_known_prompt_until_nobody_loads() -> None:
    plan = HostPrefetches(["h"], known())
    assert plan.step({}) == []
    assert plan.step({"h": []}) == []
    assert plan.step({"h": [UNKNOWN]}) == []
    assert plan.step({"h": [UNKNOWN, LONG]}) == [Begin("h"), bring("h", "a", "b", "c", "d")]
    assert plan.step({"h": [LONG]}) == []
    assert plan.step({"h": [LONG, OTHER]}) == [bring("h", "x")]
    assert plan.step({"h": []}) == []
    assert plan.step({}) == [End("h")]
    assert plan.step({}) == []
    # The next time all is told again.
    assert plan.step({"h": [OTHER]}) == [Begin("h"), bring("h", "a", "b", "x")]


def test_one_that_has_ended_is_left_alone_until_nobody_loads() -> None:
    plan = HostPrefetches(["h"], known())
    plan.step({"h": [OTHER]})
    plan.ended("h")
    assert plan.step({"h": [LONG]}) == []
    assert plan.step({}) == []
    plan.ended("h")
    assert plan.step({"h": [LONG]})[0] == Begin("h")


def test_what_was_learned_meanwhile_is_told() -> None:
    cells = KnownCells()
    plan = HostPrefetches(["h"], cells)
    assert plan.step({"h": [UNKNOWN]}) == []
    cells.learn(UNKNOWN, SPAN_BYTES, ChunkNames(STEMS, ("u",)))
    assert plan.step({"h": [UNKNOWN]}) == [Begin("h"), bring("h", "u")]


def test_there_are_few_processes_and_each_is_told_so_much(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = HostPrefetches([], known())
    wishes = plan.step({f"h{i}": [LONG] for i in range(MAX_HOSTS + 5)})
    assert sum(isinstance(each, Begin) for each in wishes) == MAX_HOSTS
    monkeypatch.setattr(prefetch, "MAX_TOLD_CHUNKS", 4)
    assert not any(isinstance(each, Bring) for each in plan.step({"h0": [OTHER]}))


def fleet_of(*specs: ReplicaSpec) -> Fleet:
    fleet = Fleet()
    for spec in specs:
        replica = fleet.add(spec, 0.0)
        fleet.move(replica, Cause.TAKE_OVER, "test", 0.0)
        ask = Ask(request_id=RequestId("r"), prompt_tokens=10, max_output_tokens=1, prefix=LONG)
        replica.assign(Request(ask, 0.0, 1))
    return fleet


def spec(name: str, host: str, *, is_ours: bool = True) -> ReplicaSpec:
    return ReplicaSpec(replica_id=ReplicaId(name), url=f"http://{name}", host=host, is_ours=is_ours)


def test_only_replicas_of_ours_on_hosts_where_it_makes_sense() -> None:
    fleet = fleet_of(
        spec("a", "near"), spec("b", "near"), spec("c", "far"), spec("d", "near2", is_ours=False)
    )
    plan = HostPrefetches(["near", "near2"], known())
    assert plan.look(fleet) == [Begin("near"), bring("near", "a", "b", "c", "d")]
    for replica in fleet:
        fleet.move(replica, Cause.FAIL, "test", 1.0)
    assert plan.look(fleet) == [End("near")]
    assert plan.look(fleet) == []


class Hosts(RuleBasedStateMachine):
    """Whatever binds, ends and is learned: one process a host, each chunk told it once."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = KnownCells()
        self.plan = HostPrefetches([], self.cells)
        self.running: dict[str, set[str]] = {}
        self.loading: set[str] = set()

    @rule(prefix=st.lists(st.integers(0, 2), min_size=1, max_size=3), salt=st.integers(0, 1))
    def learn(self, prefix: list[int], salt: int) -> None:
        spans = tuple(hash(tuple(prefix[: i + 1])) for i in range(len(prefix)))
        chunks = tuple(f"{prefix[: i + 1]}{salt}" for i in range(len(prefix)))
        self.cells.learn(spans, len(prefix) * SPAN_BYTES, ChunkNames(STEMS, chunks))

    @rule(
        bound=st.dictionaries(
            st.sampled_from([f"h{i}" for i in range(4)]),
            st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=3), max_size=3),
        )
    )
    def step(self, bound: Mapping[str, list[list[int]]]) -> None:
        given = {
            host: [tuple(hash(tuple(each[: i + 1])) for i in range(len(each))) for each in prompts]
            for host, prompts in bound.items()
        }
        self.loading = set(given)
        for wish in self.plan.step(given):
            self.perform(wish)

    def perform(self, wish: Wish) -> None:
        match wish:
            case Begin(host):
                assert host not in self.running
                self.running[host] = set()
            case Bring(host, names):
                assert names.chunks
                assert not self.running[host] & set(names.chunks)
                self.running[host] |= set(names.chunks)
            case End(host):
                del self.running[host]

    @rule(host=st.sampled_from([f"h{i}" for i in range(4)]))
    def ends_by_itself(self, host: str) -> None:
        if self.running.pop(host, None) is not None:
            self.plan.ended(host)

    @invariant()
    def bounded(self) -> None:
        assert self.running.keys() <= self.loading
        assert len(self.running) <= prefetch.MAX_HOSTS


TestHosts = Hosts.TestCase
