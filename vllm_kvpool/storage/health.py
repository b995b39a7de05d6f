"""The access to a store that may fail, and when the store is asked again (pure).

* The store was opened, has answered a probe, or the pause of writes is over: FULL access.
* `FAILURES_TO_OPEN` queries or reads in a row failed, a slow one failed, or a read hangs: NONE.
* A probe failed: NONE, and a longer pause until the next probe.
* `FAILURES_TO_OPEN` writes in a row failed, a slow one failed, or a write hangs: READ.

A call fails if it raises, and a read or write also if all of its keys FAILED. Reads and writes are
counted by themselves: a store that answers queries and fails each cell is paused all the same. The
next pause is twice as long, until a call of the kind that failed succeeds.
"""

from enum import Enum

from vllm_kvpool.storage.breaker import Breaker

SLOW_FAILURE_S = 1.0  # one failure that took longer suffices


class StoreAccess(Enum):
    """The calls that a store may be given."""

    NONE = "none"
    READ = "read"  # all but writes
    FULL = "full"


class CallKind(Enum):
    """The kind of a store's call."""

    QUERY = "query"  # `exists`, and calls that go through the whole store
    READ = "read"  # `get`
    WRITE = "write"  # `put`, `remove`, `pin`


_PAUSED = {
    StoreAccess.NONE: (CallKind.QUERY, CallKind.READ),
    StoreAccess.READ: (CallKind.WRITE,),
    StoreAccess.FULL: (),
}
"""The kinds of calls whose pause restricts the access."""


class StoreHealth:
    """The access to one store; NONE at first. One thread at a time; times are of one clock.

    Methods return the reason if they have restricted the access, "" if not.
    """

    def __init__(self) -> None:
        self.access = StoreAccess.NONE
        self._breakers = {kind: Breaker() for kind in CallKind}
        self._counted_from = dict.fromkeys(CallKind, float("-inf"))

    @property
    def due(self) -> float:
        """The time of the next probe, or of the end of the pause of writes; infinite if none."""
        ends = (self._breakers[kind].closed_at for kind in _PAUSED[self.access])
        return max(ends, default=float("inf"))

    def recovered(self, now: float) -> None:
        """Allow all calls: the store has answered, or the pause of writes is over."""
        self.access = StoreAccess.FULL
        self._counted_from = dict.fromkeys(CallKind, now)
        for breaker in self._breakers.values():
            breaker.half_open()

    def probe_failed(self, now: float, jitter: float) -> None:
        """Wait longer until the next probe, by a share of `jitter` beyond the doubled pause."""
        self._breakers[CallKind.QUERY].tripped(now, jitter)

    def call_ended(self, kind: CallKind, began: float, now: float, *, failed: bool) -> str:
        """Count a call, unless it began before the store recovered, or before one like it hung."""
        if self.access is StoreAccess.NONE or began < self._counted_from[kind]:
            return ""
        breaker = self._breakers[kind]
        if not failed:
            breaker.succeeded()
            self._breakers[CallKind.QUERY].succeeded()  # the store can be reached
            return ""
        if now - began > SLOW_FAILURE_S:
            if breaker.tripped(now):
                return self._restrict(kind, f"a {kind.value} call failed after {now - began:.1f} s")
        elif breaker.failed(now):
            return self._restrict(kind, f"{breaker.failures} {kind.value} calls in a row failed")
        return ""

    def call_hung(self, kind: CallKind, now: float, limit_s: float) -> str:
        """Count a call that has not returned within its limit; its end will not count."""
        if self.access is StoreAccess.NONE:
            return ""
        self._counted_from[kind] = now
        if not self._breakers[kind].tripped(now):
            return ""
        why = f"a {kind.value} call has not returned within {limit_s:g} s"
        return self._restrict(kind, why)

    def _restrict(self, kind: CallKind, why: str) -> str:
        before = self.access
        self.access = StoreAccess.READ if kind is CallKind.WRITE else StoreAccess.NONE
        return why if self.access is not before else ""
