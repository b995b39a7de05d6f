"""The probe: answers that a thread of its own gets from the store."""

import logging
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from vllm_kvpool.hashing import ChunkChain, RequestIdentity
from vllm_kvpool.keys import ContextRank, HeadPart, KeyMaker, LayerSpan, make_namespace
from vllm_kvpool.layout.topology import Topology
from vllm_kvpool.pool.lookup import CellNames
from vllm_kvpool.pool.probe import MAX_KEYS_PER_ROUND, Answer, Lookup, LookupOutcome, Probe
from vllm_kvpool.store.memory import MemoryStore
from vllm_kvpool.testing.fakes import Fault, FaultyStore
from vllm_kvpool.testing.memory import make_buffer

CHUNK = 4
NAMESPACE = make_namespace("model", "0" * 12)
TOPOLOGY = Topology(2, 1, ((0, 4),), 2)
NAMES = CellNames(NAMESPACE, TOPOLOGY, ContextRank())
TOKENS = tuple(range(40))
NUM_CHUNKS = len(TOKENS) // CHUNK
LIMIT_S = 30.0
ANSWERED, STORE_ERROR = LookupOutcome.ANSWERED, LookupOutcome.STORE_ERROR
UNSHAREABLE = LookupOutcome.UNSHAREABLE


def chain_of(tokens: tuple[int, ...] = TOKENS) -> ChunkChain:
    chain = ChunkChain(CHUNK, RequestIdentity())
    chain.extend(tokens)
    return chain


class Pool:
    """A probe over a store that holds what the test puts there."""

    def __init__(self) -> None:
        self.memory = MemoryStore("", 1 << 20)
        self.store = FaultyStore(self.memory)
        self.probe = Probe(self.store, NAMES, CHUNK)

    def hold(self, chunks: range, *, but: int = -1) -> None:
        """Store the cells of those chunks, except the cell number `but` of each."""
        hashes = chain_of().hashes
        keys = [
            key
            for chunk in chunks
            for i, key in enumerate(NAMES.of_chunk(hashes[chunk]))
            if i != but
        ]
        buffer = make_buffer(1)
        self.memory.put(keys, [buffer] * len(keys), [""] * len(keys))

    def ask(
        self,
        ticket: int = 1,
        *,
        tokens: tuple[int, ...] = TOKENS,
        identify: Callable[[], RequestIdentity | None] = RequestIdentity,
        search: bool = True,
        expect_chunks: int = 0,
        wait_s: float = LIMIT_S,
    ) -> None:
        deadline = time.monotonic() + wait_s
        self.probe.submit(Lookup(ticket, identify, tokens, search, expect_chunks, deadline))

    def answers(self, count: int = 1) -> dict[int, Answer]:
        """Exactly `count` more answers."""
        got: dict[int, Answer] = {}
        while len(got) < count:
            before = len(got)
            self.probe.wait(LIMIT_S)
            got.update({answer.ticket: answer for answer in self.probe.take_answers()})
            assert len(got) > before, "no answer"
        assert len(got) == count
        return got

    def answer(self) -> Answer:
        [answer] = self.answers().values()
        return answer


@pytest.fixture
def pool() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    pool.store.heal()
    assert pool.probe.close()


@pytest.mark.parametrize("stored", range(NUM_CHUNKS + 1))
def test_the_answer_is_the_stored_prefix_and_the_chain(pool: Pool, stored: int) -> None:
    pool.hold(range(stored))
    pool.ask(7)
    answer = pool.answer()
    assert answer.chain is not None
    assert answer.chain.hashes == chain_of().hashes
    assert (answer.ticket, answer.found_chunks, answer.outcome) == (7, stored, ANSWERED)


@pytest.mark.parametrize("cell", range(len(NAMES.of_chunk(b"x"))))
def test_a_chunk_without_one_of_its_cells_is_absent(pool: Pool, cell: int) -> None:
    pool.hold(range(5))
    pool.hold(range(5, 6), but=cell)
    pool.ask()
    assert pool.answer().found_chunks == 5


def test_another_identity_has_other_chunks(pool: Pool) -> None:
    pool.hold(range(NUM_CHUNKS))
    pool.ask(identify=lambda: RequestIdentity(cache_salt="x"))
    assert pool.answer().found_chunks == 0


def test_many_lookups_share_rounds(pool: Pool) -> None:
    pool.hold(range(6))
    pool.store.inject(Fault.BLOCKED, "exists", times=1)
    pool.ask(0)
    assert pool.store.entered.wait(LIMIT_S)
    for ticket in range(1, 50):
        pool.ask(ticket, tokens=TOKENS[: ticket % len(TOKENS)])
    pool.store.release()
    answers = pool.answers(50)
    for ticket in range(1, 50):
        assert answers[ticket].found_chunks == min(6, ticket % len(TOKENS) // CHUNK)
    assert pool.store.calls["exists"] < 10


def test_rounds_are_bounded(pool: Pool) -> None:
    per_lookup = 2 * len(NAMES.of_chunk(b"x"))
    count = MAX_KEYS_PER_ROUND // per_lookup + 20
    pool.store.inject(Fault.BLOCKED, "exists", times=1)
    pool.ask(count)
    assert pool.store.entered.wait(LIMIT_S)
    for ticket in range(count):
        pool.ask(ticket)
    pool.store.release()
    pool.answers(count + 1)
    assert pool.store.max_keys <= MAX_KEYS_PER_ROUND + per_lookup


def test_without_a_search_only_the_chain_is_told(pool: Pool) -> None:
    pool.hold(range(3))
    pool.ask(search=False)
    answer = pool.answer()
    assert answer.chain is not None
    assert (len(answer.chain), answer.found_chunks, answer.outcome) == (NUM_CHUNKS, 0, ANSWERED)
    assert pool.store.calls == {}


def test_less_than_a_chunk_asks_nothing(pool: Pool) -> None:
    pool.ask(tokens=TOKENS[: CHUNK - 1])
    assert pool.answer().outcome is ANSWERED
    assert pool.store.calls == {}


# Waiting for what another engine is putting


def test_a_lookup_waits_for_what_it_expects(pool: Pool) -> None:
    pool.hold(range(2))
    pool.store.inject(Fault.SLOW, "exists")  # counts rounds through `wait`
    rounds = threading.Semaphore(0)
    pool.store._wait = rounds.release
    pool.ask(expect_chunks=5)
    for _ in range(8):
        assert rounds.acquire(timeout=LIMIT_S)
    assert pool.probe.take_answers() == []
    pool.hold(range(2, 7))
    answer = pool.answer()
    assert (answer.found_chunks, answer.outcome) == (7, ANSWERED)


def test_at_the_deadline_it_takes_what_there_is(pool: Pool) -> None:
    pool.hold(range(2))
    began = time.monotonic()
    pool.ask(expect_chunks=5, wait_s=0.05)
    answer = pool.answer()
    assert time.monotonic() - began >= 0.05
    assert (answer.found_chunks, answer.outcome) == (2, ANSWERED)


def test_more_than_the_prompt_is_not_waited_for(pool: Pool) -> None:
    pool.hold(range(NUM_CHUNKS))
    pool.ask(expect_chunks=NUM_CHUNKS + 1)
    assert pool.answer().found_chunks == NUM_CHUNKS


def test_one_that_waits_does_not_hold_up_others(pool: Pool) -> None:
    pool.ask(1, expect_chunks=5)
    pool.hold(range(1))
    pool.ask(2)
    assert pool.answers()[2].found_chunks == 1
    pool.hold(range(5))
    assert pool.answers()[1].found_chunks == 5


# Faults


@pytest.mark.parametrize("fault", [Fault.ERROR, Fault.UNREACHABLE, Fault.CRASH])
def test_a_store_that_fails_is_an_answer_with_the_chain(
    pool: Pool, fault: Fault, caplog: pytest.LogCaptureFixture
) -> None:
    pool.hold(range(3))
    pool.store.inject(fault, "exists", times=1)
    with caplog.at_level(logging.CRITICAL, "vllm_kvpool.pool.probe"):
        pool.ask(1)
        answer = pool.answer()
    assert answer.chain is not None
    assert (len(answer.chain), answer.found_chunks) == (NUM_CHUNKS, 0)
    assert answer.outcome is STORE_ERROR
    pool.ask(2)
    assert pool.answer().found_chunks == 3


def test_without_a_store_there_is_a_chain() -> None:
    probe = Probe(None, NAMES, CHUNK)
    probe.submit(Lookup(1, RequestIdentity, TOKENS, True, 0, 0.0))
    probe.wait(LIMIT_S)
    [answer] = probe.take_answers()
    assert answer.chain is not None
    assert (len(answer.chain), answer.found_chunks, answer.outcome) == (NUM_CHUNKS, 0, STORE_ERROR)
    confirmed: list[bool] = []
    probe.remove_all(confirmed.append)
    assert probe.close()
    assert confirmed == [False]


def raises(error: Exception) -> Callable[[], RequestIdentity]:
    def identify() -> RequestIdentity:
        raise error

    return identify


@pytest.mark.parametrize(
    "identify",
    [lambda: None, raises(FileNotFoundError("adapter")), raises(KeyError("bug"))],
    ids=["unnamed", "file", "bug"],
)
def test_a_request_that_cannot_be_named_is_not_shared(
    pool: Pool,
    identify: Callable[[], RequestIdentity | None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.CRITICAL, "vllm_kvpool.pool.probe"):
        pool.ask(1, identify=identify)
        assert pool.answer() == Answer(1, None, 0, UNSHAREABLE)
    pool.ask(2)
    assert pool.answer().outcome is ANSWERED


def test_tokens_that_cannot_be_hashed_are_not_shared(
    pool: Pool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.CRITICAL, "vllm_kvpool.pool.probe"):
        pool.ask(tokens=(-1,) * CHUNK)
        assert pool.answer().outcome is UNSHAREABLE


def test_how_long_the_store_is_stuck_can_be_told(pool: Pool) -> None:
    assert pool.probe.stuck_for(time.monotonic()) == 0
    pool.store.inject(Fault.BLOCKED, "exists")
    pool.ask()
    assert pool.store.entered.wait(LIMIT_S)
    assert pool.probe.stuck_for(time.monotonic() + 100) >= 100
    pool.probe.wait(0)
    assert pool.probe.take_answers() == []
    pool.store.release()
    pool.answer()
    assert pool.probe.stuck_for(time.monotonic() + 100) == 0


def test_closing_leaves_a_stuck_thread_behind() -> None:
    pool = Pool()
    pool.store.inject(Fault.BLOCKED, "exists")
    pool.ask()
    assert pool.store.entered.wait(LIMIT_S)
    assert not pool.probe.close()
    pool.store.release()
    pool.probe._thread.join(LIMIT_S)
    assert not pool.probe._thread.is_alive()


def test_closing_does_not_wait_for_those_that_wait() -> None:
    pool = Pool()
    pool.ask(expect_chunks=5)
    pool.store.inject(Fault.BLOCKED, "exists")
    pool.store.release()
    assert pool.probe.close()


# Forgetting and removing


def test_what_is_forgotten_is_not_asked_any_more(pool: Pool) -> None:
    pool.ask(1, expect_chunks=5)
    pool.probe.forget(1)
    pool.probe.forget(99)
    pool.ask(2, search=False)
    assert set(pool.answers()) == {2}
    assert pool.probe._open == {}


def test_remove_all_removes_the_own_namespace_only(pool: Pool) -> None:
    pool.hold(range(3))
    maker = KeyMaker(make_namespace("model", "1" * 12), ContextRank())
    other = maker.key(HeadPart(0), LayerSpan(0, 2), b"x")
    pool.memory.put([other], [make_buffer(1)], [""])
    confirmed: list[bool] = []
    pool.probe.remove_all(confirmed.append)
    pool.ask()
    assert pool.answer().found_chunks == 0
    assert confirmed == [True]
    assert pool.memory.exists([other]) == [True]


def test_a_failed_removal_is_told(pool: Pool, caplog: pytest.LogCaptureFixture) -> None:
    pool.store.inject(Fault.UNREACHABLE, "remove_namespace")
    confirmed: list[bool] = []
    with caplog.at_level(logging.CRITICAL, "vllm_kvpool.pool.probe"):
        pool.probe.remove_all(confirmed.append)
        pool.ask()
        pool.answer()
    assert confirmed == [False]
