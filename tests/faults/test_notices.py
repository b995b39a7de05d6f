"""Notices of a prefill engine about a prompt that it hands over.

Whatever happens, they report no more than the stored chunks, and at last the prompt's end.
"""

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace

import pytest

from tests.faults.audit import check_nothing_leaked
from tests.faults.model import WINDOWS, FakeModel
from tests.faults.rank import pool_in
from tests.faults.rig import CHUNK, Rig, RigSpec
from tests.faults.scene import tokens
from tests.faults.workshop import WITH_STATES, WITH_WINDOWS, Workshop
from tests.handover.clients import LOST, Client, Heard, wait_for
from tests.support.faults import Fault
from tests.support.seeds import seeds
from tests.support.server_process import free_ports
from tests.support.worker_steps import prompt_hashes
from vllm_kvpool.identity.chunk_hash import ChunkChain, RequestIdentity
from vllm_kvpool.network.allowed_peers import Allowed, Refused
from vllm_kvpool.storage.base import Store
from vllm_kvpool.transfer.ops import DropSaves

WHOLE_CHUNKS = 6
CHUNKS = WHOLE_CHUNKS + 1  # with the prompt's end
PROMPT = [3 + 7 * i % 900 for i in range(WHOLE_CHUNKS * CHUNK + 5)]
STEP_TOKENS = 48
LIMIT_S = 60.0
SPEC = RigSpec(max_batched_tokens=STEP_TOKENS)


def named(prompt: Sequence[int]) -> tuple[bytes, list[bytes]]:
    """Return a prompt's topic, and the hashes of its chunks up to its end."""
    chain = ChunkChain(CHUNK, RequestIdentity())
    chain.extend(prompt)
    topic, end = chain.topic(prompt), chain.end(prompt)
    assert topic is not None
    return topic, [*chain.hashes, *([end] if end else [])]


class Watcher:
    """A prefill engine, and a client that waits for notices of `PROMPT` and checks each of them."""

    def __init__(
        self, workshop: Workshop, spec: RigSpec = SPEC, near_stores: Sequence[str] = ()
    ) -> None:
        url = workshop.memory()
        self.rig = workshop.rig(spec, [*near_stores, url], "prefill")
        self.client = Client()
        self._store = workshop.plain_store(url)
        self.topic, self._hashes = named(PROMPT)
        self.heard: list[Heard] = []
        self.client.watch(self.endpoints, self.topic)

    @property
    def endpoints(self) -> list[str]:
        return [rank.part._notices.endpoint for rank in self.rig.ranks]  # type: ignore[union-attr]

    def hand_over(self, **options: object) -> str:
        return self.rig.add(PROMPT, 1, hand_over=True, **options)

    def run(self) -> None:
        self.rig.run(LIMIT_S)
        self.rig.settle()
        self.rig.step()

    def hears_end(self, *, is_reset: bool = False) -> tuple[int, int]:
        """Check each notice until all chunks up to the end are stored. Return the last (stored,
        ended)."""
        names = self.rig.pool._service.core._names
        while True:
            topic, *state = self.client.hears()
            assert topic == self.topic
            stored, ended = state
            assert isinstance(stored, int)
            for chunk_hash in () if is_reset else self._hashes[:stored]:
                assert all(self._store.exists(names.of_chunk(chunk_hash))), state
            if ended is not None:
                assert isinstance(ended, int)
                assert ended >= stored
                if stored == ended:
                    return stored, ended

    def close(self) -> None:
        self.client.close()


@pytest.fixture
def watcher(workshop: Workshop) -> Iterator[Watcher]:
    with closing(Watcher(workshop)) as made:
        yield made


@pytest.mark.parametrize(
    "spec", [SPEC, replace(SPEC, tp=2), replace(SPEC, model=WINDOWS)], ids=["tp1", "tp2", "windows"]
)
def test_decode_hears_each_chunk_and_the_end(workshop: Workshop, spec: RigSpec) -> None:
    with closing(Watcher(workshop, spec)) as watcher:
        request = watcher.hand_over()
        watcher.run()
        assert watcher.hears_end() == (CHUNKS, CHUNKS)
        params = watcher.rig.answers[request].params
        assert params is not None
        assert params["kvpool"] == {"tokens": len(PROMPT), "notices": watcher.endpoints}
        check_nothing_leaked(watcher.rig)
        for rank in watcher.rig.ranks:
            assert rank.executor is not None
            assert not rank.executor.engine.saves.progress._hand_overs


def test_endpoints_are_in_the_metrics_and_the_answer_of_a_hand_over_alone(
    watcher: Watcher,
) -> None:
    plain = watcher.rig.add(PROMPT, 1)
    watcher.run()
    assert watcher.rig.answers[plain].params == {"kvpool": {"tokens": WHOLE_CHUNKS * CHUNK}}
    (endpoint,) = watcher.endpoints
    label = f"endpoint={endpoint}"
    assert watcher.rig.count("kvpool_notices_info", "rank=0") == 1
    assert watcher.rig.count("kvpool_notices_info", label) == 1
    assert watcher.client.hears_nothing(), "nobody has handed it over"


def test_prompt_that_the_pool_has_already_is_told_whole(watcher: Watcher) -> None:
    watcher.hand_over()
    watcher.run()
    assert watcher.hears_end() == (CHUNKS, CHUNKS)
    watcher.rig.reset()
    watcher.client.unwatch(watcher.topic)
    watcher.hand_over()
    watcher.run()
    watcher.client.watch(watcher.endpoints, watcher.topic)
    assert watcher.hears_end() == (CHUNKS, CHUNKS)


@pytest.mark.parametrize("chunk", [0, 2, WHOLE_CHUNKS])
def test_put_that_fails_ends_the_hand_over_there(
    workshop: Workshop, watcher: Watcher, chunk: int
) -> None:
    workshop.faults.inject(Fault.FULL, "put", key=watcher._hashes[chunk].hex())
    watcher.hand_over()
    watcher.run()
    assert watcher.hears_end() == (chunk, chunk)


def test_request_that_ends_before_it_is_hashed_ends_the_hand_over(
    watcher: Watcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before that, the prompt has no name."""
    lookups, hashed = watcher.rig.pool._service, threading.Event()
    begin = lookups._begin
    monkeypatch.setattr(lookups, "_begin", lambda *given: (hashed.wait(LIMIT_S), begin(*given))[1])
    request = watcher.hand_over()
    watcher.rig.step()
    watcher.rig.abort(request)
    assert pool_in(watcher.rig.scheduler.connector).has_pending_push_work()
    hashed.set()
    watcher.run()
    while pool_in(watcher.rig.scheduler.connector).has_pending_push_work():
        watcher.rig.step()
    assert watcher.hears_end() == (0, 0)
    check_nothing_leaked(watcher.rig)


@pytest.mark.parametrize("chunks", [0, 1, 3])
@pytest.mark.parametrize("end", ["abort", "weights change"])
def test_request_that_ends_early_ends_the_hand_over_with_what_is_stored(
    watcher: Watcher, end: str, chunks: int
) -> None:
    """The request ends before any chunk is planned, or between chunks."""
    request = watcher.hand_over()
    state = watcher.rig.pool._requests[request]
    watcher.rig.run(LIMIT_S, until=lambda: state.chain is not None and state.next_save >= chunks)
    if end == "weights change":
        watcher.rig.step()  # it has computed something
        watcher.rig.pool.weights_changed("other")
    else:
        watcher.rig.abort(request)
        assert pool_in(watcher.rig.scheduler.connector).has_pending_push_work(), "workers are told"
    watcher.run()
    stored, _ = watcher.hears_end()
    assert stored < CHUNKS
    check_nothing_leaked(watcher.rig)


def test_request_that_may_not_be_saved_any_more_ends_the_hand_over_while_it_runs(
    watcher: Watcher,
) -> None:
    request = watcher.rig.add(PROMPT, 200, hand_over=True)
    state = watcher.rig.pool._requests[request]
    watcher.rig.run(LIMIT_S, until=lambda: state.next_save > 1)
    watcher.rig.pool.weights_changed("other")
    watcher.rig.step()
    watcher.rig.step()
    stored, _ = watcher.hears_end()
    assert stored < CHUNKS
    assert not watcher.rig.answers[request].ended
    watcher.run()


def test_reset_ends_the_hand_over_of_what_is_computed(watcher: Watcher) -> None:
    request = watcher.hand_over()
    watcher.rig.run(LIMIT_S, until=lambda: watcher.rig.pool._requests[request].next_save > 1)
    assert watcher.rig.pool.reset()
    watcher.run()
    stored, _ = watcher.hears_end(is_reset=True)
    assert stored < CHUNKS


def test_request_that_is_preempted_goes_on_and_tells_all_of_it(watcher: Watcher) -> None:
    watcher.hand_over()
    for _ in range(3):
        watcher.rig.step()
    watcher.rig.reset(running=True)
    watcher.run()
    assert watcher.hears_end() == (CHUNKS, CHUNKS)


def test_other_request_of_the_same_prompt_goes_on(watcher: Watcher) -> None:
    first = watcher.hand_over()
    watcher.rig.step()
    second = watcher.hand_over()
    pool = watcher.rig.pool

    def is_known() -> bool:
        pool._take_answers()
        return pool._requests[second].chain is not None

    wait_for(is_known)
    watcher.rig.step()
    watcher.rig.abort(first)
    watcher.run()
    assert watcher.hears_end() == (CHUNKS, CHUNKS)


def test_store_that_is_away_ends_the_hand_over(workshop: Workshop, watcher: Watcher) -> None:
    workshop.faults.inject(Fault.ERROR, "put")
    watcher.hand_over()
    watcher.run()
    assert watcher.hears_end() == (0, 0)


@pytest.mark.parametrize("steps", [0, 2])
def test_engine_that_ends_is_lost(watcher: Watcher, steps: int) -> None:
    watcher.hand_over()
    for _ in range(steps):
        watcher.rig.step()
    watcher.rig.shutdown()
    while watcher.client.hears() != (watcher.topic, LOST):
        pass


def test_transfer_engine_that_fails_is_lost(
    watcher: Watcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    watcher.hand_over()
    watcher.rig.step()
    executor = watcher.rig.ranks[0].executor
    assert executor is not None
    monkeypatch.setattr(executor.engine, "step", lambda event, now: 1 / 0)
    watcher.run()
    while watcher.client.hears() != (watcher.topic, LOST):
        pass


def test_option_says_where_notices_are_told(workshop: Workshop) -> None:
    (port,) = free_ports(1)
    options = {"notice_listen": f"tcp://127.0.0.1:{port}"}
    rig = workshop.rig(replace(SPEC, options=options), workshop.memory())
    request = rig.add(PROMPT, 1, hand_over=True)
    rig.run(LIMIT_S)
    params = rig.answers[request].params
    assert params is not None
    assert params["kvpool"]["notices"] == [options["notice_listen"]]


@pytest.mark.parametrize("peers", [[], ["10.1.2.0/24"]])
def test_option_says_which_hosts_are_answered_and_connected_to(
    workshop: Workshop, peers: list[str]
) -> None:
    rig = workshop.rig(replace(SPEC, options={"allowed_peers": peers}), workshop.memory())
    server = rig.ranks[0].part._notices
    assert server is not None
    assert server._allowed.allows_address("10.1.2.3") is bool(peers)
    open_notices = rig.pool._service._open_notices
    with closing(open_notices(lambda *_: None, lambda _: None)) as client:  # type: ignore[misc]
        judged = client._allowed.judge("tcp://10.1.2.3:7000")  # type: ignore[attr-defined]
        assert isinstance(judged, Allowed if peers else Refused)


def test_write_back_puts_a_prompt_that_is_handed_over_at_once(workshop: Workshop) -> None:
    url = workshop.memory()
    options = {"write_policy": "back"}
    rig = workshop.rig(replace(SPEC, options=options), ["host://4MiB", url], "prefill")
    store, names = workshop.plain_store(url), rig.pool._service.core._names
    for is_handed_over, prompt in ((False, PROMPT[::-1]), (True, PROMPT)):
        rig.add(prompt, 1, hand_over=is_handed_over)
        rig.run(LIMIT_S)
        rig.settle()
        stored = [all(store.exists(names.of_chunk(each))) for each in prompt_hashes(prompt, CHUNK)]
        assert stored == [is_handed_over] * WHOLE_CHUNKS
    check_nothing_leaked(rig)


@WITH_WINDOWS
@pytest.mark.parametrize("windows", [(), (40, 40)], ids=["full", "windows"])
def test_chunks_that_leave_host_memory_after_the_lookup_end_the_hand_over_at_once(
    workshop: Workshop, windows: tuple[int, ...]
) -> None:
    """vLLM's own cache has the prompt, so only cells in host memory could be put."""
    model = FakeModel(windows=windows)
    spec = replace(SPEC, model=model, options={"write_policy": "back"})
    with closing(Watcher(workshop, spec, ["host://1MiB"])) as watcher:
        rig = watcher.rig
        rig.add(PROMPT, 1)
        watcher.run()
        request = rig.add(PROMPT, 60, hand_over=True)
        wait_for(lambda: bool(rig.pool._service._results))
        (executor,) = rig.executors
        executor.post(DropSaves(forget=True))
        rig.run(LIMIT_S, until=lambda: rig.pool._requests[request].next_save == WHOLE_CHUNKS)
        rig.settle()
        heard = watcher.client.hears()
        while heard[-1] is None:
            heard = watcher.client.hears()
        assert heard[1:] == (0, 0)
        assert not rig.answers[request].ended
        watcher.run()
        check_nothing_leaked(rig)


ROUNDS = 8
NUM_BLOCKS = (96, 384)  # the smaller is too small to pin several prompts at once
SHARED = (  # prompts with common first chunks that end inside a chunk, at its end or earlier
    PROMPT,
    PROMPT[: 4 * CHUNK + 9],
    PROMPT[: 4 * CHUNK],
    PROMPT[: 3 * CHUNK] + tokens(1, 2 * CHUNK + 20),
    PROMPT[: 3 * CHUNK] + tokens(2, CHUNK + 3),
    tokens(3, 2 * CHUNK + 11),
)
MODELS = {"plain": FakeModel(), "windows": WINDOWS}


class Told:
    """The notices of an engine with one rank. Each notice is compared with the store as it is
    sent."""

    def __init__(self, workshop: Workshop, rig: Rig, url: str, patch: pytest.MonkeyPatch) -> None:
        self.store = workshop.plain_store(url)
        self.names = rig.pool._service.core._names
        self.hashes = dict(map(named, SHARED))
        self.topics = list(self.hashes)
        self.last: dict[bytes, tuple[int, int | None]] = {}
        self.wrong: list[str] = []
        (rank,) = rig.ranks
        patch.setattr(rank.part._notices, "tell", self._tell)  # type: ignore[union-attr]

    def keys_of(self, chunk_hash: bytes) -> list[str]:
        return list(self.names.of_chunk(chunk_hash, self.names.anchor))

    def _tell(self, topic: bytes, stored: int, ended: int | None) -> None:
        """Take a notice, in the engine's thread."""
        has = [all(self.store.exists(self.keys_of(each))) for each in self.hashes[topic]]
        if not all(has[:stored]):
            self.wrong.append(f"told {stored} of {has}")
        self.last[topic] = stored, ended


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("host", [[], ["host://1MiB"]], ids=["no host tier", "host tier"])
@pytest.mark.parametrize("policy", ["through", "back"])
@pytest.mark.parametrize("seed", seeds(4, 24))
def test_requests_over_shared_prefixes_are_told_as_stored_only_with_what_the_store_has(
    workshop: Workshop,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    policy: str,
    host: list[str],
    model: str,
) -> None:
    """Requests with and without hand-over run together, while chunks and caches are lost and puts
    fail. Without a failed put, and with enough blocks, every prompt is stored whole.

    With windows, a save has no pages of chunks that host memory had at the lookup. If they leave it
    meanwhile, the hand-over ends early.
    """
    rng, url = random.Random(seed), workshop.memory()
    num_blocks, options = rng.choice(NUM_BLOCKS), {"write_policy": policy}
    may_end_early = num_blocks < max(NUM_BLOCKS) or bool(host and model == "windows")
    spec = replace(SPEC, model=MODELS[model], num_blocks=num_blocks, options=options)
    rig = workshop.rig(spec, [*host, url], "prefill")
    told = Told(workshop, rig, url, monkeypatch)
    for _ in range(ROUNDS):
        if rng.random() < 0.6:
            rig.reset()
        for chunk_hash in dict.fromkeys(each for hashes in told.hashes.values() for each in hashes):
            if rng.random() < 0.3:
                told.store.remove(told.keys_of(chunk_hash))
        fails = rng.random() < 0.3
        if fails:
            workshop.faults.inject(Fault.FULL, "put", times=rng.randrange(1, 12))
        handed_over = set()
        for _ in range(rng.randrange(1, 4)):
            number, is_handed_over = rng.randrange(len(SHARED)), rng.random() < 0.6
            rig.add(SHARED[number], rng.randrange(1, 3), hand_over=is_handed_over)
            if is_handed_over:
                handed_over.add(told.topics[number])
            for _ in range(rng.randrange(3)):
                rig.step()
        rig.run(LIMIT_S)
        rig.settle()
        rig.step()
        rig.settle()
        workshop.faults.heal()
        assert not told.wrong
        for topic in handed_over:
            stored, ended = told.last[topic]
            whole = len(told.hashes[topic])
            assert stored == ended
            assert stored == whole or may_end_early or fails
        told.last.clear()
    check_nothing_leaked(rig)


ALL_MODELS = {**MODELS, "states": FakeModel(layers=4, states=(0, 2))}


def lose_nothing(store: Store, rig: Rig) -> None:
    """Remove nothing: the store has no chunk yet."""


def lose_all(store: Store, rig: Rig) -> None:
    assert store.remove_namespace(rig.pool._service.core._names.namespace)


@pytest.mark.parametrize(
    "model",
    [
        "plain",
        pytest.param("windows", marks=WITH_WINDOWS),
        pytest.param("states", marks=WITH_STATES),
    ],
)
@pytest.mark.parametrize(("policy", "lose"), [("back", lose_nothing), ("through", lose_all)])
@pytest.mark.parametrize("keeps_blocks", [False, True])
def test_prompt_that_host_memory_alone_has_is_loaded_by_the_engine_it_is_handed_to(
    workshop: Workshop,
    model: str,
    policy: str,
    lose: Callable[[Store, Rig], None],
    *,
    keeps_blocks: bool,
) -> None:
    """Prefill loads the prompt from host memory, or has it in its own cache."""
    url, spec = (
        workshop.memory(),
        replace(SPEC, model=ALL_MODELS[model], num_blocks=max(NUM_BLOCKS)),
    )
    rig = workshop.rig(replace(spec, options={"write_policy": policy}), ["host://4MiB", url])
    rig.add(PROMPT, 1)
    rig.run(LIMIT_S)
    rig.settle()
    lose(workshop.plain_store(url), rig)
    if not keeps_blocks:
        rig.reset()
    request = rig.add(PROMPT, 1, hand_over=True)
    rig.run(LIMIT_S)
    rig.settle()
    params = rig.answers[request].params
    assert params is not None
    decode = workshop.rig(spec, url, "decode")
    decode.add(PROMPT, 2, **params["kvpool"])
    decode.run(LIMIT_S)
    assert decode.count("kvpool_hit_tokens") >= WHOLE_CHUNKS * CHUNK
    check_nothing_leaked(rig)
