"""Controllers that have something to show: for tests of what is shown."""

from dataclasses import dataclass, field

from tests.support.router_invariants import check_controller
from vllm_kvpool.router.control.controller import Controller
from vllm_kvpool.router.control.events import (
    Action,
    Added,
    Arrived,
    Cancelled,
    Decode,
    DecodeBegan,
    Event,
    Failed,
    Measured,
    Mode,
    Outcome,
    Prefill,
    PrefillEnded,
    ReplicaLoaded,
    ReplicaSpec,
    Sample,
    Tick,
)
from vllm_kvpool.router.control.requests import RequestId, RequestSpec
from vllm_kvpool.router.control.settings import PlannerConfig
from vllm_kvpool.router.control.states import ReplicaId, Role

BLOCKS = 1000
BLOCK_SIZE = 16


@dataclass(slots=True)
class Scene:
    """A controller and its clock."""

    mode: Mode = Mode.MANUAL
    now: float = 100.0
    controller: Controller = field(init=False)
    events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        planner = PlannerConfig(mode=self.mode)
        self.controller = Controller(planner=planner)

    def clock(self) -> float:
        return self.now

    def post(self, event: Event) -> None:
        self.step(event)

    def step(self, event: Event, after_s: float = 0.01) -> list[Action]:
        self.now += after_s
        self.events.append(event)
        actions = self.controller.step(event, self.now)
        check_controller(self.controller)
        return actions

    def spare(self, replica: str) -> None:
        """Add an engine that the router can start."""
        commands = {"start": ("start",), "stop": ("stop",)}
        spec = ReplicaSpec(replica_id=ReplicaId(replica), url=f"http://{replica}:8000", **commands)
        self.step(Added(spec=spec))

    def serving(self, replica: str, role: Role) -> ReplicaId:
        """Add a replica that is loaded and measured."""
        taken = {each.spec.url for each in self.controller.state.fleet}
        urls = (f"http://10.0.0.1:{port}" for port in range(8000, 9000))
        url = next(each for each in urls if each not in taken)
        replica_id = ReplicaId(replica)
        self.step(Added(spec=ReplicaSpec(replica_id=replica_id, url=url), role=role))
        self.step(ReplicaLoaded(replica_id))
        self.measured(replica_id)
        return replica_id

    def measured(self, replica: str, used_blocks: int = 0, **counts: float) -> None:
        sample = Sample(
            used_blocks=used_blocks,
            total_blocks=BLOCKS,
            block_size=BLOCK_SIZE,
            running=int(counts.pop("running", 0)),
            waiting=int(counts.pop("waiting", 0)),
            **counts,
        )
        self.step(Measured(ReplicaId(replica), sample))

    def arrived(self, name: str, prompt_tokens: int = 1600) -> list[Action]:
        return self.step(
            Arrived(
                RequestSpec(
                    request_id=RequestId(name), prompt_tokens=prompt_tokens, max_output_tokens=160
                )
            )
        )

    def prefilled(self, name: str) -> list[Action]:
        """Report the prompt as computed by its replica."""
        request = self.controller.state.requests[RequestId(name)]
        assert request.replica is not None
        event = PrefillEnded(
            request_id=RequestId(name),
            replica=request.replica,
            outcome=Outcome.OK,
            prompt_tokens=request.ask.prompt_tokens,
        )
        return self.step(event, 0.05)

    def measure_prefill(self, prompts: int = 6) -> None:
        """Compute prompts until the prefill rate is known, then cancel their requests."""
        for number in range(prompts):
            name = f"measured-{number}"
            self.arrived(name)
            self.prefilled(name)
            self.step(Cancelled(RequestId(name)))

    def tick(self, after_s: float = 1.0) -> None:
        self.step(Tick(), after_s)


def busy_scene(mode: Mode = Mode.MANUAL) -> Scene:
    """Two prefill replicas and three decoders: one locked, one quarantined; requests everywhere."""
    scene = Scene(mode)
    for name in ("p0", "p1"):
        scene.serving(name, Role.PREFILL)
    for name in ("d0", "d1", "d2"):
        scene.serving(name, Role.DECODE)
    scene.tick()
    for number in range(4):
        (given,) = scene.arrived(f"r{number}")
        assert isinstance(given, Prefill)
    (handed,) = scene.prefilled("r0")
    assert isinstance(handed, Decode)
    scene.step(DecodeBegan(RequestId("r0")), 0.25)
    for name, used in (("d0", 990), ("d1", 300)):
        scene.measured(name, used, running=3, waiting=1)
    scene.measured("p0", 120, bytes_out=0.0, prompt_tokens=0.0)
    scene.tick()
    for name, used in (("d0", 990), ("d1", 300)):
        counts = {"bytes_in": 3.0 * (1 << 20), "generated_tokens": 500.0}
        scene.measured(name, used, running=3, waiting=1, **counts)
    scene.measured("p0", 120, bytes_out=6.0 * (1 << 20), prompt_tokens=4000.0)
    scene.measured("p1", 40)
    for _ in range(3):
        scene.tick(1.5)  # it is left alone for a second, then tried again
        scene.step(Failed(ReplicaId("d2"), "does not answer: connection refused"))
    return scene
