"""A router's controller stepped by hand: short names for events, and a clock under control.

The invariants are checked after every step.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from tests.support.router_invariants import check_controller
from vllm_kvpool.router.control.controller import Controller
from vllm_kvpool.router.control.events import (
    Action,
    Added,
    Arrived,
    Cancelled,
    Decode,
    DecodeBegan,
    DecodeEnded,
    Drain,
    Event,
    Failed,
    Measured,
    Outcome,
    PrefillEnded,
    Remove,
    ReplicaLoaded,
    ReplicaSpec,
    Sample,
    SetRole,
    Tick,
    Warmed,
)
from vllm_kvpool.router.control.fleet import Replica
from vllm_kvpool.router.control.handovers import ExpectedPrompts
from vllm_kvpool.router.control.requests import Phase, RequestId, RequestSpec
from vllm_kvpool.router.control.settings import OverloadConfig, PlannerConfig, Settings
from vllm_kvpool.router.control.states import ReplicaId, Role, State

BLOCK_SIZE = 16


def spec(replica_id: str, *, is_started: bool = False) -> ReplicaSpec:
    """Return an engine's spec. `is_started`: with commands that start and stop the engine."""
    commands = {"start": ("start",), "stop": ("stop",)} if is_started else {}
    return ReplicaSpec(replica_id=ReplicaId(replica_id), url=f"http://{replica_id}", **commands)


def ask(request_id: str, tokens: int = 1000, output: int = 100, **more: Any) -> RequestSpec:
    """Return a request, by default long enough for a separate prefill. `more`: other fields."""
    made = RequestSpec(
        request_id=RequestId(request_id), prompt_tokens=tokens, max_output_tokens=output
    )
    return replace(made, **more)


class Steps:
    """A controller and its clock. Owned by a test."""

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        planner: PlannerConfig | None = None,
        spares: int = 0,
        overload: OverloadConfig | None = None,
    ) -> None:
        self.controller = Controller(settings, planner=planner, overload=overload)
        self.now = 0.0
        self.history: list[Action] = []
        self._num_started = 0
        for number in range(1, spares + 1):  # inactive engines that the router can start
            self.step(Added(spec=spec(f"s-{number}", is_started=True)))

    def step(self, event: Event, after: float = 0.0) -> list[Action]:
        """Post an event `after` seconds after the one before, and return the actions.

        Returned `Decode` actions omit the request's past; those in `history` are complete.
        """
        self.now += after
        actions = self.controller.step(event, self.now)
        check_controller(self.controller)
        self.history += actions
        return [
            Decode(each.request_id, each.replica, each.expect_tokens)
            if isinstance(each, Decode)
            else each
            for each in actions
        ]

    def tick(self, after: float = 1.0) -> list[Action]:
        return self.step(Tick(), after)

    # Replicas

    def serve(self, replica_id: str, role: Role, *, blocks: int = 1000) -> None:
        """Add a running engine, report it as healthy, and report its capacity."""
        self.step(Added(spec=spec(replica_id), role=role))
        self.loaded(replica_id)
        self.measure(replica_id, blocks=blocks)

    def start(self, role: Role) -> list[Action]:
        """Add an engine that the router starts: `n-1` first, then `n-2`."""
        self._num_started += 1
        made = spec(f"n-{self._num_started}", is_started=True)
        return self.step(Added(spec=made, role=role))

    def fleet(self, *, prefill: str = "", decode: str = "") -> None:
        """Add serving engines: `fleet(prefill="a b", decode="c")`."""
        for replica_id in prefill.split():
            self.serve(replica_id, Role.PREFILL)
        for replica_id in decode.split():
            self.serve(replica_id, Role.DECODE)

    def loaded(self, replica_id: str) -> list[Action]:
        return self.step(ReplicaLoaded(ReplicaId(replica_id)))

    def failed(self, replica_id: str, why: str = "does not answer") -> list[Action]:
        return self.step(Failed(ReplicaId(replica_id), why))

    def warmed(self, replica_id: str) -> list[Action]:
        return self.step(Warmed(ReplicaId(replica_id)))

    def measure(
        self,
        replica_id: str,
        *,
        blocks: int = 1000,
        used: int = 0,
        pool_is_up: bool = True,
        expected: Mapping[str, ExpectedPrompts] | None = None,
        notices: Sequence[str] | None = None,
        waiting: int = 0,
    ) -> list[Action]:
        sample = Sample(
            total_blocks=blocks,
            used_blocks=used,
            block_size=BLOCK_SIZE,
            pool_is_up=pool_is_up,
            expected=expected,
            notices=None if notices is None else tuple(notices),
            waiting=waiting,
        )
        return self.step(Measured(ReplicaId(replica_id), sample))

    def drain(self, replica_id: str) -> list[Action]:
        return self.step(Drain(ReplicaId(replica_id)))

    def remove(self, replica_id: str) -> list[Action]:
        return self.step(Remove(ReplicaId(replica_id)))

    def set_role(self, replica_id: str, role: Role) -> list[Action]:
        return self.step(SetRole(ReplicaId(replica_id), role))

    # Requests

    def ask(
        self, request_id: str, tokens: int = 1000, output: int = 100, **more: Any
    ) -> list[Action]:
        return self.step(Arrived(ask(request_id, tokens, output, **more)))

    def cancel(self, request_id: str) -> list[Action]:
        return self.step(Cancelled(RequestId(request_id)))

    def prefilled(
        self, request_id: str, replica_id: str, outcome: Outcome = Outcome.OK, *, saved: int = 0
    ) -> list[Action]:
        return self.step(
            PrefillEnded(
                request_id=RequestId(request_id),
                replica=ReplicaId(replica_id),
                outcome=outcome,
                saved_tokens=saved,
            )
        )

    def began(self, request_id: str) -> list[Action]:
        return self.step(DecodeBegan(RequestId(request_id)))

    def decoded(
        self, request_id: str, replica_id: str, outcome: Outcome = Outcome.OK, *, output: int = 10
    ) -> list[Action]:
        return self.step(
            DecodeEnded(
                request_id=RequestId(request_id),
                replica=ReplicaId(replica_id),
                outcome=outcome,
                output_tokens=output,
            )
        )

    # Results

    def replica(self, replica_id: str) -> Replica:
        return self.controller.state.fleet[ReplicaId(replica_id)]

    def state(self, replica_id: str) -> State:
        return self.replica(replica_id).state

    def states(self) -> dict[str, State]:
        return {each.replica_id: each.state for each in self.controller.state.fleet}

    def phase(self, request_id: str) -> Phase | None:
        """Return a request's phase, or None if it has ended."""
        request = self.controller.state.requests.get(RequestId(request_id))
        return request.phase if request else None

    def place(self, request_id: str) -> str:
        """Return the replica that has the request."""
        replica = self.controller.state.requests[RequestId(request_id)].replica
        assert replica is not None
        return replica

    def count(self, what: str) -> int:
        return self.controller.state.counts.events[what]
