"""The thread that asks the store, so that the scheduler never does.

Owns the scheduler side's store (metadata only), the open lookups and the requests' hash chains
until it hands them over in an `Answer`. Inbox: `Lookup`, `Forget`, `RemoveAll`. Outbox: answers,
taken by the scheduler's thread. Every round puts the next questions of all open lookups into one
batch of at most `MAX_KEYS_PER_ROUND` keys. A lookup that expects more than it finds is asked
again, every `POLL_MIN_S` to `POLL_MAX_S`, until its deadline. The thread ends by a sentinel; one
that is stuck in the store is left behind.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from queue import Empty, SimpleQueue

from vllm_kvpool.errors import StoreError
from vllm_kvpool.hashing import ChunkChain, RequestIdentity
from vllm_kvpool.pool.lookup import CellNames, PrefixSearch
from vllm_kvpool.store.base import Store

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
    (monotonic seconds) for that many chunks.
    """

    ticket: int
    identify: Callable[[], RequestIdentity | None]
    tokens: Sequence[int]
    search: bool
    expect_chunks: int
    deadline: float


@dataclass(frozen=True, slots=True)
class Forget:
    ticket: int


@dataclass(frozen=True, slots=True)
class RemoveAll:
    """Remove every cell of the own namespace; `done` is told whether the store confirmed it."""

    done: Callable[[bool], None]


@dataclass(frozen=True, slots=True)
class Answer:
    """`chain` is None when the request cannot be shared; else it is the receiver's from now on."""

    ticket: int
    chain: ChunkChain | None
    found_chunks: int
    outcome: LookupOutcome


@dataclass(slots=True)
class _Open:
    lookup: Lookup
    chain: ChunkChain
    search: PrefixSearch
    due: float = 0.0
    wait_s: float = POLL_MIN_S


class Probe:
    """See the module docstring. `submit`, `forget` and `take_answers` never block."""

    def __init__(self, store: Store | None, names: CellNames, chunk_tokens: int) -> None:
        self._store = store
        self._names = names
        self._chunk_tokens = chunk_tokens
        self._inbox: SimpleQueue[Lookup | Forget | RemoveAll | None] = SimpleQueue()
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

    def remove_all(self, done: Callable[[bool], None]) -> None:
        """Remove the own namespace; `done` is called on the probe thread."""
        self._inbox.put(RemoveAll(done))

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

    def _take(self, message: Lookup | Forget | RemoveAll) -> None:
        match message:
            case Forget():
                self._open.pop(message.ticket, None)
            case RemoveAll():
                message.done(self._remove_all())
            case Lookup():
                try:
                    self._begin(message)
                except Exception:
                    logger.exception("kvpool: request not shared")
                    self._answer(Answer(message.ticket, None, 0, LookupOutcome.UNSHAREABLE))

    def _remove_all(self) -> bool:
        if self._store is None:
            return False
        try:
            self._busy_since = time.monotonic()
            self._store.remove_namespace(self._names.namespace)
        except StoreError as error:
            logger.warning("kvpool: reset failed: %s", error)
            return False
        finally:
            self._busy_since = None
        return True

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
        opened = _Open(lookup, chain, PrefixSearch(len(chain)))
        if not lookup.search or not len(chain):
            self._finish(opened, LookupOutcome.ANSWERED)
        elif self._store is None:
            self._finish(opened, LookupOutcome.STORE_ERROR)
        else:
            self._open[lookup.ticket] = opened

    def _round(self, now: float) -> None:
        """Ask the next questions of every lookup that is due, in one batch."""
        asked: list[tuple[_Open, tuple[int, ...]]] = []
        keys: list[str] = []
        per_chunk = self._names.per_chunk
        for opened in self._open.values():
            if opened.due > now or len(keys) >= MAX_KEYS_PER_ROUND:
                continue
            questions = opened.search.questions()
            for chunk in questions:
                keys += self._names.of_chunk(opened.chain.hashes[chunk])
            asked.append((opened, questions))
        if not asked:
            return
        try:
            assert self._store is not None
            self._busy_since = time.monotonic()
            present = self._store.exists(keys)
        except StoreError as error:
            logger.warning("kvpool: lookup failed: %s", error)
            for opened, _ in asked:
                self._finish(opened, LookupOutcome.STORE_ERROR)
            return
        finally:
            self._busy_since = None
        place = 0
        for opened, questions in asked:
            there = []
            for _ in questions:
                there.append(all(present[place : place + per_chunk]))
                place += per_chunk
            opened.search.tell(questions, there)
            if opened.search.done:
                self._settle(opened)

    def _settle(self, opened: _Open) -> None:
        """A search is complete: answer, or ask again later if more is expected."""
        now = time.monotonic()
        expected = min(opened.lookup.expect_chunks, len(opened.chain))
        if opened.search.found >= expected or now >= opened.lookup.deadline:
            self._finish(opened, LookupOutcome.ANSWERED)
            return
        opened.search = PrefixSearch(len(opened.chain))
        opened.due = min(now + opened.wait_s, opened.lookup.deadline)
        opened.wait_s = min(POLL_MAX_S, opened.wait_s * 2)

    def _finish(self, opened: _Open, outcome: LookupOutcome) -> None:
        self._open.pop(opened.lookup.ticket, None)
        found = opened.search.found if outcome is LookupOutcome.ANSWERED else 0
        self._answer(Answer(opened.lookup.ticket, opened.chain, found, outcome))

    def _answer(self, answer: Answer) -> None:
        with self._changed:
            self._answers.append(answer)
            self._changed.notify_all()
