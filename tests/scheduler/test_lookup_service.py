"""The lookup service: its own threads get answers from the stores."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from queue import Queue, SimpleQueue
from typing import Any

import pytest

from tests.scheduler import scheduler_bench
from tests.scheduler.scheduler_bench import put_cells
from tests.support.faults import Fault, FaultyStore
from tests.support.memory_store import MemoryStore
from vllm_kvpool.identity.chunk_hash import ChunkChain, RequestIdentity
from vllm_kvpool.identity.keys import (
    ContextRank,
    HeadShard,
    KeyMaker,
    LayerSpan,
    make_namespace,
    namespace_of,
    with_weights,
)
from vllm_kvpool.layout.topology import LayerGroup, Topology
from vllm_kvpool.scheduler.lookup import Lookup, LookupOutcome, LookupResult
from vllm_kvpool.scheduler.lookup_core import MAX_KEYS_PER_ROUND
from vllm_kvpool.scheduler.lookup_service import LookupService, OnLost, OnNotice
from vllm_kvpool.scheduler.prefix_search import CellNames
from vllm_kvpool.transfer.ops import HostCacheChange

CHUNK = 4
NAMESPACE = make_namespace("model", "0" * 12)
TOPOLOGY = Topology(2, 1, ((0, 4),), 2)
NAMES = CellNames(NAMESPACE, [LayerGroup(TOPOLOGY, row_bytes=16)])
TOKENS = tuple(range(40))
NUM_CHUNKS = len(TOKENS) // CHUNK
LIMIT_S = 30.0
ANSWERED, STORE_ERROR = LookupOutcome.ANSWERED, LookupOutcome.STORE_ERROR
UNSHAREABLE = LookupOutcome.UNSHAREABLE


def chain_of(tokens: tuple[int, ...] = TOKENS) -> ChunkChain:
    return scheduler_bench.chain_of(tokens, CHUNK)


class Pool:
    """A lookup service over stores that hold what the test puts there."""

    def __init__(
        self,
        num_stores: int = 1,
        host_ranks: int = 0,
        open_notices: Callable[[OnNotice, OnLost], Any] | None = None,
    ) -> None:
        self.memories = [MemoryStore("", 1 << 20) for _ in range(num_stores)]
        self.stores = [FaultyStore(memory) for memory in self.memories]
        self.service = LookupService(
            self.stores, NAMES, CHUNK, host_ranks, open_notices=open_notices
        )

    @property
    def memory(self) -> MemoryStore:
        return self.memories[0]

    @property
    def store(self) -> FaultyStore:
        return self.stores[0]

    def hold(self, chunks: range, *, but: int = -1, only: int = -1, tier: int = 0) -> None:
        """Store the cells of those chunks, except the cell number `but` of each, or `only` one."""
        hashes = chain_of().hashes
        keys = [
            key
            for chunk in chunks
            for i, key in enumerate(NAMES.of_chunk(hashes[chunk]))
            if i != but and only in (-1, i)
        ]
        put_cells(self.memories[tier], keys)

    def tell(self, rank: int, added: Iterable[int] = (), removed: Iterable[int] = ()) -> None:
        """Report which chunks a rank's host memory has gained and lost."""
        hashes = chain_of().hashes
        change = HostCacheChange(
            tuple(NAMES.chunk_id(hashes[i]) for i in added),
            tuple(NAMES.chunk_id(hashes[i]) for i in removed),
        )
        self.service.host.apply(rank, change)

    def found(self) -> int:
        """Start a lookup and return the number of chunks it finds."""
        self.ask()
        answer = self.answer()
        assert answer.outcome is ANSWERED
        return answer.found_chunks

    def ask(
        self,
        lookup_id: int = 1,
        *,
        tokens: tuple[int, ...] = TOKENS,
        identify: Callable[[], RequestIdentity | None] = RequestIdentity,
        reads_files: bool = False,
        search: bool = True,
        expect_chunks: int = 0,
        wait_s: float = LIMIT_S,
        notices: tuple[str, ...] = (),
    ) -> None:
        deadline = time.monotonic() + wait_s
        self.service.submit(
            Lookup(
                lookup_id,
                identify,
                tokens,
                search,
                expect_chunks * CHUNK,
                expect_until=deadline,
                answer_by=deadline + LIMIT_S,
                reads_files=reads_files,
                notices=notices,
                request_id=f"request-{lookup_id}",
            )
        )

    def answers(self, count: int = 1) -> dict[int, LookupResult]:
        """Wait for exactly `count` more answers."""
        got: dict[int, LookupResult] = {}
        while len(got) < count:
            before = len(got)
            self.service.wait(LIMIT_S)
            results = self.service.take_results()
            got.update({answer.lookup_id: answer for answer in results if answer.is_final})
            assert results or len(got) > before, "no answer"
        assert len(got) == count
        return got

    def answer(self) -> LookupResult:
        [answer] = self.answers().values()
        return answer


@pytest.fixture
def make() -> Iterator[Callable[..., Pool]]:
    made: list[Pool] = []

    def make(*args: Any, **options: Any) -> Pool:
        made.append(Pool(*args, **options))
        return made[-1]

    yield make
    for pool in made:
        for store in pool.stores:
            store.heal()
        assert pool.service.close()


@pytest.fixture
def pool(make: Callable[..., Pool]) -> Pool:
    return make()


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.CRITICAL, "vllm_kvpool.scheduler.lookup_service"):
        yield


@pytest.mark.parametrize("stored", range(NUM_CHUNKS + 1))
def test_the_answer_is_the_stored_prefix_and_the_chain(pool: Pool, stored: int) -> None:
    pool.hold(range(stored))
    pool.ask(7)
    answer = pool.answer()
    assert answer.chain is not None
    assert answer.chain.hashes == chain_of().hashes
    assert (answer.lookup_id, answer.found_chunks, answer.outcome) == (7, stored, ANSWERED)


@pytest.mark.parametrize("cell", range(len(NAMES.of_chunk(b"x"))))
@pytest.mark.parametrize("stored", [0, 1, 5])
def test_chunks_that_all_lack_a_cell_are_absent(pool: Pool, stored: int, cell: int) -> None:
    """A rank is still saving or cannot save, so all of these chunks lack its cell."""
    pool.hold(range(stored))
    pool.hold(range(stored, NUM_CHUNKS), but=cell)
    pool.ask()
    assert pool.answer().found_chunks == stored


def test_many_lookups_share_rounds(pool: Pool) -> None:
    pool.hold(range(6))
    pool.store.inject(Fault.BLOCKED, "exists", times=1)
    pool.ask(0)
    assert pool.store.entered.wait(LIMIT_S)
    for lookup_id in range(1, 50):
        pool.ask(lookup_id, tokens=TOKENS[: lookup_id % len(TOKENS)])
    pool.store.release()
    answers = pool.answers(50)
    for lookup_id in range(1, 50):
        assert answers[lookup_id].found_chunks == min(6, lookup_id % len(TOKENS) // CHUNK)
    assert pool.store.calls["exists"] < 10


def test_rounds_are_bounded(pool: Pool) -> None:
    per_lookup = 2 * len(NAMES.of_chunk(b"x")) + NUM_CHUNKS - 2
    count = MAX_KEYS_PER_ROUND // per_lookup + 20
    pool.store.inject(Fault.BLOCKED, "exists", times=1)
    pool.ask(count)
    assert pool.store.entered.wait(LIMIT_S)
    for lookup_id in range(count):
        pool.ask(lookup_id)
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
    pool.store.faults._wait = rounds.release
    pool.ask(expect_chunks=5)
    for _ in range(8):
        assert rounds.acquire(timeout=LIMIT_S)
    progress = pool.service.take_results()
    assert [(each.found_chunks, each.is_final) for each in progress] == [(0, False), (2, False)]
    pool.hold(range(2, 7))
    answer = pool.answer()
    assert (answer.found_chunks, answer.outcome) == (7, ANSWERED)


def test_one_that_waits_does_not_hold_up_others(pool: Pool) -> None:
    pool.ask(1, expect_chunks=5)
    pool.hold(range(1))
    pool.ask(2)
    assert pool.answers()[2].found_chunks == 1
    pool.hold(range(5))
    assert pool.answers()[1].found_chunks == 5


# Notices of producers


@dataclass
class FakeNotices:
    """Notices that a test sends by hand; records the watched topics."""

    on_notice: OnNotice
    on_lost: OnLost
    watched: Counter[bytes] = field(default_factory=Counter)
    endpoints: list[tuple[str, ...]] = field(default_factory=list)

    def watch(self, endpoints: Sequence[str], topic: bytes) -> None:
        self.watched[topic] += 1
        self.endpoints.append(tuple(endpoints))

    def unwatch(self, topic: bytes) -> None:
        self.watched[topic] -= 1

    def close(self) -> None:
        assert not +self.watched


@pytest.fixture
def noticed(make: Callable[..., Pool]) -> tuple[Pool, list[FakeNotices]]:
    made: list[FakeNotices] = []

    def open_notices(on_notice: OnNotice, on_lost: OnLost) -> FakeNotices:
        made.append(FakeNotices(on_notice, on_lost))
        return made[0]

    return make(open_notices=open_notices), made


def begun(pool: Pool, made: list[FakeNotices], count: int = 1) -> tuple[FakeNotices, bytes]:
    """Start lookups and return the topic that they watch."""
    assert not made, "opened although nothing is watched"
    for number in range(count):
        pool.ask(number, expect_chunks=5, notices=("tcp://127.0.0.1:1",))
        pool.service.wait(LIMIT_S)
        assert not any(each.is_final for each in pool.service.take_results())
    (notices,) = made
    (topic,) = notices.watched
    assert notices.watched[topic] == count
    return notices, topic


def test_lookup_follows_the_notices_of_its_producer(
    noticed: tuple[Pool, list[FakeNotices]],
) -> None:
    pool, made = noticed
    notices, topic = begun(pool, made, 2)
    assert topic == chain_of().topic(TOKENS)
    pool.hold(range(3))
    notices.on_notice(b"another", 0, 0)
    notices.on_notice(topic, 3, 3)
    answers = pool.answers(2)
    assert [answers[number].found_chunks for number in range(2)] == [3, 3]
    assert not answers[0].has_lost_producer
    assert not +notices.watched


def test_lookup_ends_when_its_producer_is_lost(noticed: tuple[Pool, list[FakeNotices]]) -> None:
    pool, made = noticed
    notices, topic = begun(pool, made)
    pool.hold(range(1))
    notices.on_lost(topic)
    answer = pool.answers()[0]
    assert (answer.found_chunks, answer.has_lost_producer) == (1, True)


def test_lookup_that_is_forgotten_watches_no_longer(
    noticed: tuple[Pool, list[FakeNotices]],
) -> None:
    pool, made = noticed
    notices, topic = begun(pool, made)
    pool.service.cancel(0)
    notices.on_notice(topic, 5, None)
    pool.ask(2, search=False, notices=("tcp://127.0.0.1:1",))
    pool.answers()
    assert not +notices.watched


# Faults


@pytest.mark.parametrize("fault", [Fault.ERROR, Fault.UNREACHABLE, Fault.CRASH])
def test_a_store_that_fails_is_an_answer_with_the_chain(
    pool: Pool, fault: Fault, caplog: pytest.LogCaptureFixture
) -> None:
    pool.hold(range(3))
    pool.store.inject(fault, "exists", times=1)
    with caplog.at_level(logging.CRITICAL, "vllm_kvpool.scheduler.lookup_service"):
        pool.ask(1)
        answer = pool.answer()
    assert answer.chain is not None
    assert (len(answer.chain), answer.found_chunks) == (NUM_CHUNKS, 0)
    assert answer.outcome is STORE_ERROR
    pool.ask(2)
    assert pool.answer().found_chunks == 3


def test_without_a_store_there_is_a_chain() -> None:
    service = LookupService((), NAMES, CHUNK)
    service.submit(Lookup(1, RequestIdentity, TOKENS, True, 0, 0.0, 0.0))
    service.wait(LIMIT_S)
    [answer] = service.take_results()
    assert answer.chain is not None
    assert (len(answer.chain), answer.found_chunks, answer.outcome) == (NUM_CHUNKS, 0, STORE_ERROR)
    confirmed: list[bool] = []
    service.remove_all(confirmed.append)
    assert service.close()
    assert confirmed == [False]


def raises(error: Exception) -> Callable[[], RequestIdentity]:
    def identify() -> RequestIdentity:
        raise error

    return identify


@pytest.mark.parametrize("reads_files", [False, True])
@pytest.mark.parametrize(
    "identify",
    [lambda: None, raises(FileNotFoundError("adapter")), raises(KeyError("bug"))],
    ids=["unnamed", "file", "bug"],
)
def test_a_request_that_cannot_be_named_is_not_shared(
    pool: Pool,
    identify: Callable[[], RequestIdentity | None],
    reads_files: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.CRITICAL, "vllm_kvpool.scheduler.lookup_service"):
        pool.ask(1, identify=identify, reads_files=reads_files)
        assert pool.answer() == LookupResult(1, None, 0, UNSHAREABLE)
    pool.ask(2)
    assert pool.answer().outcome is ANSWERED


def test_the_log_names_the_request_that_is_not_shared(
    pool: Pool, caplog: pytest.LogCaptureFixture
) -> None:
    pool.ask(7, identify=raises(FileNotFoundError("adapter")))
    assert pool.answer().outcome is UNSHAREABLE
    assert caplog.messages == ["kvpool: request request-7 is neither loaded nor saved: adapter"]


def test_an_adapter_that_is_read_holds_up_no_other_request(pool: Pool) -> None:
    pool.hold(range(NUM_CHUNKS))
    gate = threading.Event()

    def read() -> RequestIdentity:
        assert gate.wait(LIMIT_S)
        return RequestIdentity(adapter=b"digest")

    pool.ask(1, identify=read, reads_files=True)
    pool.ask(2)
    assert pool.answer().lookup_id == 2
    gate.set()
    answer = pool.answer()
    assert (answer.lookup_id, answer.found_chunks, answer.outcome) == (1, 0, ANSWERED)


def test_lookup_cancelled_while_its_adapter_is_read_is_not_opened(pool: Pool) -> None:
    """The request has ended. An open lookup would ask the stores until its expected chunks come."""
    gate = threading.Event()

    def read() -> RequestIdentity:
        assert gate.wait(LIMIT_S)
        return RequestIdentity(adapter=b"digest")

    pool.ask(1, identify=read, reads_files=True)
    pool.service.cancel(1)
    gate.set()
    pool.ask(2, identify=read, reads_files=True)
    assert pool.answer().lookup_id == 2
    assert not pool.service.take_results()


def test_tokens_that_cannot_be_hashed_are_not_shared(
    pool: Pool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.CRITICAL, "vllm_kvpool.scheduler.lookup_service"):
        pool.ask(tokens=(-1,) * CHUNK)
        assert pool.answer().outcome is UNSHAREABLE


def test_closing_leaves_a_stuck_thread_behind() -> None:
    pool = Pool()
    pool.store.inject(Fault.BLOCKED, "exists")
    pool.ask()
    assert pool.store.entered.wait(LIMIT_S)
    assert not pool.service.close()
    pool.store.release()
    for thread in pool.service._threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive()


def test_closing_does_not_wait_for_those_that_wait() -> None:
    pool = Pool()
    pool.ask(expect_chunks=5)
    pool.store.inject(Fault.BLOCKED, "exists")
    pool.store.release()
    assert pool.service.close()


# Forgetting and removing


def test_what_is_forgotten_is_not_asked_any_more(pool: Pool) -> None:
    pool.ask(1, expect_chunks=5)
    pool.service.cancel(1)
    pool.service.cancel(99)
    pool.ask(2, search=False)
    assert set(pool.answers()) == {2}
    assert not pool.service.core._open


def test_remove_all_removes_the_own_namespace_only(pool: Pool) -> None:
    pool.hold(range(3))
    maker = KeyMaker(make_namespace("model", "1" * 12), ContextRank())
    other = maker.key(HeadShard(0), LayerSpan(0, 2), b"x")
    put_cells(pool.memory, [other])
    confirmed: list[bool] = []
    pool.service.remove_all(confirmed.append)
    pool.ask()
    assert pool.answer().found_chunks == 0
    assert confirmed == [True]
    assert pool.memory.exists([other]) == [True]


def test_a_failed_removal_is_told(pool: Pool, caplog: pytest.LogCaptureFixture) -> None:
    pool.store.inject(Fault.UNREACHABLE, "remove_namespace")
    confirmed: list[bool] = []
    with caplog.at_level(logging.CRITICAL, "vllm_kvpool.scheduler.lookup_service"):
        pool.service.remove_all(confirmed.append)
        pool.ask()
        pool.answer()
    assert confirmed == [False]


@pytest.mark.usefixtures("quiet")
def test_a_store_that_breaks_its_contract_fails_the_removal_alone(pool: Pool) -> None:
    pool.store.inject(Fault.CRASH, "remove_namespace", times=1)
    confirmed: list[bool] = []
    pool.service.remove_all(confirmed.append)
    pool.hold(range(3))
    assert pool.found() == 3
    assert confirmed == [False]


# Several tiers


def test_a_further_tier_is_asked_only_for_what_nearer_ones_lack(make: Callable[..., Pool]) -> None:
    pool = make(2)
    pool.hold(range(NUM_CHUNKS), tier=0)
    assert pool.found() == NUM_CHUNKS
    assert pool.stores[1].calls == {}
    pool.memories[0].remove(NAMES.of_chunk(chain_of().hashes[-1])[:1])
    assert pool.found() == NUM_CHUNKS - 1
    assert pool.stores[1].max_keys == 1


def test_remove_all_reaches_every_tier(make: Callable[..., Pool]) -> None:
    pool = make(2)
    for tier in range(2):
        pool.hold(range(3), tier=tier)
    confirmed: list[bool] = []
    pool.service.remove_all(confirmed.append)
    assert pool.found() == 0
    assert confirmed == [True]
    assert [memory._table.list_keys() for memory in pool.memories] == [[], []]


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.usefixtures("quiet")
def test_a_tier_that_cannot_be_emptied_does_not_keep_others_from_it(
    make: Callable[..., Pool], bad: int
) -> None:
    pool = make(2)
    for tier in range(2):
        pool.hold(range(3), tier=tier)
    pool.stores[bad].inject(Fault.UNREACHABLE, "remove_namespace")
    confirmed: list[bool] = []
    pool.service.remove_all(confirmed.append)
    assert pool.found() == 3
    assert confirmed == [False]
    assert pool.memories[1 - bad]._table.list_keys() == []


# Host memory of the ranks


def test_what_some_ranks_have_is_asked_for(make: Callable[..., Pool]) -> None:
    pool = make(host_ranks=2)
    pool.tell(0, range(5))
    pool.tell(1, range(3))
    assert pool.found() == 3
    pool.hold(range(3, 4))
    assert pool.found() == 4  # host memory first, then the store
    pool.tell(1, range(3, 5))
    assert pool.found() == 5
    pool.tell(0, removed=range(1, 3))
    assert pool.found() == 1
    assert pool.store.calls["exists"] > 0


def test_host_memory_needs_no_store(make: Callable[..., Pool]) -> None:
    pool = make(0, host_ranks=1)
    assert pool.found() == 0
    pool.tell(0, range(4))
    assert pool.found() == 4
    confirmed: list[bool] = []
    pool.service.remove_all(confirmed.append)
    assert pool.found() == 0
    assert confirmed == [True]


def test_a_reset_forgets_what_ranks_had_and_takes_what_they_say_later(
    make: Callable[..., Pool],
) -> None:
    pool = make(host_ranks=1)
    pool.tell(0, range(4))
    pool.service.remove_all(lambda removed: None)
    assert pool.found() == 0
    pool.tell(0, removed=range(4))
    pool.tell(0, range(2))
    assert pool.found() == 2


# Epochs


def test_lookups_of_several_epochs_share_a_round(pool: Pool) -> None:
    """Each lookup finds the cells under its epoch's names and reports that epoch."""
    hashes = chain_of().hashes
    stored = {"": 7, "a": 3, "b": 0, "c": NUM_CHUNKS}
    for weights_version, count in stored.items():
        keys = [
            k for each in hashes[:count] for k in NAMES.with_weights(weights_version).of_chunk(each)
        ]
        put_cells(pool.memory, keys)
    for lookup_id, weights_version in enumerate([*stored, *reversed(stored)]):
        pool.service.submit(
            Lookup(
                lookup_id,
                RequestIdentity,
                TOKENS,
                True,
                0,
                0.0,
                time.monotonic() + LIMIT_S,
                weights_version,
            )
        )
    answers = pool.answers(2 * len(stored)).values()
    assert sorted((a.weights_version, a.found_chunks) for a in answers) == sorted(
        [*stored.items()] * 2
    )


@pytest.mark.parametrize("weights_versions", [("",), ("a",), ("a", ""), ("b", "a"), ()])
def test_a_removal_takes_the_epochs_it_names(pool: Pool, weights_versions: tuple[str, ...]) -> None:
    all_epochs = ("", "a", "b")
    for weights_version in all_epochs:
        put_cells(pool.memory, NAMES.with_weights(weights_version).of_chunk(chain_of().hashes[0]))
    done: SimpleQueue[bool] = SimpleQueue()
    pool.service.remove_all(done.put, weights_versions)
    assert done.get(timeout=LIMIT_S)
    left = {namespace_of(key) for key in pool.memory._table.list_keys()}
    assert left == {with_weights(NAMESPACE, e) for e in all_epochs if e not in weights_versions}


def test_a_removal_that_fails_in_one_epoch_is_tried_in_the_others(pool: Pool, quiet: None) -> None:
    pool.store.inject(Fault.ERROR, "remove_namespace", times=1)
    done: SimpleQueue[bool] = SimpleQueue()
    pool.service.remove_all(done.put, ("a", "b"))
    assert not done.get(timeout=LIMIT_S)
    assert pool.store.calls["remove_namespace"] == 2


def test_wait_ends_with_an_arrival_and_not_with_every_wake() -> None:
    """An arrival comes on another thread, which may hold the lock that `put` needs."""
    inbox: Queue[int] = Queue()
    pool = Pool()
    with closing(pool.service):
        waited: SimpleQueue[float] = SimpleQueue()

        def wait() -> None:
            began = time.monotonic()
            pool.service.wait(LIMIT_S, lambda: bool(inbox.queue))
            waited.put(time.monotonic() - began)

        thread = threading.Thread(target=wait)
        thread.start()
        pool.service.wake()
        assert thread.is_alive()
        with inbox.mutex:
            inbox._put(1)
            pool.service.wake()
        assert waited.get(timeout=LIMIT_S) < LIMIT_S / 2
        thread.join()
        pool.service.wait(LIMIT_S, lambda: bool(inbox.queue))
