"""Which faults an engine has now, and whom they befall. Pure but for what `on_engine` does."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tests.support.scripted_spec import ENGINE_KINDS, STREAM_KINDS, Fault, FaultKind


@dataclass(slots=True)
class _Armed:
    fault: Fault
    num_hit: int = 0

    @property
    def is_used_up(self) -> bool:
        return 0 < self.fault.times <= self.num_hit

    def concerns(self, path: str, request_id: str) -> bool:
        fault = self.fault
        if self.is_used_up or (fault.request_id and fault.request_id != request_id):
            return False
        return path.startswith(fault.paths)


class FaultBoard:
    """The faults that are set; `on_engine` gets those of the engine as a whole, when due."""

    def __init__(self, on_engine: Callable[[Fault], None]) -> None:
        self._on_engine = on_engine
        self._armed: list[_Armed] = []
        self.has_streams = False
        """Whether anything may befall a request that is under way."""

    def set(self, fault: Fault) -> None:
        """From now on, or at once if the engine as a whole has it."""
        if fault.at_once():
            self._on_engine(fault)
        else:
            self._armed.append(_Armed(fault))
            self._sweep()

    def clear(self) -> None:
        """Nothing is wrong any more; what has happened is not undone."""
        self._armed.clear()
        self._sweep()

    def faults(self) -> list[Fault]:
        """What is set and not used up."""
        return [armed.fault for armed in self._armed]

    def _sweep(self) -> None:
        self._armed = [armed for armed in self._armed if not armed.is_used_up]
        self.has_streams = any(armed.fault.kind in STREAM_KINDS for armed in self._armed)

    def _hits(self, path: str, request_id: str) -> Iterator[_Armed]:
        return (armed for armed in self._armed if armed.concerns(path, request_id))

    def at_arrival(self, path: str, request_id: str) -> list[Fault]:
        """What befalls a request that arrives, in the order in which it was set."""
        hits = [
            armed
            for armed in self._hits(path, request_id)
            if armed.fault.kind not in STREAM_KINDS | ENGINE_KINDS
        ]
        return self._use(hits)

    def under_way(self, request: "RequestFaults", num_tokens: int, is_over: bool) -> list[Fault]:
        """What befalls a request that has so many tokens, and did not before."""
        hits = [
            armed
            for armed in self._hits(request.path, request.request_id)
            if armed.fault.kind in STREAM_KINDS
            and armed.fault not in request.suffered
            and self._is_due(armed.fault, num_tokens, is_over)
        ]
        faults = self._use(hits)
        for fault in faults:
            if fault.kind is FaultKind.DIE:
                self._on_engine(fault)
        return faults

    @staticmethod
    def _is_due(fault: Fault, num_tokens: int, is_over: bool) -> bool:
        if fault.after_tokens is None:
            return is_over or fault.kind is not FaultKind.NO_DONE
        return num_tokens >= fault.after_tokens

    def _use(self, hits: list[_Armed]) -> list[Fault]:
        for armed in hits:
            armed.num_hit += 1
        if hits:
            self._sweep()
        return [armed.fault for armed in hits]


@dataclass(slots=True)
class RequestFaults:
    """What the board has for one request, and what of it has happened."""

    board: FaultBoard
    path: str
    request_id: str
    suffered: list[Fault] = field(default_factory=list)

    def at_arrival(self) -> list[Fault]:
        """What befalls it before it is looked at."""
        return self.board.at_arrival(self.path, self.request_id)

    def under_way(self, num_tokens: int, is_over: bool = False) -> list[Fault]:
        """What befalls it with so many tokens; `is_over` once it has them all."""
        if not self.board.has_streams:
            return []
        faults = self.board.under_way(self, num_tokens, is_over)
        self.suffered += faults
        return faults
