"""The threads that ask the stores, so that the scheduler's thread never does.

    scheduler's thread --tasks--> lookup thread --TierCall--> a thread per tier
       |      ^---- LookupResult ----'  ^ ^ ^------- its value -------'
       '--Lookup--> the thread that reads adapters, and notices of producers

The lookup thread owns the open lookups, and hash chains until they go out in a `LookupResult`;
`lookup_core.py` decides. A tier's thread performs one call at a time, so a slow tier holds up no
other. Calls to a store that is away fail at once (`storage/guarded.py`).
"""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import NamedTuple, TypeVar

from vllm_kvpool.errors import StoreError
from vllm_kvpool.handover.consumer import NoticeClient
from vllm_kvpool.identity.chunk_hash import ChunkChain, RequestIdentity
from vllm_kvpool.metrics import MetricsRegistry
from vllm_kvpool.scheduler.aliases import Aliases
from vllm_kvpool.scheduler.lookup import Lookup, LookupOutcome, LookupResult
from vllm_kvpool.scheduler.lookup_core import QUICK_SHARE, LookupCore, Present, TierCall, Value
from vllm_kvpool.scheduler.prefix_search import CellNames, HostCacheIndex
from vllm_kvpool.scheduler.save_outcomes import EndedSave
from vllm_kvpool.storage.base import Store

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")

LOOKUP_TIMEOUT_S = 0.5
JOIN_S = 0.5


class _Task(NamedTuple):
    """A task of the lookup thread."""

    run: Callable[[], None]
    give_up: Callable[[], None]
    """Called after a bug in `run`, so that no caller waits for ever."""
    is_lookup: bool = False


OnNotice = Callable[[bytes, int, int | None], None]
OnLost = Callable[[bytes], None]


class LookupService:
    """Lookups and resets over the stores. Only `wait` and `close` block.

    `host_ranks`: how many ranks have a host tier; 0 where there is none. `block`: loads begin and
    end at multiples of it, except at the end of a full hit. `timeout_s`: how long a request waits
    for its lookup. `tier_names` are for messages and metrics. `loses_cells`: single cells leave a
    store. `open_notices` opens the connections to producers. `aliases` are those in the stores.
    """

    def __init__(
        self,
        stores: Sequence[Store],
        names: CellNames,
        chunk_tokens: int,
        host_ranks: int = 0,
        block: int = 1,
        timeout_s: float = LOOKUP_TIMEOUT_S,
        tier_names: Sequence[str] = (),
        registry: MetricsRegistry | None = None,
        *,
        loses_cells: bool = False,
        open_notices: Callable[[OnNotice, OnLost], NoticeClient] | None = None,
        aliases: Aliases | None = None,
    ) -> None:
        self._stores = stores
        self._aliases = aliases
        self._chunk_tokens = chunk_tokens
        self._timeout_s = timeout_s
        self._tier_names = tier_names or [str(number) for number in range(len(stores))]
        self._registry = registry or MetricsRegistry()
        self.host = HostCacheIndex(host_ranks)
        """Written by the scheduler's thread."""
        self.core = LookupCore(
            *(len(stores), names, chunk_tokens, self.host, block, timeout_s, self._pace_changed),
            loses_cells=loses_cells,
            alias_step=0 if aliases is None else aliases.step,
            alias_tiers=() if aliases is None else aliases.tiers,
        )
        self._inbox: SimpleQueue[_Task | None] = SimpleQueue()
        self._changed = threading.Condition()
        self._results: deque[LookupResult] = deque()  # guarded by _changed
        self._adapter_inbox: SimpleQueue[Lookup | None] = SimpleQueue()
        self._tier_inboxes: list[SimpleQueue[TierCall | None]] = [SimpleQueue() for _ in stores]
        self._threads = [
            threading.Thread(target=self._run, name="kvpool-lookup", daemon=True),
            threading.Thread(target=self._read_adapters, name="kvpool-adapters", daemon=True),
            *(
                threading.Thread(
                    target=partial(self._serve, number, store, inbox),
                    name=f"kvpool-lookup-{name}",
                    daemon=True,
                )
                for number, (store, inbox, name) in enumerate(
                    zip(stores, self._tier_inboxes, self._tier_names, strict=True)
                )
            ),
        ]
        # Lookups whose adapters are read, and that were not cancelled meanwhile.
        self._reading: set[int] = set()
        self._topics: dict[int, bytes] = {}  # of lookups that wait for notices; lookup thread
        self._open_notices = open_notices
        self._notices: NoticeClient | None = None  # from the first watch on; lookup thread
        for name in self._tier_names:
            self._registry.set("kvpool_lookup_tier_up", 1, tier=name)
        for thread in self._threads:
            thread.start()

    def submit(self, lookup: Lookup) -> None:
        """Post a lookup to its thread; its results come by `take_results`."""
        if lookup.reads_files:
            self._reading.add(lookup.lookup_id)
            self._adapter_inbox.put(lookup)
        else:
            self._post_lookup(lookup, lambda: self._begin(lookup, _identity_of(lookup)))

    def cancel(self, lookup_id: int) -> None:
        """Drop the lookup of a request that has ended; its answer may still come."""
        self._inbox.put(_Task(partial(self._cancel, lookup_id), _nothing))

    def remove_all(
        self, done: Callable[[bool], None], weights_versions: tuple[str, ...] = ("",)
    ) -> None:
        """Remove the own namespace from all tiers; see `LookupCore.remove_all`."""
        self.host.clear()
        if self._aliases is not None:
            self._aliases.drop()
        self._inbox.put(
            _Task(
                lambda: self.core.remove_all(done, weights_versions, time.monotonic()),
                lambda: done(False),
            )
        )

    def write_aliases(self, save: EndedSave) -> None:
        """Have the aliases of a save's chunks written. Never blocks."""
        if self._aliases is not None:
            self._aliases.write(save)

    def take_results(self) -> list[LookupResult]:
        """Return the results since the last call, without waiting."""
        if not self._results:  # most steps need no lock
            return []
        with self._changed:
            results = list(self._results)
            self._results.clear()
        return results

    def wait(self, timeout_s: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Block until there is an answer or `until` holds; False if neither was so in `timeout_s`.

        `until` is asked at first and after each `wake`; it must not block.
        """
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._results) or until(), timeout_s)

    def wake(self) -> None:
        """Have `wait` ask its `until` again. Any thread."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> bool:
        """End the threads; whether all have ended, so that the stores may be closed."""
        self._inbox.put(None)
        deadline = time.monotonic() + JOIN_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        has_ended = not any(thread.is_alive() for thread in self._threads)
        return (self._aliases is None or self._aliases.close()) and has_ended

    # The lookup thread

    def _run(self) -> None:
        while True:
            try:
                task = self._inbox.get(timeout=self._pause())
            except Empty:
                self._send_calls()
                continue
            if task is None:
                break
            try:
                task.run()
            except Exception:
                logger.exception("kvpool: lookups: internal error")
                task.give_up()
            # Tiers are asked for one prompt while the next is hashed.
            if task.is_lookup or self._inbox.empty():
                self._send_calls()
        if self._notices is not None:
            self._notices.close()
        for call in self.core.removals():
            self._tier_inboxes[call.tier].put(call)
        self._adapter_inbox.put(None)
        for inbox in self._tier_inboxes:
            inbox.put(None)

    def _send_calls(self) -> None:
        try:
            for call in self.core.next_calls(time.monotonic()):
                self._tier_inboxes[call.tier].put(call)
        except Exception:
            logger.exception(
                "kvpool: lookups: internal error; requests that wait are computed without the pool"
            )
            self.core.fail_all()
        self._publish()

    def _pause(self) -> float | None:
        if not self._inbox.empty():
            return None
        due = self.core.next_due()
        return None if due == math.inf else max(0.0, due - time.monotonic())

    def _post_lookup(self, lookup: Lookup, begin: Callable[[], None]) -> None:
        self._inbox.put(_Task(begin, lambda: self._refuse(lookup), is_lookup=True))

    def _begin(self, lookup: Lookup, identity: RequestIdentity | None) -> None:
        if lookup.reads_files:
            if lookup.lookup_id not in self._reading:
                return
            self._reading.remove(lookup.lookup_id)
        if identity is None:
            self._refuse(lookup)
            return
        chain = ChunkChain(self._chunk_tokens, identity)
        chain.extend(lookup.tokens)
        end = chain.end(lookup.tokens) if lookup.seeks_end else None
        topic = chain.topic(lookup.tokens) if lookup.notices and lookup.search else None
        if self._open_notices is not None and topic is not None:
            if self._notices is None:
                self._notices = self._open_notices(self._on_notice, self._on_lost)
            self._topics[lookup.lookup_id] = topic
            self._notices.watch(lookup.notices, topic)
        self.core.open(lookup, chain, time.monotonic(), end)

    def _refuse(self, lookup: Lookup) -> None:
        self.core.cancel(lookup.lookup_id)
        self.core.results.append(lookup.nothing_found(None, LookupOutcome.UNSHAREABLE))

    def _cancel(self, lookup_id: int) -> None:
        self._reading.discard(lookup_id)
        self._unwatch(lookup_id)
        self.core.cancel(lookup_id)

    def _unwatch(self, lookup_id: int) -> None:
        topic = self._topics.pop(lookup_id, None)
        if topic is not None and self._notices is not None:
            self._notices.unwatch(topic)

    def _on_notice(self, topic: bytes, stored: int, ended: int | None) -> None:
        """Take a notice, on the thread of the notices."""
        self._inbox.put(_Task(partial(self._produced, topic, stored, ended), _nothing))

    def _on_lost(self, topic: bytes) -> None:
        self._inbox.put(_Task(partial(self._produced, topic, 0, None, is_lost=True), _nothing))

    def _produced(
        self, topic: bytes, stored: int, ended: int | None, *, is_lost: bool = False
    ) -> None:
        now = time.monotonic()
        for lookup_id in [each for each, known in self._topics.items() if known == topic]:
            self.core.produced(lookup_id, now, stored, ended, is_lost=is_lost)

    def _publish(self) -> None:
        if self._topics:
            for result in self.core.results:
                if result.is_final:
                    self._unwatch(result.lookup_id)
        if self._aliases is not None and self.core.useless_aliases:
            self._aliases.remove(self.core.useless_aliases)
            self.core.useless_aliases.clear()
        if self.core.results:
            with self._changed:
                self._results.extend(self.core.results)
                self._changed.notify_all()
            self.core.results.clear()

    def _pace_changed(self, tier: int, is_left_alone: bool) -> None:
        name = self._tier_names[tier]
        self._registry.set("kvpool_lookup_tier_up", not is_left_alone, tier=name)
        quick_ms = 1000 * self._timeout_s * QUICK_SHARE
        if is_left_alone:
            logger.warning(
                "kvpool: lookups skip %s: it exceeded lookup_timeout_ms=%.0f several times in "
                "a row; they use it again once it answers within %.0f ms",
                name,
                1000 * self._timeout_s,
                quick_ms,
            )
        else:
            logger.info("kvpool: lookups use %s again: it answered within %.0f ms", name, quick_ms)

    # The other threads

    def _read_adapters(self) -> None:
        while (lookup := self._adapter_inbox.get()) is not None:
            self._post_lookup(lookup, partial(self._begin, lookup, _identity_of(lookup)))

    def _serve(self, number: int, store: Store, inbox: "SimpleQueue[TierCall | None]") -> None:
        while (call := inbox.get()) is not None:
            value: Value
            if call.reads and self._aliases is not None:
                value = _answer(partial(self._aliases.read, number, call.keys))
            elif call.namespaces is None:
                value = _answer(partial(store.exists, call.keys))
            else:
                value = _removed(store, call)
            self._inbox.put(_Task(partial(self._returned, call, value), self.core.fail_all))

    def _returned(self, call: TierCall, value: Value) -> None:
        self.core.returned(call, value, time.monotonic())


def _nothing() -> None:
    pass


def _identity_of(lookup: Lookup) -> RequestIdentity | None:
    try:
        return lookup.identify()
    except OSError as error:
        logger.warning(
            "kvpool: request %s is neither loaded nor saved: %s", lookup.request_id, error
        )
    except Exception:
        logger.exception(
            "kvpool: internal error; request %s is neither loaded nor saved", lookup.request_id
        )
    return None


def _answer(call: Callable[[], Answer]) -> Answer | None:
    """Call a store and return the value; None if the call failed."""
    try:
        return call()
    except StoreError as error:
        logger.debug("kvpool: lookup failed: %s", error)
    except Exception:
        logger.exception("kvpool: lookup failed: internal error of the store")
    return None


def _removed(store: Store, call: TierCall) -> Present:
    """Remove the namespaces of the call; None if the store has not removed them all."""
    is_removed = True
    for namespace in call.namespaces or ():
        try:
            store.remove_namespace(namespace)
        except StoreError as error:
            logger.warning("kvpool: reset: namespace %s was not removed: %s", namespace, error)
            is_removed = False
        except Exception:
            logger.exception("kvpool: reset: internal error, %s was not removed", namespace)
            is_removed = False
    return [] if is_removed else None
