"""Workers and the controller's process, any of which may die at any time; without sockets."""

import asyncio
import itertools
import logging
import re
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.support.router_invariants import check_controller
from vllm_kvpool.router.config import TenantConfig, read_config
from vllm_kvpool.router.control.events import (
    ANSWERED,
    Added,
    Cancelled,
    Decode,
    DecodeBegan,
    DecodeEnded,
    Loaded,
    Measured,
    Outcome,
    Prefill,
    Refuse,
    ReplicaSpec,
    Sample,
    Tick,
)
from vllm_kvpool.router.control.requests import Ask, Phase, RequestId
from vllm_kvpool.router.control.states import ReplicaId, Role
from vllm_kvpool.router.dataplane.control_client import ControlClient
from vllm_kvpool.router.dataplane.data_plane import ask_of
from vllm_kvpool.router.dataplane.messages import (
    Frames,
    FromWorker,
    Hello,
    MessageConnection,
    Over,
    Query,
    RequestOpen,
    ToWorker,
    encode_frame,
)
from vllm_kvpool.router.dataplane.request_body import ApiPath, parse_request
from vllm_kvpool.router.dataplane.responses import TokenCounts, call_ended
from vllm_kvpool.router.ops.request_log import Observation
from vllm_kvpool.router.ops.tenants import Tenants
from vllm_kvpool.router.ops.worker_links import WorkerLink, WorkerLinks
from vllm_kvpool.router.run import REFUSALS_LOGGED_EVERY_S, Router

REPLICAS = {"p": Role.PREFILL, "d": Role.DECODE, "e": Role.DECODE}
CONFIG = read_config(
    {
        "front": {"workers": 2, "listen": "127.0.0.1:0"},
        "admin": {"listen": "127.0.0.1:0", "token": "t"},
        "flow": {"max_attempts": 100, "max_lost": 100},
        "replicas": [{"id": "d", "url": "http://d", "role": "decode"}],
    }
)
TENANT = "t"
MAX_RUNNING = 6


class NoEngines:
    """In place of what watches engines."""

    def perform(self, action: object) -> None:
        """They serve whatever is done."""


def router_at(
    clock: Callable[[], float], *, is_up: bool = True, have_notices: bool = False
) -> Router:
    """A controller whose engines serve, or will, with a tenant."""
    router = Router(CONFIG, clock)
    router.replicas = NoEngines()  # type: ignore[assignment]
    router.tenants = Tenants([TenantConfig(name=TENANT, key="k", max_running=MAX_RUNNING)], clock)
    for name, role in REPLICAS.items():
        replica = ReplicaId(name)
        router.post(Added(spec=ReplicaSpec(replica_id=replica, url=f"http://{name}"), role=role))
    if is_up:
        engines_come_up(router, have_notices=have_notices)
    return router


def engines_come_up(router: Router, *, have_notices: bool = False) -> None:
    for name in REPLICAS:
        router.post(Loaded(ReplicaId(name)))
        if have_notices:
            router.post(Measured(ReplicaId(name), Sample(notices=(f"tcp://{name}",))))


@dataclass
class Handler:
    """A request's, without its client and engines; of a prompt and its answer, the answer last."""

    worker: "Worker"
    request_id: RequestId
    directives: deque[Prefill | Decode | Refuse] = field(default_factory=deque)
    aborts: int = 0

    def enqueue(self, directive: Prefill | Decode | Refuse) -> None:
        for each in self.directives:
            assert isinstance(each, Prefill), "two at once"
            assert not isinstance(directive, Prefill), "two prompts at once"
        self.directives.append(directive)

    def abort(self, replica: ReplicaId) -> None:
        self.aborts += 1

    def fail(self) -> None:
        raise AssertionError("the controller has failed")

    def ends(self, outcome: Outcome, *, has_token: bool = True, is_first: bool = False) -> None:
        """What is in hand ends so; of two calls the first one, or the last."""
        directive = self.directives.popleft() if is_first else self.directives.pop()
        if isinstance(directive, Refuse):
            self.leave()
            return
        client = self.worker.client
        if isinstance(directive, Prefill):
            client.post(call_ended(directive, outcome, TokenCounts(100)))
            return
        assert client.url_of(directive.replica) == f"http://{directive.replica}"
        if has_token:
            client.post(DecodeBegan(self.request_id))
        client.post(call_ended(directive, outcome, TokenCounts(100, 5)))
        if outcome is Outcome.OK:
            self.leave()

    def gone(self) -> None:
        """Its client has closed its connection."""
        self.worker.client.post(Cancelled(self.request_id))
        self.leave()

    def leave(self) -> None:
        """What is left is given up."""
        client = self.worker.client
        while self.directives:
            directive = self.directives.popleft()
            if not isinstance(directive, Refuse):
                client.post(call_ended(directive, Outcome.CANCELLED, TokenCounts()))
        self.over()

    def over(self) -> None:
        del self.worker.handlers[self.request_id]
        self.worker.client.over(self.request_id, [])


class Worker:
    """One life of a worker's process, and its connection if it has one."""

    def __init__(self, name: str, clock: Callable[[], float]) -> None:
        self.name = name
        self._clock = clock
        self.client = ControlClient(name, 10.0, 0.25, clock)
        self.handlers: dict[RequestId, Handler] = {}
        self.link: WorkerLink | None = None
        self.to_router: list[bytes] = []
        self.to_worker: list[bytes] = []

    def connect(self, router: Router) -> None:
        self.to_router, self.to_worker = [], []
        # As in a socket's buffer: bytes of a connection are those of that connection.
        self._from_worker, self._from_router = Frames(FromWorker), Frames(ToWorker)
        self.link = WorkerLink(router, self._sender(self.to_worker))
        self.client.connected(self._sender(self.to_router))

    def _sender(self, frames: list[bytes]) -> Callable[[Any], None]:
        return lambda message: frames.append(encode_frame([message]))

    def lost(self) -> None:
        """The connection is closed; the worker reads what was sent to it."""
        self.deliver_to_worker()
        self.link = None
        self.client.lost()

    def deliver_to_router(self, most: int = 1 << 30) -> None:
        assert self.link is not None
        for data in _taken(self.to_router, most):
            for message in self._from_worker.feed(data):
                self.link.receive(message)

    def deliver_to_worker(self, most: int = 1 << 30) -> None:
        for data in _taken(self.to_worker, most):
            for message in self._from_router.feed(data):
                self.client.receive(message)

    def arrive(self, request_id: RequestId, tokens: int) -> None:
        now = self._clock()
        ask = Ask(
            request_id=request_id,
            prompt_tokens=tokens,
            max_output_tokens=8,
            deadline=now + 10.0,
        )
        handler = self.handlers[request_id] = Handler(self, request_id)
        self.client.begin(ask, TENANT, handler)


def _taken(frames: list[bytes], most: int) -> list[bytes]:
    taken = frames[:most]
    del frames[:most]
    return taken


class Errors(logging.Handler):
    """The records of the router's log that report bugs of its own."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(self.format(record))


class Deaths(RuleBasedStateMachine):
    """Whatever dies: only requests of dead workers are lost, and nothing stays behind."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.errors = Errors()
        logging.getLogger("vllm_kvpool.router").addHandler(self.errors)
        self.numbers = itertools.count()
        self.router = router_at(self._clock, have_notices=True)
        self.workers = [Worker(f"w{number}.0", self._clock) for number in range(2)]
        for each in self.workers:
            each.connect(self.router)
        self.arrive([5000, 20, 20, 5000])
        self.deliver_all()

    def _clock(self) -> float:
        return self.now

    def _handler(self, data: st.DataObject) -> Handler | None:
        every = [h for w in self.workers for h in w.handlers.values() if h.directives]
        return data.draw(st.sampled_from(every)) if every else None

    @rule(tokens=st.lists(st.sampled_from((20, 5000)), min_size=1, max_size=4))
    def arrive(self, tokens: list[int]) -> None:
        for number, each in zip(tokens, itertools.cycle(self.workers), strict=False):
            each.arrive(RequestId(f"{each.name}-{next(self.numbers)}:x"), number)

    @rule()
    def deliver_all(self) -> None:
        for each in self.workers:
            if each.link is not None:
                each.deliver_to_router()
                each.deliver_to_worker()

    @rule(
        data=st.data(),
        outcome=st.sampled_from(Outcome),
        has_token=st.booleans(),
        is_first=st.booleans(),
    )
    def call_ends(
        self, data: st.DataObject, outcome: Outcome, has_token: bool, is_first: bool
    ) -> None:
        handler = self._handler(data)
        if handler is not None:
            # A handler reports these only where its client has gone, or was answered.
            if outcome in (Outcome.CANCELLED, Outcome.HOPELESS, Outcome.REJECTED):
                outcome = Outcome.OK
            handler.ends(outcome, has_token=has_token, is_first=is_first)

    @rule(data=st.data())
    def client_goes(self, data: st.DataObject) -> None:
        every = [h for w in self.workers for h in w.handlers.values()]
        if every:
            data.draw(st.sampled_from(every)).gone()

    @rule(worker=st.integers(0, 1), most=st.integers(1, 4), to_router=st.booleans())
    def deliver(self, worker: int, most: int, to_router: bool) -> None:
        each = self.workers[worker]
        if each.link is not None and to_router:
            each.deliver_to_router(most)
        elif each.link is not None:
            each.deliver_to_worker(most)

    @rule(worker=st.integers(0, 1))
    def connect(self, worker: int) -> None:
        if self.workers[worker].link is None:
            self.workers[worker].connect(self.router)

    @rule(worker=st.integers(0, 1), most=st.integers(0, 3))
    def worker_dies(self, worker: int, most: int) -> None:
        dead = self.workers[worker]
        if dead.link is not None:
            dead.deliver_to_router(most)
            dead.link.closed()
        name, _, life = dead.name.partition(".")
        self.workers[worker] = Worker(f"{name}.{int(life) + 1}", self._clock)
        self.workers[worker].connect(self.router)

    @rule(is_up=st.booleans())
    def controller_dies(self, is_up: bool) -> None:
        self.router = router_at(self._clock, is_up=is_up, have_notices=True)
        for each in self.workers:
            if each.link is not None:
                each.lost()

    @rule()
    def engines_come_up(self) -> None:
        engines_come_up(self.router, have_notices=True)

    @rule(seconds=st.floats(0.01, 0.5))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def the_controller_is_sound(self) -> None:
        assert not self.errors.found
        check_controller(self.router.controller)
        assert self.router.tenants is not None
        tenant = self.router.tenants.named(TENANT)
        assert tenant is not None
        assert 0 <= tenant.num_running <= self.router.num_requests

    def teardown(self) -> None:
        """What is left comes to its end, with everything there."""
        logging.getLogger("vllm_kvpool.router").removeHandler(self.errors)
        engines_come_up(self.router)
        for each in self.workers:
            if each.link is None:
                each.connect(self.router)
        for _ in range(1000):
            for each in self.workers:
                each.deliver_to_router()
                each.deliver_to_worker()
            handlers = [h for w in self.workers for h in w.handlers.values()]
            if not handlers:
                break
            for handler in handlers:
                if handler.directives:
                    handler.ends(Outcome.OK)
            self.now += 0.1
            self.router.post(Tick())
        assert not any(each.handlers for each in self.workers), "a request is lost"
        for each in self.workers:
            each.deliver_to_router()
            assert not each.client.num_requests
        check_controller(self.router.controller)
        state = self.router.controller.state
        assert not self.router.num_requests
        assert not state.requests
        assert not state.adopted
        assert not any(each.has_work for each in state.fleet)
        assert self.router.tenants is not None
        tenant = self.router.tenants.named(TENANT)
        assert tenant is not None
        assert not tenant.num_running


TestDeaths = Deaths.TestCase
TestDeaths.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def there(
    clock: Callable[[], float] = lambda: 100.0, workers: int = 1, *, have_notices: bool = False
) -> tuple[Router, list[Worker]]:
    """Workers with a controller."""
    router = router_at(clock, have_notices=have_notices)
    made = [Worker(f"w{number}", clock) for number in range(workers)]
    for each in made:
        each.connect(router)
        each.deliver_to_router()
    return router, made


def moved(worker: Worker) -> None:
    """Everything has been delivered."""
    worker.deliver_to_router()
    worker.deliver_to_worker()
    worker.deliver_to_router()


def running(router: Router) -> int:
    """Requests that count for the tenant."""
    assert router.tenants is not None
    tenant = router.tenants.named(TENANT)
    assert tenant is not None
    return tenant.num_running


def test_what_a_dead_worker_held_is_free_again() -> None:
    router, (dead, other) = there(workers=2)
    for worker in (dead, other):
        for number in range(2):
            worker.arrive(RequestId(f"{worker.name}-{number}:x"), 20)
        moved(worker)
    assert running(router) == 4
    assert dead.link is not None
    dead.link.closed()
    assert running(router) == router.num_requests == len(router.controller.state.requests) == 2
    held = [name for each in router.controller.state.fleet for name in each.active]
    assert sorted(held) == sorted(other.handlers)


def test_a_controller_that_comes_back_gives_no_second_order_and_asks_no_limit_twice() -> None:
    _, (worker,) = there()
    for number in range(MAX_RUNNING + 1):
        worker.arrive(RequestId(f"w-{number}:x"), 20)
    moved(worker)
    handlers = list(worker.handlers.values())
    (refused,) = (each for each in handlers if isinstance(each.directives[0], Refuse))
    assert refused is handlers[-1]
    refused.ends(Outcome.OK)
    before = [list(each.directives) for each in handlers]
    worker.lost()
    router = router_at(lambda: 100.0)
    worker.connect(router)
    moved(worker)
    assert [list(each.directives) for each in handlers] == before
    assert running(router) == MAX_RUNNING
    assert len(router.controller.state.requests) == MAX_RUNNING, "what engines serve is known"
    handlers[0].ends(Outcome.LOST)
    moved(worker)
    assert isinstance(handlers[0].directives[0], Decode), "another one goes on"
    for each in handlers[:-1]:
        each.ends(Outcome.OK)
    moved(worker)
    assert not router.num_requests
    assert not running(router)


@pytest.mark.parametrize("is_up", [True, False])
def test_a_controller_that_comes_back_knows_what_engines_have_to_do(is_up: bool) -> None:
    """As the one before it did, once the engines are known to be up."""
    before, (worker,) = there()
    sizes = [5000, 20, 20, 5000, 20]
    for number, tokens in enumerate(sizes):
        worker.arrive(RequestId(f"w-{number}:x"), tokens)
    moved(worker)
    worker.client.post(DecodeBegan(RequestId("w-1:x")))
    moved(worker)

    def work(router: Router) -> list[object]:
        state = router.controller.state
        return [
            [
                (each.replica_id, each.prefill_tokens, each.committed_blocks, each.num_starting)
                for each in state.fleet
            ],
            {name: (each.phase, each.replica) for name, each in state.requests.items()},
            state.pressure("m").committed_requests,
            state.pressure("m").queued_tokens,
        ]

    known = work(before)
    worker.lost()
    router = router_at(lambda: 100.0, is_up=is_up)
    worker.connect(router)
    moved(worker)
    if not is_up:
        assert not router.controller.state.requests
        assert len(router.controller.state.adopted) == len(sizes)
        engines_come_up(router)
    assert not router.controller.state.adopted
    assert work(router) == known
    check_controller(router.controller)
    for each in list(worker.handlers.values()):
        each.ends(Outcome.OK)
    moved(worker)
    assert not any(each.decoded_s for each in router.controller.state.fleet)
    unmeasured = router.controller.state.rates.snapshot(100.0).unmeasured
    assert {"step_base_s", "local_overhead_s", "handoff_overhead_s"} <= unmeasured


@pytest.mark.parametrize("is_first", [True, False])
def test_controller_that_comes_back_goes_on_with_what_is_left_of_both_calls(is_first: bool) -> None:
    """A decoder waits for a prompt; one of the two ends while there is no controller."""
    _, (worker,) = there(have_notices=True)
    worker.arrive(RequestId("w-0:x"), 5000)
    moved(worker)
    [handler] = worker.handlers.values()
    assert [type(each) for each in handler.directives] == [Prefill, Decode]
    worker.lost()
    handler.ends(Outcome.OK if is_first else Outcome.LOST, is_first=is_first, has_token=False)
    router = router_at(lambda: 100.0, have_notices=True)
    worker.connect(router)
    moved(worker)
    [request] = router.controller.state.requests.values()
    assert request.phase is (Phase.DECODING if is_first else Phase.PREFILLING)
    handler.ends(Outcome.OK)
    moved(worker)
    if not is_first:
        assert isinstance(handler.directives[0], Decode), "its prompt is computed"
        handler.ends(Outcome.OK)
        moved(worker)
    assert not router.num_requests
    assert not any(each.has_work for each in router.controller.state.fleet)


@pytest.mark.parametrize("outcome", Outcome)
@pytest.mark.parametrize("tokens", [5000, 20])
@pytest.mark.parametrize("is_gone", [False, True])
def test_a_call_that_ends_before_its_engine_is_known_to_be_up(
    outcome: Outcome, tokens: int, is_gone: bool
) -> None:
    _, (worker,) = there()
    worker.arrive(RequestId("w-0:x"), tokens)
    moved(worker)
    [handler] = worker.handlers.values()
    [call] = handler.directives
    worker.lost()
    router = router_at(lambda: 100.0, is_up=False)
    worker.connect(router)
    moved(worker)
    if is_gone:
        handler.gone()
    else:
        worker.client.post(call_ended(call, outcome, TokenCounts(100, 5)))  # type: ignore[arg-type]
        handler.directives.clear()
    moved(worker)
    state = router.controller.state
    assert not state.adopted
    is_over = isinstance(call, Decode) and outcome in ANSWERED
    goes_on = not (is_gone or is_over or outcome is Outcome.CANCELLED)
    assert bool(state.requests) is goes_on
    engines_come_up(router)
    moved(worker)
    assert bool(handler.directives) is goes_on


def test_refusals_are_in_the_log_some_seconds_of_them_a_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """112 of them left no line."""
    now = 100.0
    router, (worker,) = there(lambda: now)

    def refused(first: int, last: int) -> list[str]:
        for number in range(first, last):
            worker.arrive(RequestId(f"w-{number}:x"), 20)
        moved(worker)
        router.post(Tick())
        return [each.message for each in caplog.records if "refused" in each.message]

    assert refused(0, MAX_RUNNING) == []
    [first] = refused(MAX_RUNNING, 20)
    assert "with 429" in first
    assert "max_running" in first
    assert refused(20, 50) == [first]
    now += REFUSALS_LOGGED_EVERY_S
    _, second = refused(50, 50)
    assert "w-49:x" in second
    found = [int(each) for line in (first, second) for each in re.findall(r"(\d+) with", line)]
    assert sum(found) == 50 - MAX_RUNNING


def test_what_comes_while_the_controller_is_away_waits_for_it() -> None:
    now = 100.0
    _, (worker,) = there(lambda: now)
    worker.lost()
    worker.arrive(RequestId("w-0:x"), 20)
    now += 60.0  # past its deadline
    assert not worker.handlers[RequestId("w-0:x")].directives
    worker.connect(router_at(lambda: now))
    moved(worker)
    assert isinstance(worker.handlers[RequestId("w-0:x")].directives[0], Decode)


def test_a_directive_that_crosses_the_end_of_its_request_is_taken_back() -> None:
    router, (worker,) = there()
    worker.arrive(RequestId("w-0:x"), 20)
    worker.deliver_to_router()
    worker.handlers[RequestId("w-0:x")].gone()
    moved(worker)
    assert not router.num_requests
    assert not any(each.has_work for each in router.controller.state.fleet)


@pytest.mark.parametrize("size", [1, 2, 3, 1000])
def test_messages_come_out_of_any_pieces(size: int) -> None:
    messages: list[list[Any]] = [
        [Hello("w1.1"), Over(RequestId("a"), [Observation("request_seconds", 0.5)])],
        [DecodeEnded(request_id=RequestId("a"), replica=ReplicaId("d"), outcome=Outcome.LOST)],
        [Query(7, "relay_to", ("m",)), DecodeBegan(RequestId("é"), is_seen=False)],
    ]
    data = b"".join(map(encode_frame, messages))
    frames = Frames(FromWorker)
    found = []
    for begin in range(0, len(data), size):
        found += frames.feed(data[begin : begin + size])
    assert found == [each for group in messages for each in group]


@pytest.mark.parametrize("number", [10**400, 1 << 64, -(10**30)], ids=["400", "64", "-30"])
def test_numbers_of_any_size_fit_into_a_message(number: int) -> None:
    """One that did not took all messages of the same moment with it."""
    body = b'{"prompt": "x", "max_tokens": %d, "n": %d, "priority": %d}' % ((number,) * 3)
    request = parse_request(ApiPath.COMPLETION, body, is_trusted=True)
    ask = ask_of(RequestId("1"), request, 0.25, 1.0)
    opened = RequestOpen(ask, "")
    assert Frames(FromWorker).feed(encode_frame([opened])) == [opened]


@pytest.mark.parametrize("data", [b"\xff" * 8, b"\x01\x00\x00\x00\x00", encode_frame([["x"]])])
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        Frames(FromWorker).feed(data)


def relay(worker: Worker, name: str) -> Handler:
    """Begin what is only passed on."""
    request_id = RequestId(name)
    ask = Ask(request_id=request_id, prompt_tokens=0, max_output_tokens=0)
    handler = worker.handlers[request_id] = Handler(worker, request_id)
    worker.client.begin(ask, TENANT, handler, waits=False)
    return handler


async def test_questions_are_asked_again_and_what_is_passed_on_is_counted() -> None:
    _, (worker,) = there()
    first = relay(worker, "w-0:x")
    asked = asyncio.create_task(worker.client.ask("relay_to", ""))
    await asyncio.sleep(0)
    worker.lost()
    router = router_at(lambda: 100.0)
    worker.connect(router)
    worker.deliver_to_router()
    await asyncio.sleep(0)
    worker.deliver_to_worker()
    assert sorted(await asked) == ["http://d", "http://e", "http://p"]
    assert running(router) == 1
    worker.lost()
    router = router_at(lambda: 100.0)
    worker.connect(router)
    moved(worker)
    assert running(router) == 1
    assert not router.controller.state.requests
    every = [relay(worker, f"w-{number}:x") for number in range(1, MAX_RUNNING + 1)]
    moved(worker)
    assert running(router) == MAX_RUNNING
    (refused,) = (each for each in every if each.directives)
    assert isinstance(refused.directives[0], Refuse)
    for each in (first, *every):
        each.over()
    moved(worker)
    assert not running(router)
    assert not router.num_requests


def test_a_relay_of_a_dead_worker_holds_no_place() -> None:
    router, (worker,) = there()
    relay(worker, "w-0:x")
    moved(worker)
    assert worker.link is not None
    worker.link.closed()
    assert not running(router)


async def test_questions_that_nobody_waits_for_any_more_are_forgotten() -> None:
    _, (worker,) = there()
    sent = asyncio.create_task(worker.client.ask("health"))
    await asyncio.sleep(0)
    sent.cancel()
    await asyncio.sleep(0)
    worker.lost()  # before it was answered
    away = asyncio.create_task(worker.client.ask("health"))
    await asyncio.sleep(0)
    away.cancel()
    await asyncio.sleep(0)
    assert not worker.client._queries


@pytest.mark.parametrize("turns", range(8))
async def test_a_worker_that_connects_as_the_controller_ends_keeps_it_from_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, turns: int
) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's whole path may have 107 bytes
    listening = socket.socket(socket.AF_UNIX)
    listening.bind("control")
    links = WorkerLinks(Router(CONFIG, lambda: 0.0))
    await links.start(listening)
    loop = asyncio.get_running_loop()
    late = [
        asyncio.ensure_future(
            loop.create_unix_connection(
                lambda: MessageConnection(ToWorker, lambda message: None), "control"
            )
        )
        for _ in range(4)
    ]
    for _ in range(turns):
        await asyncio.sleep(0)
    async with asyncio.timeout(5.0):
        await links.stop()
    for each in late:
        each.cancel()
    await asyncio.wait(late)


async def test_a_connection_that_was_never_made_has_ended_once_it_is_closed() -> None:
    """Its accept may fail after its protocol was made."""

    connection = MessageConnection(ToWorker, lambda message: None)
    connection.close()
    async with asyncio.timeout(5.0):
        await connection.ended
