"""Stores with injected faults: the rules, and a wrapper that applies them to a store of any kind.

One `Faults` may serve any number of stores. A rule applies to all of them, or to the stores whose
label contains the rule's `store`. `ControlledFaults` reads its rules from a directory, where a
`FaultControl` of another process writes them. Everything here may be called from any thread.
"""

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import msgspec

from vllm_kvpool.errors import StoreError, StoreUnreachable
from vllm_kvpool.storage.base import (
    Buffer,
    Capabilities,
    ChunkRef,
    GetOutcome,
    Listing,
    NamespaceUsage,
    PutOutcome,
    Store,
    namespaces_of,
)

BLOCK_LIMIT_S = 30.0  # a test that forgets to release a call fails instead of hanging
CONTROL_FILE = "faults.json"
LOOK_EVERY_S = 0.01


class Fault(Enum):
    """A failure of a store call, or of a single key in it."""

    MISSING = "missing"  # exists: False; get: missing; put: reports stored, stores nothing
    WRONG_SIZE = "wrong_size"  # get only
    FLIPPED = "flipped"  # get: one bit of the last byte differs
    SWAPPED = "swapped"  # get: the bytes of the rule's `other` key
    FULL = "full"  # put only
    FAILED = "failed"  # put and get, for one key alone
    HALF = "half"  # put: leaves the first half of the object and fails
    ERROR = "error"  # StoreError for the whole call
    UNREACHABLE = "unreachable"  # StoreUnreachable for the whole call
    BLOCKED = "blocked"  # the call waits until `release`, then goes on as usual
    SLOW = "slow"  # the call first waits with the test's `wait`
    CRASH = "crash"  # an exception that no store may raise, like a bug in a store


_WHOLE_CALL = (*(Fault.ERROR, Fault.UNREACHABLE, Fault.BLOCKED, Fault.SLOW, Fault.CRASH),)
_GET_OUTCOME: dict[Fault | None, GetOutcome] = {
    Fault.MISSING: GetOutcome.MISSING,
    Fault.WRONG_SIZE: GetOutcome.WRONG_SIZE,
    Fault.FAILED: GetOutcome.FAILED,
}
_PUT_OUTCOME: dict[Fault | None, PutOutcome] = {
    Fault.MISSING: PutOutcome.STORED,
    Fault.FULL: PutOutcome.FULL,
    Fault.FAILED: PutOutcome.FAILED,
    Fault.HALF: PutOutcome.FAILED,
}


@dataclass(slots=True)
class Rule:
    """The conditions of a fault: method ("" for any), keys, store, and number of calls left.

    `key` and `store` are substrings.
    """

    fault: Fault
    method: str
    key: str
    times: int | None
    other: str
    store: str = ""

    def strikes(self, store: str, method: str, keys: Iterable[str]) -> bool:
        return (
            self.times != 0
            and self.method in ("", method)
            and self.store in store
            and any(self.key in key for key in keys)
        )


class Faults:
    """Fault rules for any number of stores, and counts of the stores' calls.

    Manifests are neither struck nor counted, unless a rule names one: no load depends on them.
    """

    def __init__(self, wait: Callable[[], None] = lambda: None) -> None:
        self._wait = wait
        self._lock = threading.Lock()
        self._rules: list[Rule] = []
        self._released = threading.Event()
        self.entered = threading.Event()
        """Set as soon as a call is blocked."""
        self.on_call: Callable[[str, str, Sequence[str]], None] = lambda store, method, keys: None
        """Called with (label, method, keys) in the call's thread, before the rules apply."""
        self.calls: Counter[str] = Counter()
        self.struck: Counter[Fault] = Counter()
        self.max_keys = 0
        self.num_blocked = 0
        """Number of calls that are blocked now."""

    def inject(
        self,
        fault: Fault,
        method: str = "",
        key: str = "",
        times: int | None = None,
        other: str = "",
        store: str = "",
    ) -> None:
        """Add a rule. With `key`, the fault strikes only calls with a key that contains it."""
        with self._lock:
            if fault is Fault.BLOCKED and self._released.is_set():
                self._released = threading.Event()
                self.entered.clear()
            self._rules.append(Rule(fault, method, key, times, other, store))

    def heal(self) -> None:
        """Remove all rules; blocked calls go on."""
        with self._lock:
            self._rules.clear()
        self._released.set()

    def _names_one_of(self, keys: Sequence[str]) -> bool:
        with self._lock:
            return any(rule.key and any(rule.key in key for key in keys) for rule in self._rules)

    def release(self) -> None:
        """Let blocked calls go on, and block no later calls."""
        with self._lock:
            self._rules = [rule for rule in self._rules if rule.fault is not Fault.BLOCKED]
        self._released.set()

    def begin(self, store: str, method: str, keys: Sequence[str]) -> dict[str, Rule]:
        """Count a call, apply the faults of the whole call, and return the rules of its keys."""
        is_manifest = bool(keys) and all(key.endswith("@manifest") for key in keys)
        if is_manifest and not self._names_one_of(keys):
            return {}
        self.on_call(store, method, keys)
        with self._lock:
            self.calls[method] += 1
            self.max_keys = max(self.max_keys, len(keys))
            rules = [rule for rule in self._rules if rule.strikes(store, method, keys)]
            for rule in rules:
                rule.times = None if rule.times is None else rule.times - 1
                self.struck[rule.fault] += 1
        for rule in rules:
            self._befall(rule.fault)
        return {
            key: rule
            for rule in rules
            if rule.fault not in _WHOLE_CALL
            for key in keys
            if rule.key in key
        }

    def _befall(self, fault: Fault) -> None:
        match fault:
            case Fault.ERROR:
                raise StoreError("injected")
            case Fault.UNREACHABLE:
                raise StoreUnreachable("injected")
            case Fault.CRASH:
                raise RuntimeError("injected")
            case Fault.BLOCKED:
                self._block()
            case Fault.SLOW:
                self._wait()

    def _block(self) -> None:
        with self._lock:
            released = self._released
            self.num_blocked += 1
        self.entered.set()
        try:
            assert released.wait(BLOCK_LIMIT_S), "never released"
        finally:
            with self._lock:
                self.num_blocked -= 1


class _Orders(msgspec.Struct, frozen=True):
    """Rules on their way to other processes. Their numbers distinguish equal rules."""

    slow_s: float = 0.0
    rules: dict[int, Rule] = {}


class FaultControl:
    """Controls the faults of stores in other processes, with the methods of `Faults`.

    A rule applies to calls that begin after `inject` has returned. Each process counts `times` for
    itself.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._num_orders = 0
        self._orders = _Orders()
        self._publish()

    def inject(
        self,
        fault: Fault,
        method: str = "",
        key: str = "",
        times: int | None = None,
        other: str = "",
    ) -> None:
        self._num_orders += 1
        rule = Rule(fault, method, key, times, other)
        self._orders = _Orders(self._orders.slow_s, {**self._orders.rules, self._num_orders: rule})
        self._publish()

    def slow(self, seconds: float, method: str = "") -> None:
        """Delay calls of `method`, or all calls, by `seconds` from now on."""
        self._orders = _Orders(seconds, self._orders.rules)
        self.inject(Fault.SLOW, method)

    def heal(self) -> None:
        self._orders = _Orders()
        for mark in self.directory.glob("struck.*"):
            mark.unlink()
        self._publish()

    def release(self) -> None:
        rules = {n: r for n, r in self._orders.rules.items() if r.fault is not Fault.BLOCKED}
        self._orders = _Orders(self._orders.slow_s, rules)
        self._publish()

    def struck(self, fault: Fault) -> bool:
        """Return True if the fault has struck a call since the last `heal`."""
        return (self.directory / f"struck.{fault.value}").exists()

    def _publish(self) -> None:
        draft = self.directory / f"{CONTROL_FILE}.draft"
        draft.write_bytes(msgspec.json.encode(self._orders))
        draft.rename(self.directory / CONTROL_FILE)


class ControlledFaults(Faults):
    """Rules that a `FaultControl` has written to a directory, read again at every call."""

    def __init__(self, directory: Path) -> None:
        super().__init__(self._be_slow)
        self._file = directory / CONTROL_FILE
        self._version: tuple[int, int] | None = None
        self._slow_s = 0.0
        self._by_number: dict[int, Rule] = {}

    def begin(self, store: str, method: str, keys: Sequence[str]) -> dict[str, Rule]:
        self._look()
        return super().begin(store, method, keys)

    def _look(self) -> None:
        status = os.stat(self._file)
        version = (status.st_ino, status.st_mtime_ns)
        with self._lock:
            if version == self._version:
                return
            orders = msgspec.json.decode(self._file.read_bytes(), type=_Orders)
            known = self._by_number
            self._by_number = {n: known.get(n, rule) for n, rule in orders.rules.items()}
            self._rules = list(self._by_number.values())
            self._slow_s = orders.slow_s
            self._version = version

    def _befall(self, fault: Fault) -> None:
        (self._file.parent / f"struck.{fault.value}").touch()
        super()._befall(fault)

    def _be_slow(self) -> None:
        time.sleep(self._slow_s)

    def _block(self) -> None:
        self.entered.set()
        deadline = time.monotonic() + BLOCK_LIMIT_S
        while any(rule.fault is Fault.BLOCKED for rule in self._rules):
            assert time.monotonic() < deadline, "never released"
            time.sleep(LOOK_EVERY_S)
            self._look()


class FaultyStore:
    """A store with faults around any other store. Without rules it behaves like that store.

    `faults` may be shared with other stores. Rules select this store by its `label`.
    """

    def __init__(
        self,
        inner: Store,
        wait: Callable[[], None] = lambda: None,
        faults: Faults | None = None,
        label: str = "",
    ) -> None:
        self._inner = inner
        self._label = label
        self.faults = Faults(wait) if faults is None else faults
        self.inject = self.faults.inject
        self.heal = self.faults.heal
        self.release = self.faults.release

    @property
    def entered(self) -> threading.Event:
        return self.faults.entered

    @property
    def calls(self) -> Counter[str]:
        return self.faults.calls

    @property
    def max_keys(self) -> int:
        return self.faults.max_keys

    @property
    def capabilities(self) -> Capabilities:
        return self._inner.capabilities

    def register(self, buffer: Buffer) -> None:
        self._inner.register(buffer)

    def unregister(self, buffer: Buffer) -> None:
        self._inner.unregister(buffer)

    def exists(self, keys: Sequence[str]) -> list[bool]:
        struck = self._begin("exists", keys)
        present = self._inner.exists(keys)
        return [
            there and _fault(struck, key) is not Fault.MISSING
            for key, there in zip(keys, present, strict=True)
        ]

    def put(
        self, keys: Sequence[str], buffers: Sequence[Buffer], chunks: Sequence[ChunkRef]
    ) -> list[PutOutcome]:
        struck = self._begin("put", keys)
        outcomes: list[PutOutcome] = []
        for key, buffer, chunk in zip(keys, buffers, chunks, strict=True):
            fault = _fault(struck, key)
            bad = _PUT_OUTCOME.get(fault)
            if fault is Fault.HALF:
                self._inner.put([key], [first_half(buffer)], [chunk])
            outcomes += [bad] if bad else self._inner.put([key], [buffer], [chunk])
        return outcomes

    def get(self, keys: Sequence[str], buffers: Sequence[Buffer]) -> list[GetOutcome]:
        struck = self._begin("get", keys)
        asked = [struck[key].other if _fault(struck, key) is Fault.SWAPPED else key for key in keys]
        outcomes = self._inner.get(asked, buffers)
        for i, key in enumerate(keys):
            fault = _fault(struck, key)
            outcomes[i] = _GET_OUTCOME.get(fault, outcomes[i])
            if fault is Fault.FLIPPED:
                buffers[i].view[-1] ^= 1
        return outcomes

    def remove(self, keys: Sequence[str]) -> int:
        self._begin("remove", keys)
        return self._inner.remove(keys)

    def remove_namespace(self, namespace: str) -> int:
        self._begin("remove_namespace", [namespace])
        return self._inner.remove_namespace(namespace)

    def pin(self, keys: Sequence[str], until_ns: int) -> int:
        self._begin("pin", keys)
        return self._inner.pin(keys, until_ns)

    def namespaces(self) -> list[str]:
        self._begin("namespaces", [""])
        return namespaces_of(self._inner)

    def usage(self) -> list[NamespaceUsage]:
        self._begin("usage", [""])
        return self._inner.usage() if isinstance(self._inner, Listing) else []

    def close(self) -> None:
        self._begin("close", [""])
        self._inner.close()

    def _begin(self, method: str, keys: Sequence[str]) -> dict[str, Rule]:
        return self.faults.begin(self._label, method, keys)


def first_half(buffer: Buffer) -> Buffer:
    """Return the part of an object that a writer leaves when it dies."""
    return Buffer(buffer.address, buffer.view[: buffer.nbytes // 2])


def _fault(struck: dict[str, Rule], key: str) -> Fault | None:
    return struck[key].fault if key in struck else None
