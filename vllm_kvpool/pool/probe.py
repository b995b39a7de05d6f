"""The thread that asks the store, so that the scheduler never does.

Owns the scheduler side's stores (metadata only), the open lookups, the requests' hash chains until
it hands them over in an `Answer`, and what the workers say of their host memory. Inbox: `Lookup`,
`Forget`, `RemoveAll`, `HostNews`, `Look`. Outbox: answers, taken by the scheduler's thread.
A chunk that every rank has in host memory is found without asking, and while no tier answers; of
the others, each tier is asked for the cells that nearer ones lack. One that is away, or does not
answer in time, says so by itself (`store/guard.py`), so the thread is never stuck for long.

Every round puts the next questions of all open lookups into one batch of at most
`MAX_KEYS_PER_ROUND` keys. A lookup that expects more than it finds is asked again, every
`POLL_MIN_S` to `POLL_MAX_S`, until its deadline. The thread ends by a sentinel.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from queue import Empty, SimpleQueue

from vllm_kvpool.errors import StoreError
from vllm_kvpool.hashing import ChunkChain, RequestIdentity
from vllm_kvpool.keys import CellKey, Namespace, hash_of_group, kind_of_group
from vllm_kvpool.pool.lookup import CellNames, HitSearch, HostMirror, Question
from vllm_kvpool.store.base import Store
from vllm_kvpool.transfer.ops import HostChange

logger = logging.getLogger(__name__)

MAX_KEYS_PER_ROUND = 4096
POLL_MIN_S = 0.002
POLL_MAX_S = 0.05
JOIN_S = 0.5


class LookupOutcome(Enum):
    """How a lookup ended."""

    ANSWERED = "answered"
    UNSHAREABLE = "unshareable"  # the request's identity cannot be told across engines
    STORE_ERROR = "store_error"
    TIMED_OUT = "timed_out"


@dataclass(frozen=True, slots=True)
class Lookup:
    """A question. `identify` runs on the probe thread: it may read an adapter's files.

    `search` False asks for the hash chain only. `expect_chunks` makes it wait until `deadline`
    (monotonic seconds) for that many chunks. `epoch` says which weights the cells are of.
    """

    ticket: int
    identify: Callable[[], RequestIdentity | None]
    tokens: Sequence[int]
    search: bool
    expect_chunks: int
    deadline: float
    epoch: str = ""


@dataclass(frozen=True, slots=True)
class Forget:
    ticket: int


@dataclass(frozen=True, slots=True)
class RemoveAll:
    """Remove every cell of the own namespace in those epochs.

    `done` is told whether the store confirmed it.
    """

    done: Callable[[bool], None]
    epochs: tuple[str, ...] = ("",)


@dataclass(frozen=True, slots=True)
class HostNews:
    """What has come into a rank's host memory, or left it."""

    rank: int
    change: HostChange


@dataclass(frozen=True, slots=True)
class Look:
    """Whether chunks are still in the nearest `num_tiers` tiers, by one cell of each.

    Chunks are named as by `group_of`; cells take turns from `first_turn` on. `done` is told, on the
    probe thread, which chunks are gone; none of them if a tier cannot say.
    """

    num_tiers: int
    chunks: tuple[str, ...]
    first_turn: int
    done: Callable[[list[str]], None]
    epoch: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """`chain` is None when the request cannot be shared; else it is the receiver's from now on."""

    ticket: int
    chain: ChunkChain | None
    found_chunks: int
    outcome: LookupOutcome
    epoch: str = ""


_Message = Lookup | Forget | RemoveAll | HostNews | Look


@dataclass(slots=True)
class _Open:
    lookup: Lookup
    chain: ChunkChain
    search: HitSearch
    names: CellNames
    due: float = 0.0
    wait_s: float = POLL_MIN_S


class Probe:
    """See the module docstring. `submit`, `forget` and `take_answers` never block.

    `host_ranks`: how many ranks have host memory of their own; 0 where there is no such tier.
    `block`: loads begin and end at multiples of it, but for the end of a full hit.
    """

    def __init__(
        self,
        stores: Sequence[Store],
        names: CellNames,
        chunk_tokens: int,
        host_ranks: int = 0,
        block: int = 1,
    ) -> None:
        self._stores = stores
        self._block = block
        self._names = names
        self._epoch, self._epoch_names = "", names  # of the newest lookup
        self._chunk_tokens = chunk_tokens
        self._host = HostMirror(host_ranks)
        self._inbox: SimpleQueue[_Message | None] = SimpleQueue()
        self._changed = threading.Condition()
        self._answers: deque[Answer] = deque()  # guarded by _changed
        self._open: dict[int, _Open] = {}
        self._busy_since: float | None = None
        self._thread = threading.Thread(target=self._run, name="kvpool-probe", daemon=True)
        self._thread.start()

    def submit(self, lookup: Lookup) -> None:
        self._inbox.put(lookup)

    def forget(self, ticket: int) -> None:
        """The answer is not wanted any more; it may still come."""
        self._inbox.put(Forget(ticket))

    def remove_all(self, done: Callable[[bool], None], epochs: tuple[str, ...] = ("",)) -> None:
        """Remove the own namespace; `done` is called on the probe thread."""
        self._inbox.put(RemoveAll(done, epochs))

    def host_changed(self, rank: int, change: HostChange) -> None:
        """A rank has told what its host memory holds now."""
        self._inbox.put(HostNews(rank, change))

    def look(self, look: Look) -> None:
        """Look after what may have been evicted."""
        self._inbox.put(look)

    def take_answers(self) -> list[Answer]:
        if not self._answers:  # a length is read atomically; saves the lock on most steps
            return []
        with self._changed:
            answers = list(self._answers)
            self._answers.clear()
        return answers

    def wait(self, timeout_s: float) -> None:
        """Block until there is an answer, at most `timeout_s`."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._answers), timeout_s)

    def stuck_for(self, now: float) -> float:
        """How long the store call in progress has taken, in seconds; 0 if there is none."""
        since = self._busy_since
        return 0.0 if since is None else now - since

    def close(self) -> bool:
        """End the thread; whether it has ended, so that the store may be closed."""
        self._inbox.put(None)
        self._thread.join(JOIN_S)
        return not self._thread.is_alive()

    # The probe thread

    def _run(self) -> None:
        while True:
            try:
                message = self._inbox.get(timeout=self._pause())
            except Empty:
                message = Forget(-1)
            while message is not None:
                self._take(message)
                try:
                    message = self._inbox.get_nowait()
                except Empty:
                    break
            if message is None:
                return
            try:
                self._round(time.monotonic())
            except Exception:
                logger.exception("kvpool: lookups failed")
                for opened in list(self._open.values()):
                    self._finish(opened, LookupOutcome.STORE_ERROR)

    def _pause(self) -> float | None:
        if not self._open:
            return None
        return max(0.0, min(x.due for x in self._open.values()) - time.monotonic())

    def _take(self, message: _Message) -> None:
        match message:
            case HostNews():
                self._host.apply(message.rank, message.change)
            case Forget():
                self._open.pop(message.ticket, None)
            case RemoveAll():
                names = [self._names.in_epoch(epoch) for epoch in message.epochs]
                removed = [self._remove_all(each.namespace) for each in names]
                message.done(all(removed))
            case Look():
                message.done(self._gone(message))
            case Lookup():
                try:
                    self._begin(message)
                except Exception:
                    logger.exception("kvpool: request not shared")
                    self._answer(Answer(message.ticket, None, 0, LookupOutcome.UNSHAREABLE))

    def _remove_all(self, namespace: Namespace) -> bool:
        self._host.clear()
        removed = bool(self._stores) or self._host.num_ranks > 0
        for store in self._stores:
            try:
                self._busy_since = time.monotonic()
                store.remove_namespace(namespace)
            except StoreError as error:
                logger.warning("kvpool: reset failed: %s", error)
                removed = False
            except Exception:
                logger.exception("kvpool: reset failed")
                removed = False
            finally:
                self._busy_since = None
        return removed

    def _gone(self, look: Look) -> list[str]:
        try:
            return self._missing(look)
        except Exception:  # whoever waits for it would never look again
            logger.exception("kvpool: what is stored cannot be looked after")
            return []

    def _missing(self, look: Look) -> list[str]:
        names = self._names_of(look.epoch)
        kinds = {kind.name: number for number, kind in enumerate(names.kinds)}
        keys = [
            names.one_of_chunk(hash_of_group(chunk), kinds[kind_of_group(chunk)], turn)
            for turn, chunk in enumerate(look.chunks, look.first_turn)
        ]
        present, num_silent = self._exists(keys, self._stores[: look.num_tiers])
        if num_silent:
            return []
        return [chunk for chunk, there in zip(look.chunks, present, strict=True) if not there]

    def _begin(self, lookup: Lookup) -> None:
        try:
            identity = lookup.identify()
        except OSError as error:
            logger.warning("kvpool: request not shared: %s", error)
            identity = None
        if identity is None:
            self._answer(Answer(lookup.ticket, None, 0, LookupOutcome.UNSHAREABLE))
            return
        chain = ChunkChain(self._chunk_tokens, identity)
        chain.extend(lookup.tokens)
        names = self._names_of(lookup.epoch)
        opened = _Open(lookup, chain, self._search(len(chain)), names)
        if not lookup.search or not len(chain):
            self._finish(opened, LookupOutcome.ANSWERED)
        elif not self._stores and not self._host.num_ranks:
            self._finish(opened, LookupOutcome.STORE_ERROR)
        else:
            self._open[lookup.ticket] = opened

    def _names_of(self, epoch: str) -> CellNames:
        if epoch != self._epoch:
            self._epoch, self._epoch_names = epoch, self._names.in_epoch(epoch)
        return self._epoch_names

    def _search(self, num_chunks: int) -> HitSearch:
        return HitSearch(num_chunks, self._names.kinds, self._chunk_tokens, self._block)

    def _round(self, now: float) -> None:
        """Ask the next questions of every lookup that is due, in one batch."""
        asked: list[tuple[_Open, tuple[Question, ...], list[int]]] = []
        keys: list[str] = []
        for opened in self._open.values():
            if opened.due > now or len(keys) >= MAX_KEYS_PER_ROUND:
                continue
            questions = opened.search.questions()
            new, ends = self._keys_of(opened, questions)
            start = len(keys)
            keys += new
            asked.append((opened, questions, [start, *(start + end for end in ends)]))
        if not asked:
            return
        present, num_silent = self._exists(keys, self._stores)
        failed = 0 < num_silent == len(self._stores)
        for opened, questions, bounds in asked:
            there = [all(present[a:b]) for a, b in pairwise(bounds)]
            if failed and not (any(there) or opened.search.found):
                self._finish(opened, LookupOutcome.STORE_ERROR)
                continue
            opened.search.tell(questions, there)
            if opened.search.done:
                self._settle(opened)

    def _keys_of(
        self, opened: _Open, questions: Sequence[Question]
    ) -> tuple[list[CellKey], list[int]]:
        """The keys to ask for, and where those of each question end; none for what ranks have."""
        hashes = opened.chain.hashes
        if not self._host.num_ranks:
            return opened.names.of_questions(questions, hashes)
        keys: list[CellKey] = []
        ends: list[int] = []
        for question in questions:
            group = opened.names.group(hashes[question.chunk], question.kind)
            if not self._host.has(group):
                keys += opened.names.of_questions((question,), hashes)[0]
            ends.append(len(keys))
        return keys, ends

    def _exists(self, keys: Sequence[str], stores: Sequence[Store]) -> tuple[list[bool], int]:
        """Whether any tier has each key, and how many of those asked could not say."""
        present = [False] * len(keys)
        missing = list(range(len(keys)))
        num_silent = 0
        for store in stores:
            if not missing:
                break
            try:
                self._busy_since = time.monotonic()
                answers = store.exists([keys[i] for i in missing])
            except StoreError as error:
                logger.debug("kvpool: lookup failed: %s", error)
                num_silent += 1
                continue
            finally:
                self._busy_since = None
            for i, there in zip(missing, answers, strict=True):
                present[i] = there
            missing = [i for i, there in zip(missing, answers, strict=True) if not there]
        return present, num_silent

    def _settle(self, opened: _Open) -> None:
        """A search is complete: answer, or ask again later if more is expected."""
        now = time.monotonic()
        expected = min(opened.lookup.expect_chunks, len(opened.chain))
        if opened.search.found >= expected or now >= opened.lookup.deadline:
            self._finish(opened, LookupOutcome.ANSWERED)
            return
        opened.search = self._search(len(opened.chain))
        opened.due = min(now + opened.wait_s, opened.lookup.deadline)
        opened.wait_s = min(POLL_MAX_S, opened.wait_s * 2)

    def _finish(self, opened: _Open, outcome: LookupOutcome) -> None:
        self._open.pop(opened.lookup.ticket, None)
        found = opened.search.found if outcome is LookupOutcome.ANSWERED else 0
        lookup = opened.lookup
        self._answer(Answer(lookup.ticket, opened.chain, found, outcome, lookup.epoch))

    def _answer(self, answer: Answer) -> None:
        with self._changed:
            self._answers.append(answer)
            self._changed.notify_all()
