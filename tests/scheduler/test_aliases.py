"""Aliases in a store, and the ends of hits that lookups find by them."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from queue import SimpleQueue
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.scheduler.scheduler_bench import layer_group, put_cells
from tests.support.buffers import make_buffer
from tests.support.memory_store import MemoryStore
from vllm_kvpool.errors import StoreError
from vllm_kvpool.identity.chunk_hash import ChunkChain, MediaItem, RequestIdentity
from vllm_kvpool.identity.keys import alias_prefix, make_namespace
from vllm_kvpool.layout.topology import AttentionWindow
from vllm_kvpool.scheduler.aliases import Aliases
from vllm_kvpool.scheduler.lookup import Lookup, LookupOutcome, LookupResult
from vllm_kvpool.scheduler.lookup_service import LookupService
from vllm_kvpool.scheduler.messages import Stored
from vllm_kvpool.scheduler.prefix_search import CellNames
from vllm_kvpool.scheduler.save_outcomes import EndedSave
from vllm_kvpool.storage.base import ChunkRef, GetOutcome
from vllm_kvpool.storage.contents.alias import Alias, alias_bytes, write_alias
from vllm_kvpool.transfer.ops import JobId, SavePlan

CHUNK, STEP = 8, 2
NAMESPACE = make_namespace("model", "0" * 12)
PLAIN = CellNames(NAMESPACE, [layer_group(heads=2, layers=4, span=2)])
WINDOW = layer_group("full", layers=2, window=AttentionWindow(sliding=6))
WINDOWED = CellNames(NAMESPACE, [WINDOW, layer_group("window", layers=2)])
DRAFTED = CellNames(
    NAMESPACE, [layer_group("full", layers=2), layer_group("draft-x-1", is_optional=True)]
)
LIMIT_S = 30.0
FLUSH = "flush"


class WatchedStore(MemoryStore):
    """A store that records removals, so that a test knows what the writer has performed."""

    def __init__(self) -> None:
        super().__init__("", 1 << 24)
        self.removed: SimpleQueue[tuple[str, ...]] = SimpleQueue()
        self.fails: set[str] = set()
        """Methods that raise."""
        self.holds = False
        """Reads that begin wait for `may_end`."""
        self.may_end = threading.Event()

    def exists(self, keys: Sequence[str]) -> list[bool]:
        if "exists" in self.fails:
            raise StoreError("away")
        return super().exists(keys)

    def get(self, keys: Sequence[str], buffers: Sequence[Any]) -> list[GetOutcome]:
        if "get" in self.fails:
            raise StoreError("away")
        if self.holds:
            self.may_end.wait(LIMIT_S)
        return super().get(keys, buffers)

    def remove(self, keys: Sequence[str]) -> int:
        self.removed.put(tuple(keys))
        return super().remove(keys)


class Pool:
    """Lookups over stores that hold what the test saves there."""

    def __init__(
        self,
        names: CellNames = PLAIN,
        num_stores: int = 1,
        step: int = STEP,
        answer_s: float = LIMIT_S,
    ) -> None:
        self.names = names
        self.hung: list[int] = []
        """Tiers of reads that took longer than `answer_s`."""
        self.stores = [WatchedStore() for _ in range(num_stores)]
        self.aliases = Aliases(
            *(self.stores, range(num_stores), names, CHUNK, step),
            answer_s=answer_s,
            on_hung=self.hung.append,
        )
        self.service = LookupService(self.stores, names, CHUNK, aliases=self.aliases)
        self.next_id = 0

    def close(self) -> None:
        assert self.service.close()

    def flush(self) -> list[str]:
        """Wait until what was posted is performed; return the keys that were removed."""
        keys: list[str] = []
        self.aliases.remove([FLUSH])
        for store in self.stores:
            while (removed := store.removed.get(timeout=LIMIT_S)) != (FLUSH,):
                keys += removed
        return keys

    def save(
        self,
        tokens: Sequence[int],
        *,
        has_end: bool = True,
        identity: RequestIdentity | None = None,
        missed: Sequence[int] = (),
        tier: int = 0,
    ) -> ChunkChain:
        """Store a prompt's chunks and end, then its aliases."""
        chain = ChunkChain(CHUNK, identity or RequestIdentity())
        chain.extend(tokens)
        end = chain.end(tokens) if has_end else None
        self.store([*chain.hashes, *([end] if end else [])], tier)
        how = Stored(1, frozenset({tier}), missed=frozenset(missed))
        whole = SavePlan(JobId(1), "a", 0, tuple(chain.hashes), ())
        self.service.write_aliases(EndedSave(whole, how, (chain, tokens)))
        if end:
            rest = len(tokens) % CHUNK
            plan = SavePlan(JobId(2), "a", len(chain), (end,), (), end_tokens=rest)
            self.service.write_aliases(EndedSave(plan, how, (chain, tokens)))
        self.flush()
        return chain

    def store(self, hashes: Sequence[bytes], tier: int = 0) -> None:
        put_cells(self.stores[tier], self.cells(hashes))

    def cells(self, hashes: Sequence[bytes]) -> list[str]:
        groups = [i for i, each in enumerate(self.names.layer_groups) if not each.is_optional]
        return [k for each in hashes for group in groups for k in self.names.of_chunk(each, group)]

    def ask(
        self,
        tokens: Sequence[int],
        *,
        identity: RequestIdentity | None = None,
        seeks_tail: bool = True,
    ) -> LookupResult:
        self.next_id += 1
        now = time.monotonic()
        self.service.submit(
            Lookup(
                self.next_id,
                lambda: identity or RequestIdentity(),
                tokens,
                True,
                0,
                now,
                now + LIMIT_S,
                seeks_tail=seeks_tail,
            )
        )
        while not (results := self.service.take_results()):
            assert self.service.wait(LIMIT_S)
        (result,) = results
        assert result.outcome is LookupOutcome.ANSWERED
        return result

    def found(self, tokens: Sequence[int], **options: Any) -> int:
        """Return the number of tokens that a lookup finds."""
        result = self.ask(tokens, **options)
        tail = result.tail
        if tail is None or result.found_chunks <= tail.position:
            return result.found_chunks * CHUNK
        assert tail.position == result.found_chunks - 1
        return tail.position * CHUNK + tail.tokens


@pytest.fixture
def make() -> Iterator[Callable[..., Pool]]:
    made: list[Pool] = []

    def make(*args: Any, **options: Any) -> Pool:
        made.append(Pool(*args, **options))
        return made[-1]

    yield make
    for pool in made:
        pool.close()


@pytest.fixture
def pool(make: Callable[..., Pool]) -> Pool:
    return make()


def prompt(shared: int, rest: int, seed: int) -> list[int]:
    """Return the same first tokens for every seed, then other tokens."""
    return [*range(shared), *(seed * 1000 + i for i in range(rest))]


@pytest.mark.parametrize("names", [PLAIN, WINDOWED, DRAFTED])
@pytest.mark.parametrize(
    ("shared", "found"),
    [(0, 0), (1, 0), (2, 2), (3, 3), (7, 7), (8, 8), (9, 8), (10, 10), (13, 13), (15, 15)],
)
def test_hit_ends_where_two_prompts_part(
    make: Callable[..., Pool], names: CellNames, shared: int, found: int
) -> None:
    pool = make(names)
    pool.save(prompt(shared, 24 - shared, 1))
    assert pool.found(prompt(shared, 30 - shared, 2)) == found


@pytest.mark.parametrize("count", range(1, 2 * CHUNK + 1))
def test_prompt_that_is_asked_again_is_found_up_to_its_end(pool: Pool, count: int) -> None:
    pool.save(range(count))
    rest = count % CHUNK
    assert pool.found(range(count)) == (count if rest >= STEP else count - rest)
    assert pool.found(range(count + 3)) == (count if rest >= STEP else count - rest)


def test_result_names_the_chunk_and_the_tokens_of_its_cells(pool: Pool) -> None:
    chain = pool.save(prompt(11, 13, 1))
    tail = pool.ask(prompt(11, 2, 2)).tail
    assert tail is not None
    assert (tail.chunk_hash, tail.tokens, tail.cell_tokens) == (chain.hashes[1], 3, 0)
    assert not tail.is_end
    chain = pool.save(prompt(14, 0, 3))
    tail = pool.ask(prompt(14, 9, 4)).tail
    assert tail is not None
    assert (tail.chunk_hash, tail.tokens, tail.cell_tokens) == (chain.end(range(14)), 6, 6)
    assert tail.is_end


@given(
    st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=3 * CHUNK), min_size=1, max_size=5),
    st.lists(st.integers(0, 1), min_size=1, max_size=3 * CHUNK),
)
@example([[0] * 12, [0] * 8 + [0] * 3 + [1] * 6], [0] * 11 + [1] * 2)
@settings(max_examples=60, deadline=None)
def test_hit_is_the_longest_that_an_alias_leads_to(
    written: list[list[int]], asked: list[int]
) -> None:
    with closing(Pool()) as pool:
        leads: dict[tuple[int, ...], list[int]] = {}  # the first writer of an alias wins
        chunks = set()
        for tokens in written:
            pool.save(tokens)
            for start in range(0, len(tokens), CHUNK):
                chunk = tokens[start : start + CHUNK]
                if len(chunk) == CHUNK:
                    chunks.add(tuple(tokens[: start + CHUNK]))
                for end in range(STEP, min(len(chunk), CHUNK - 1) + 1, STEP):
                    leads.setdefault(tuple(tokens[: start + end]), chunk)
        whole = 0
        while tuple(asked[: whole + CHUNK]) in chunks and whole + CHUNK <= len(asked):
            whole += CHUNK
        own = asked[whole : whole + CHUNK - 1]
        best = 0
        for end in range(STEP, len(own) + 1, STEP):
            other = leads.get(tuple(asked[: whole + end]))
            if other is not None:
                pairs = zip(own, other, strict=False)
                shorter = min(len(own), len(other))
                common = next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)
                best = max(best, common)
        assert pool.found(asked) == whole + best


def test_alias_whose_chunk_is_gone_is_removed_and_written_anew(pool: Pool) -> None:
    chain = pool.save(prompt(12, 4, 1))
    pool.stores[0].remove(pool.cells(chain.hashes[1:]))
    pool.flush()
    assert pool.found(prompt(12, 4, 2)) == CHUNK
    removed = pool.flush()
    assert removed == [
        alias_prefix(NAMESPACE) + chain.hash_of_part(1, range(8, 8 + end)).hex() for end in (4, 2)
    ]
    pool.save(prompt(12, 4, 2))
    assert pool.found(prompt(12, 4, 3)) == 12


def test_nothing_is_removed_while_a_store_does_not_answer(make: Callable[..., Pool]) -> None:
    pool = make(num_stores=2)
    chain = pool.save(prompt(12, 4, 1))
    pool.stores[0].remove(pool.cells(chain.hashes[1:]))
    pool.store(chain.hashes[1:], tier=1)
    pool.flush()
    pool.stores[1].fails = {"exists"}
    assert pool.found(prompt(12, 4, 2)) == CHUNK
    assert pool.flush() == []
    pool.stores[1].fails = set()
    assert pool.found(prompt(12, 4, 2)) == 12


@pytest.mark.parametrize("has_own_hash", [True, False])
def test_alias_that_says_what_is_not_so_is_not_believed(pool: Pool, has_own_hash: bool) -> None:
    """An engine of the same store may write false aliases.

    No other prompt's KV is loaded by them.
    """
    asked = prompt(4, 4, 2)
    other = pool.save(prompt(0, 8, 9))
    own = ChunkChain(CHUNK, RequestIdentity()).hash_of_part(0, asked[:4])
    key = alias_prefix(NAMESPACE) + own.hex()
    tokens = prompt(0, 8, 9) if has_own_hash else asked
    forged = make_buffer(alias_bytes(CHUNK))
    write_alias(forged.view, key, Alias(other.hashes[0], tokens))
    pool.stores[0].put([key], [forged], [ChunkRef("")])
    assert pool.found(asked) == 0
    assert pool.flush() == [key]


def test_damaged_alias_is_removed(pool: Pool) -> None:
    chain = pool.save(prompt(4, 4, 1))
    key = alias_prefix(NAMESPACE) + chain.hash_of_part(0, range(2)).hex()
    pool.stores[0].remove([key])
    pool.stores[0].put([key], [make_buffer(7)], [ChunkRef("")])
    pool.flush()
    assert pool.found(prompt(2, 6, 2)) == 0
    assert pool.flush() == [key]


def test_chunk_that_was_not_stored_gets_no_alias(pool: Pool) -> None:
    pool.save(prompt(4, 12, 1), missed=[0])
    assert pool.found(prompt(4, 4, 2)) == 0


def test_chunk_with_media_gets_no_alias(pool: Pool) -> None:
    identity = RequestIdentity(media=(MediaItem("image", 9, 12, "vllm 0.32.0"),))
    pool.save(range(16), identity=identity)
    assert pool.found(prompt(14, 2, 2), identity=identity) == CHUNK
    assert pool.found(prompt(6, 10, 2), identity=identity) == 6


def test_salt_keeps_prompts_apart(pool: Pool) -> None:
    pool.save(range(16), identity=RequestIdentity(cache_salt="a"))
    assert pool.found(prompt(14, 2, 2), identity=RequestIdentity(cache_salt="a")) == 14
    assert pool.found(prompt(14, 2, 2)) == 0


def test_lookup_that_seeks_no_tail_finds_whole_chunks(pool: Pool) -> None:
    pool.save(range(24))
    assert pool.found(range(23), seeks_tail=False) == 16


def test_store_that_cannot_be_read_costs_the_tail_alone(pool: Pool) -> None:
    pool.save(range(24))
    pool.stores[0].fails = {"get"}
    assert pool.found(range(23)) == 16
    pool.stores[0].fails = set()
    assert pool.found(range(23)) == 23


def test_read_that_hangs_costs_the_tail_alone_and_holds_up_no_removal(
    make: Callable[..., Pool],
) -> None:
    """Waiting for the read would block all lookups in the store, and a reset would never end."""
    pool = make(answer_s=0.05)
    pool.save(range(24))
    store = pool.stores[0]
    store.holds = True
    assert pool.found(range(23)) == 16
    assert pool.hung == [0]
    store.holds = False
    assert pool.found(range(23)) == 23, "read into other memory, while the first one hangs"
    ended: SimpleQueue[bool] = SimpleQueue()
    pool.service.remove_all(ended.put)
    assert ended.get(timeout=LIMIT_S)
    store.may_end.set()


def test_reset_drops_aliases_that_wait(pool: Pool) -> None:
    pool.save(range(24))
    done: SimpleQueue[bool] = SimpleQueue()
    pool.service.remove_all(done.put)
    assert done.get(timeout=LIMIT_S)
    assert pool.found(range(23)) == 0
