"""The open lookups, and which tier is called for what (pure: no thread, no clock).

* `LookupCore` gives each tier one call at a time. It answers a lookup when all tiers have answered
  or the whole prompt is found, at `answer_by` with what is known. A lookup that expects chunks of a
  producer reports progress and asks again until they have come, or the producer has ended.
* Inside the next chunk it may go on with a chunk that an alias leads to (`contents/alias.py`).
* `TierPace`: lookups leave a tier alone that missed `answer_by` `FAILURES_TO_OPEN` times in a row,
  and use it again once it answers within `QUICK_SHARE` of the timeout.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, NamedTuple

from vllm_kvpool.identity.chunk_hash import ChunkChain
from vllm_kvpool.identity.keys import CellKey, Namespace, alias_prefix
from vllm_kvpool.scheduler.lookup import (
    NOTHING_STORED,
    Lookup,
    LookupOutcome,
    LookupResult,
    StoredChunks,
)
from vllm_kvpool.scheduler.prefix_search import (
    CellNames,
    HitSearch,
    HostCacheIndex,
    Question,
    Tail,
    TailSearch,
)
from vllm_kvpool.scheduler.tiered_search import TieredSearch
from vllm_kvpool.storage.breaker import Breaker
from vllm_kvpool.storage.contents.alias import Alias, read_alias

MAX_KEYS_PER_ROUND = 4096
MAX_EXACT_KEYS = 8192  # of a lookup that asks for all cells of what it has found
MAX_READ_ALIASES = 56  # in a call
POLL_SHARE = 0.1  # of the time waited so far: the pause before missing chunks are asked for again
POLL_MIN_S = 0.001
POLL_MAX_S = 0.25
PUT_OFF_SHARE = 0.25  # of the timeout: a tier that has not answered by then is asked last
QUICK_SHARE = 0.25  # of the timeout


class TierPace:
    """The pace of a tier: lookups leave it alone while it answers after the deadline.

    Apart from the guard's breaker: such a tier is available, and loads and saves use it.
    """

    def __init__(self) -> None:
        self._breaker = Breaker()
        self.is_left_alone = False

    def in_time(self) -> None:
        """Count a lookup that used the tier and was answered in time."""
        if not self.is_left_alone:
            self._breaker.succeeded()

    def late(self, now: float) -> bool:
        """Note that lookups were answered without the tier; return True if it is left alone now."""
        if self.is_left_alone:
            return False
        self.is_left_alone = self._breaker.failed(now)
        return self.is_left_alone

    def may_be_tried(self, now: float) -> bool:
        """Return True if the tier is left alone and its pause is over."""
        return self.is_left_alone and not self._breaker.is_open(now)

    def tried(self, now: float, *, is_quick: bool) -> None:
        """Take the end of a trial that no lookup waited for."""
        if is_quick:
            self.is_left_alone = False
        else:
            self._breaker.tripped(now)


class _Candidate(NamedTuple):
    """A chunk that aliases lead to."""

    tail: Tail
    alias_keys: list[str]


@dataclass(slots=True, eq=False)
class _OpenTail:
    """The search for an end of the hit inside the chunk behind the whole chunks found."""

    index: int  # of that chunk
    tokens: Sequence[int]  # the prompt's in it
    aliases: tuple[tuple[int, str], ...]  # tokens before each, and its key; the longest first
    unasked: set[int]  # tiers whose aliases are to be read
    unread: set[int]  # those, and tiers that have not answered
    found: dict[bytes, _Candidate] = field(default_factory=dict)  # by the chunk's hash
    candidates: list[_Candidate] = field(default_factory=list)  # the longest first
    search: TieredSearch | None = None  # for their cells, once all tiers have answered

    @property
    def num_missing(self) -> int:
        """Candidates before the longest that is stored, as far as is known."""
        return len(self.candidates) - (0 if self.search is None else self.search.found)

    @property
    def tail(self) -> Tail | None:
        """The longest candidate that is stored, as far as is known."""
        missing = self.num_missing
        return self.candidates[missing].tail if missing < len(self.candidates) else None


@dataclass(slots=True, eq=False)
class _OpenLookup:
    lookup: Lookup
    chain: ChunkChain
    end: bytes | None
    names: CellNames
    expected: int  # chunks that the lookup waits for
    expected_attention: int  # or so many of attention, with states or without
    new_search: Callable[[Sequence[int]], TieredSearch]  # of these tiers
    new_stores: Callable[[Sequence[int]], TieredSearch] | None  # the same, without host memory
    search: TieredSearch
    stores: TieredSearch | None
    began: float
    answer_by: float
    defer_at: float
    host_windows: set[str]  # chunks of windows that host memory had when cells were asked for
    poll_at: float = math.inf  # when expected chunks are asked for again
    most: float = math.inf  # chunks that the producer stores
    looks_left: float = math.inf  # further searches, once the producer has ended
    is_hinted: bool = False  # the producer has stored more since the present search began
    is_told: bool = False  # the producer tells what it stores
    has_lost_producer: bool = False
    told: int = -1  # chunks of the last progress
    tail: _OpenTail | None = None  # once the whole chunks are known

    @property
    def asking(self) -> list[TieredSearch]:
        """The searches that ask for cells now."""
        tail = None if self.tail is None else self.tail.search
        searches = [self.search if tail is None else tail]
        return searches if self.stores is None else [*searches, self.stores]

    @property
    def waits_for(self) -> list[int]:
        """Tiers whose answers are missing."""
        tiers = [tier for search in self.asking for tier in search.waits_for]
        return [*tiers, *(self.tail.unread if self.tail is not None else ())]

    def stored(self, found: int, host: HostCacheIndex) -> StoredChunks:
        """Return which of the `found` chunks stores have, if the lookup seeks them."""
        search, stores = self.search, self.stores
        if not self.lookup.seeks_stored:
            return NOTHING_STORED
        if stores is None:
            return StoredChunks(found, search.attention)
        # A chunk inside which the hit ends is not asked of stores again.
        chunks, attention = (search.found, stores.found), (search.attention, stores.attention)
        others = self.chain.hashes[min(attention) : search.attention]
        is_in_host = all(self.names.are_in(host, each) for each in others)
        windows = frozenset(self.host_windows)
        return StoredChunks(min(chunks), min(attention), is_in_host, windows)

    @property
    def has_stored(self) -> bool:
        """True unless stores have still to say what they have of the chunks in host memory."""
        return self.stores is None or self.stores.done

    @property
    def has_expected(self) -> bool:
        """True if all chunks that the request expects are found."""
        search = self.search
        return search.found >= self.expected or search.attention >= self.expected_attention

    def expects_more(self, now: float) -> bool:
        """Return True if more chunks of the producer may come."""
        return (
            not self.has_expected
            and max(self.search.found, self.search.attention) < self.most
            and self.looks_left > 0
            and now < self.lookup.expect_until
        )


Present = list[bool] | None
Value = list[bool] | list[bytes | None] | None
"""The result of a call: for each key whether it is stored, or its object (None if no sound object
is stored). A removal has no result, and a call that has failed returns None."""


@dataclass(slots=True, eq=False, kw_only=True)
class TierCall:
    """A call to a tier: `exists` of `keys`, reading these aliases, or removing `namespaces`."""

    tier: int
    returned: Callable[[Any, float], None]
    """Takes the outcome and the time, on the lookup thread."""
    began: float = math.inf
    keys: Sequence[str] = ()
    reads: bool = False  # the objects of its keys, which are aliases
    namespaces: tuple[Namespace, ...] | None = None
    is_for_lookups: bool = False
    is_late: bool = False  # lookups have been answered without it


@dataclass(slots=True)
class _Tier:
    pace: TierPace = field(default_factory=TierPace)
    call: TierCall | None = None
    removals: deque[TierCall] = field(default_factory=deque)
    """They go before lookups."""


class LookupCore:
    """The open lookups, and which tier is called for what. Lookup thread; `now` is monotonic.

    `block`: loads begin and end at multiples of it, except at the end of a full hit. `timeout_s`:
    how long a request waits for its lookup. `on_pace(tier, is_left_alone)` is called when that
    changes. `loses_cells`: single cells leave a tier, so every lookup is exact. `alias_step`:
    tokens between the aliases of a chunk, which `alias_tiers` may hold; 0 for none.
    """

    def __init__(
        self,
        num_tiers: int,
        names: CellNames,
        chunk_tokens: int,
        host: HostCacheIndex,
        block: int,
        timeout_s: float,
        on_pace: Callable[[int, bool], None] = lambda tier, is_left_alone: None,
        *,
        loses_cells: bool = False,
        alias_step: int = 0,
        alias_tiers: Sequence[int] = (),
    ) -> None:
        self._tiers = [_Tier() for _ in range(num_tiers)]
        self._alias_step = alias_step
        self._alias_tiers = frozenset(alias_tiers)
        self._names = names
        self._names_of = lru_cache(maxsize=1)(names.with_weights)  # for the newest lookup
        self._chunk_tokens = chunk_tokens
        self._block = block
        self._has_states = any(each.is_state for each in names.layer_groups)
        self._timeout_s = timeout_s
        self._on_pace = on_pace
        self._exact_chunks = names.exact_chunks(MAX_EXACT_KEYS)
        self._loses_cells = loses_cells
        self._host = host
        self._open: dict[int, _OpenLookup] = {}
        self._calls: list[TierCall] = []
        self.results: deque[LookupResult] = deque()
        """Answers, for the service to take."""
        self.useless_aliases: list[str] = []
        """Keys of aliases that lead nowhere, for the service to have removed."""

    # Inputs

    def open(self, lookup: Lookup, chain: ChunkChain, now: float, end: bytes | None = None) -> None:
        """Look for the chunks of a hashed prompt, and for its end."""
        seeks_tail = lookup.seeks_tail and len(lookup.tokens) >= self._alias_step > 0
        if not lookup.search or not (len(chain) or end or seeks_tail):
            self.results.append(lookup.nothing_found(chain))
            return
        names = self._names_of(lookup.weights_version)
        num_chunks, expected, attention = self._wanted_chunks(lookup, chain, end)
        has_host = self._host.num_ranks > 0
        host_windows: set[str] = set()
        new_searches = partial(
            self._new_search, lookup, chain, end, names, num_chunks, host_windows
        )
        new_search = new_searches(has_host=has_host)
        seeks_more = has_host and lookup.seeks_stored
        new_stores = new_searches(has_host=False) if seeks_more else None
        tiers = self._usable(now)
        opened = _OpenLookup(
            *(lookup, chain, end, names, expected, attention),
            new_search=new_search,
            new_stores=new_stores,
            search=new_search(tiers),
            stores=None if new_stores is None else new_stores(tiers),
            began=now,
            answer_by=lookup.answer_by,
            defer_at=now + self._timeout_s * PUT_OFF_SHARE,
            host_windows=host_windows,
        )
        self._open[lookup.lookup_id] = opened
        self._try_tiers(opened, now)
        self._advance(opened, now)

    def cancel(self, lookup_id: int) -> None:
        """Drop a lookup whose answer nobody waits for."""
        self._open.pop(lookup_id, None)

    def remove_all(
        self, done: Callable[[bool], None], weights_versions: Sequence[str], now: float
    ) -> None:
        """Remove every cell of the own namespace under those versions of the weights.

        `done` is called on the lookup thread: whether every store has confirmed it.
        """
        for opened in list(self._open.values()):  # cells that it has found may be removed by now
            tiers = self._usable(now)
            opened.host_windows.clear()
            opened.search = opened.new_search(tiers)
            opened.stores = None if opened.new_stores is None else opened.new_stores(tiers)
            opened.tail = None
            self._advance(opened, now)
        namespaces = tuple(self._names.with_weights(each).namespace for each in weights_versions)
        confirmed: list[bool] = []

        def returned(value: Present, now: float) -> None:
            confirmed.append(value is not None)
            if len(confirmed) == len(self._tiers):
                done(all(confirmed))

        for number, tier in enumerate(self._tiers):
            tier.removals.append(TierCall(tier=number, returned=returned, namespaces=namespaces))
        if not self._tiers:
            done(self._host.num_ranks > 0)

    def produced(
        self,
        lookup_id: int,
        now: float,
        stored: int = 0,
        ended: int | None = None,
        *,
        is_lost: bool = False,
    ) -> None:
        """Look at once for what the producer of a lookup's expected chunks has stored.

        Args:
            lookup_id: the lookup; one that has ended is ignored.
            now: monotonic seconds.
            stored: the producer has stored the chunks before this index.
            ended: the producer stores no chunk from this index on; None: more may come.
            is_lost: the connection to the producer has ended.
        """
        opened = self._open.get(lookup_id)
        if opened is None:
            return
        opened.is_told = not is_lost
        # Chunks from `stored` to `ended` are on their way to a store.
        has_ended = is_lost or (ended is not None and stored >= ended)
        if ended is not None:
            opened.most = min(opened.most, ended)
        elif not is_lost and stored <= opened.search.found:
            if opened.poll_at < math.inf:
                opened.poll_at = min(now + POLL_MAX_S, opened.lookup.expect_until)
            return
        if has_ended:
            opened.has_lost_producer |= is_lost
            opened.looks_left = min(opened.looks_left, 1)
            patience_s = opened.lookup.answer_by - opened.lookup.expect_until
            opened.answer_by = min(opened.answer_by, now + patience_s)
        opened.is_hinted = True
        opened.poll_at = math.inf
        self._advance(opened, now)

    def _look_again(self, opened: _OpenLookup, now: float) -> None:
        """Ask once more for the chunks that were missing."""
        opened.poll_at = math.inf
        opened.is_hinted = False
        opened.looks_left -= 1
        for search in (opened.search, opened.stores):
            if search is not None:
                search.restart(self._usable(now))

    def returned(self, call: TierCall, value: Value, now: float) -> None:
        """Take the value of a call that has returned."""
        self._tiers[call.tier].call = None
        if value is not None and len(value) != len(call.keys):
            value = None  # the store breaks its contract
        call.returned(value, now)

    # Outputs

    def next_calls(self, now: float) -> list[TierCall]:
        """Do what is due; the calls to make now."""
        for opened in list(self._open.values()):
            self._attend(opened, now)
        for number, tier in enumerate(self._tiers):
            if tier.call is None and (call := self._next_call(number, tier, now)) is not None:
                tier.call = call
                self._calls.append(call)
        calls, self._calls = self._calls, []
        return calls

    def next_due(self) -> float:
        """Return the latest time to call `next_calls`; infinite if nothing is due."""
        return min(
            (
                min(opened.answer_by, opened.poll_at, opened.defer_at)
                for opened in self._open.values()
            ),
            default=math.inf,
        )

    def fail_all(self) -> None:
        """Answer every open lookup after a bug, so that no request waits."""
        for opened in list(self._open.values()):
            self._finish(opened, LookupOutcome.STORE_ERROR, LookupOutcome.ANSWERED)

    def removals(self) -> list[TierCall]:
        """Return the removals that no call has been made for yet; the service is about to end."""
        return [call for tier in self._tiers for call in tier.removals]

    # Lookups

    def _usable(self, now: float) -> list[int]:
        """Return the tiers that are not left alone, nor late with a call."""
        return [
            number
            for number, tier in enumerate(self._tiers)
            if not tier.pace.is_left_alone
            and (tier.call is None or now - tier.call.began <= self._timeout_s)
        ]

    def _wanted_chunks(
        self, lookup: Lookup, chain: ChunkChain, end: bytes | None
    ) -> tuple[int, int, int]:
        """Return the number of chunks to look for, to wait for, and to wait for in attention alone.

        A load of recurrent states ends at a boundary and leaves a token to compute: no rows of a
        loaded block can be computed again from a state after it. Where the boundary that is
        expected lies within one of this engine's blocks, an earlier one may never get a state: the
        lookup ends once all attention is there, which is put after the states before it.
        """
        num_chunks = len(chain) + (end is not None)
        if lookup.stop_chunk is not None:
            num_chunks = min(num_chunks, lookup.stop_chunk)
        never = num_chunks + 1
        expect_chunks = lookup.expect_tokens // self._chunk_tokens
        if end is not None and lookup.expect_tokens >= len(lookup.tokens):
            expect_chunks = num_chunks
        if not self._has_states:
            return num_chunks, min(expect_chunks, num_chunks), never
        num_chunks = min(num_chunks, (len(lookup.tokens) - 1) // self._chunk_tokens)
        step = math.lcm(self._chunk_tokens, self._block) // self._chunk_tokens
        told = min(expect_chunks, num_chunks)
        usable = told - told % step
        return num_chunks, usable, told if usable < told else never

    def _new_search(
        self,
        lookup: Lookup,
        chain: ChunkChain,
        end: bytes | None,
        names: CellNames,
        chunks: int,
        host_windows: set[str],
        *,
        has_host: bool,
    ) -> Callable[[Sequence[int]], TieredSearch]:
        """Return what makes a search of the given tiers for the first chunks of a lookup.

        `has_host`: of host memory, too; it adds to `host_windows`.
        """
        hashes = chain.hashes if end is None else [*chain.hashes, end]
        # The producer puts cells of several chunks at once: a later one may come first.
        is_exact = lookup.exact or lookup.expect_tokens > 0 or self._loses_cells
        exact, num_tokens = self._exact_chunks if is_exact else 0, len(lookup.tokens)
        groups, sizes = names.layer_groups, (self._chunk_tokens, self._block)
        make_search = partial(HitSearch, chunks, groups, *sizes, exact, num_tokens=num_tokens)
        keys_of = partial(self._keys_of, names, hashes, host_windows)
        if not has_host:
            keys_of = partial(names.of_questions, hashes=hashes)
        return partial(TieredSearch, chunks, make_search, keys_of, has_host=has_host)

    def _keys_of(
        self,
        names: CellNames,
        hashes: Sequence[bytes],
        host_windows: set[str],
        questions: Sequence[Question],
    ) -> tuple[list[CellKey], list[int]]:
        """Return the cells of questions that are not in host memory; see `TieredSearch`."""
        host = self._host
        keys: list[CellKey] = []
        ends: list[int] = []
        for question in questions:
            chunk_id = names.chunk_id(hashes[question.chunk], question.layer_group)
            if host.has(chunk_id):
                if not names.layer_groups[question.layer_group].window.is_full:
                    host_windows.add(chunk_id)
            else:
                keys += names.of_questions((question,), hashes)[0]
            ends.append(len(keys))
        return keys, ends

    def _begin_tail(self, opened: _OpenLookup, now: float) -> bool:
        """Look for an end of the hit inside the chunk behind those found.

        Returns False if there can be none.
        """
        lookup, chain, step = opened.lookup, opened.chain, self._alias_step
        if not step or not lookup.seeks_tail:
            return False
        index = opened.search.found
        start = index * self._chunk_tokens
        tokens = lookup.tokens[start : start + self._chunk_tokens - 1]
        tiers = self._alias_tiers.intersection(self._usable(now))
        if len(tokens) < step or not tiers or chain.has_extras(index):
            return False
        prefix = alias_prefix(opened.names.namespace)
        ends = range(len(tokens) - len(tokens) % step, 0, -step)
        aliases = tuple(
            (end, prefix + chain.hash_of_part(index, tokens[:end]).hex()) for end in ends
        )
        opened.tail = _OpenTail(index, tokens, aliases, set(tiers), set(tiers))
        return True

    def _aliases_read(
        self,
        number: int,
        asked: Sequence[tuple[_OpenLookup, _OpenTail]],
        values: list[bytes | None] | None,
        now: float,
    ) -> None:
        """Take the aliases of these lookups, which a tier has read."""
        start = 0
        for opened, tail in asked:
            stop = start + len(tail.aliases)
            contents = [None] * len(tail.aliases) if values is None else values[start:stop]
            start = stop
            tail.unread.remove(number)
            for (end, key), content in zip(tail.aliases, contents, strict=True):
                if content is None:
                    continue
                alias = read_alias(content)
                found = None if alias is None else self._tail_of(opened.chain, tail, end, alias)
                if found is None:
                    self.useless_aliases.append(key)
                else:
                    candidate = _Candidate(found, [])
                    keys = tail.found.setdefault(found.chunk_hash, candidate).alias_keys
                    keys.append(key)
            # A reset may have begun another search meanwhile.
            if opened.tail is tail and opened.lookup.lookup_id in self._open:
                self._advance(opened, now)

    def _tail_of(self, chain: ChunkChain, tail: _OpenTail, end: int, alias: Alias) -> Tail | None:
        """Return the chunk that an alias leads to.

        None unless the chunk begins with the prompt's `end` tokens, and its tokens have its hash.
        """
        own, other = tail.tokens, alias.tokens
        shorter = min(len(own), len(other))
        pairs = zip(own, other, strict=False)
        common = next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)
        if common < end or chain.hash_of_part(tail.index, other) != alias.chunk_hash:
            return None
        is_whole = len(other) == self._chunk_tokens
        return Tail(tail.index, alias.chunk_hash, common, 0 if is_whole else len(other))

    def _advance_tail(self, opened: _OpenLookup, tail: _OpenTail, now: float) -> None:
        """Answer once it is known which of the candidates are stored."""
        if tail.unread:
            return
        if tail.search is None:
            tail.candidates = sorted(tail.found.values(), key=lambda each: -each.tail.tokens)
            count, groups = len(tail.candidates), opened.names.layer_groups
            hashes = [each.tail.chunk_hash for each in tail.candidates]
            tail.search = TieredSearch(
                count,
                lambda: TailSearch(count, groups),
                partial(self._keys_of, opened.names, hashes, set()),
                self._usable(now) if count else (),
                has_host=self._host.num_ranks > 0,
            )
        search = tail.search
        if search.done and opened.has_stored:
            if not search.has_failed and search.num_tiers == len(self._tiers):
                for each in tail.candidates[: tail.num_missing]:
                    self.useless_aliases += each.alias_keys
            self._answer(opened)

    def _answer(self, opened: _OpenLookup) -> None:
        """Answer a lookup whose searches have ended."""
        search, stores = opened.search, opened.stores
        for tier in search.answered | (set() if stores is None else stores.answered):
            self._tiers[tier].pace.in_time()
        self._finish(opened, self._outcome(search), self._miss_reason(search))

    def _try_tiers(self, opened: _OpenLookup, now: float) -> None:
        """Try tiers whose pause is over; the lookup does not wait for them."""
        for number, tier in enumerate(self._tiers):
            if tier.call is None and not tier.removals and tier.pace.may_be_tried(now):
                search = opened.new_search([number])
                keys = search.take_wanted(number)
                if keys:  # the prompt is not all in host memory
                    tier.call = TierCall(
                        tier=number,
                        returned=partial(self._tried, number, now),
                        began=now,
                        keys=keys,
                    )
                    self._calls.append(tier.call)

    def _tried(self, number: int, began: float, value: Present, now: float) -> None:
        is_quick = value is not None and now - began <= self._timeout_s * QUICK_SHARE
        self._tiers[number].pace.tried(now, is_quick=is_quick)
        if is_quick:
            self._on_pace(number, False)

    def _attend(self, opened: _OpenLookup, now: float) -> None:
        if now >= opened.answer_by:
            self._answer_late(opened, now)
            return
        if now >= opened.poll_at:
            self._look_again(opened, now)
            self._advance(opened, now)
        elif now >= opened.defer_at:
            # The tier that is asked instead may be late as well.
            is_late = bool(opened.waits_for)
            opened.defer_at = now + self._timeout_s * PUT_OFF_SHARE if is_late else math.inf
            for search in opened.asking:
                search.defer()
            self._advance(opened, now)

    def _advance(self, opened: _OpenLookup, now: float) -> None:
        """Answer if the search has ended, or search again later if more is expected."""
        lookup, search = opened.lookup, opened.search
        if opened.tail is not None:
            self._advance_tail(opened, opened.tail, now)
            return
        expects_more = opened.expects_more(now)
        if search.done and not expects_more:
            if not self._begin_tail(opened, now) and opened.has_stored:
                self._answer(opened)
            return
        if 0 < opened.expected <= search.found:
            self._finish(opened, LookupOutcome.ANSWERED, LookupOutcome.ANSWERED)
            return
        if not expects_more:
            return
        if search.done and opened.is_hinted:
            self._look_again(opened, now)
            self._advance(opened, now)
            return
        # Once the producer has ended, each further search begins after the one before.
        if opened.poll_at == math.inf and (search.done or opened.looks_left == math.inf):
            pause_s = min(POLL_MAX_S, max(POLL_MIN_S, (now - opened.began) * POLL_SHARE))
            if opened.is_told:
                pause_s = POLL_MAX_S
            opened.poll_at = min(now + pause_s, lookup.expect_until)
        if search.found > opened.told:
            opened.told = search.found
            self.results.append(self._result(opened, LookupOutcome.ANSWERED, is_final=False))

    def _outcome(self, search: TieredSearch) -> LookupOutcome:
        """Return the outcome of a search that has ended."""
        if search.found or search.num_tiers or (self._host.num_ranks and not self._tiers):
            return LookupOutcome.ANSWERED
        return self._miss_reason(search) if self._tiers else LookupOutcome.STORE_ERROR

    def _miss_reason(self, search: TieredSearch) -> LookupOutcome:
        """Return the reason why an ended search found no more chunks."""
        if search.has_failed:
            return LookupOutcome.STORE_ERROR
        is_left_out = search.num_tiers < len(self._tiers)
        return LookupOutcome.TIMED_OUT if is_left_out else LookupOutcome.ANSWERED

    def _answer_late(self, opened: _OpenLookup, now: float) -> None:
        """Answer with what is known, as `answer_by` is over, and note the late tiers."""
        for number in opened.waits_for:
            tier = self._tiers[number]
            if (
                tier.call is not None
                and tier.call.is_for_lookups
                and not tier.call.is_late  # a call counts once, however many lookups wait for it
                and now - tier.call.began >= self._timeout_s * QUICK_SHARE
            ):
                tier.call.is_late = True
                if tier.pace.late(now):
                    self._on_pace(number, True)
        is_known = opened.search.found or opened.search.done
        outcome = LookupOutcome.ANSWERED if is_known else LookupOutcome.TIMED_OUT
        is_done = opened.search.done  # the lookup waits for expected chunks
        reason = self._miss_reason(opened.search) if is_done else LookupOutcome.TIMED_OUT
        self._finish(opened, outcome, reason)

    def _finish(self, opened: _OpenLookup, outcome: LookupOutcome, reason: LookupOutcome) -> None:
        self._open.pop(opened.lookup.lookup_id, None)
        self.results.append(self._result(opened, outcome, reason))

    def _result(
        self,
        opened: _OpenLookup,
        outcome: LookupOutcome,
        miss_reason: LookupOutcome = LookupOutcome.ANSWERED,
        *,
        is_final: bool = True,
    ) -> LookupResult:
        is_answered = outcome is LookupOutcome.ANSWERED
        found = opened.search.found
        tail = None if opened.tail is None else opened.tail.tail
        if tail is not None:
            found = tail.position + 1
        elif opened.end is not None:
            end_tokens = len(opened.lookup.tokens) - len(opened.chain) * opened.chain.chunk_tokens
            tail = Tail(len(opened.chain), opened.end, end_tokens, end_tokens)
        return LookupResult(
            opened.lookup.lookup_id,
            opened.chain,
            found if is_answered else 0,
            outcome,
            opened.lookup.weights_version,
            miss_reason,
            opened.search.attention if is_answered else 0,
            opened.stored(found, self._host) if is_answered else NOTHING_STORED,
            lacks_expected=not opened.has_expected,
            tail=tail,
            is_final=is_final,
            expected_chunks=opened.expected,
            has_lost_producer=opened.has_lost_producer,
        )

    # Tiers

    def _next_call(self, number: int, tier: _Tier, now: float) -> TierCall | None:
        if tier.removals:
            removal = tier.removals.popleft()
            removal.began = now
            return removal
        if self._alias_step and (call := self._read_call(number, now)) is not None:
            return call
        keys: list[CellKey] = []
        asked = []
        for opened in self._open.values():
            if len(keys) >= MAX_KEYS_PER_ROUND:
                break
            for search in opened.asking:
                if wanted := search.take_wanted(number):
                    keys += wanted
                    asked.append((opened, search, len(wanted)))
        if not keys:
            return None
        returned = partial(self._exists_returned, number, asked)
        return TierCall(tier=number, returned=returned, began=now, keys=keys, is_for_lookups=True)

    def _read_call(self, number: int, now: float) -> TierCall | None:
        """Return a call that reads the aliases of lookups in a tier.

        The result is None if none are to be read.
        """
        keys: list[str] = []
        asked: list[tuple[_OpenLookup, _OpenTail]] = []
        for opened in self._open.values():
            tail = opened.tail
            if tail is None or number not in tail.unasked:
                continue
            if len(keys) + len(tail.aliases) > MAX_READ_ALIASES:
                break
            tail.unasked.remove(number)
            keys += [key for _, key in tail.aliases]
            asked.append((opened, tail))
        if not keys:
            return None
        returned = partial(self._aliases_read, number, asked)
        return TierCall(
            tier=number, returned=returned, began=now, keys=keys, reads=True, is_for_lookups=True
        )

    def _exists_returned(
        self,
        number: int,
        asked: Sequence[tuple[_OpenLookup, TieredSearch, int]],
        present: Present,
        now: float,
    ) -> None:
        """Take the answer to a call of `exists`.

        `asked`: the lookups of the call, each with its search and how many keys it has.
        """
        start = 0
        for opened, search, count in asked:
            stop = start + count
            if present is None:
                search.failed(number)
            else:
                search.take_answer(number, present[start:stop])
            start = stop
            if search in opened.asking and opened.lookup.lookup_id in self._open:
                self._advance(opened, now)
