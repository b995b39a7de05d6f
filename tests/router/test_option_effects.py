"""Every option of the router's file has an effect, seen from outside.

An option by which the controller decides has a row in `DECISIONS`: steps of a controller that is
made from a file, and what comes of them with the option and without. Each other option names a test
in `SHOWN` that fails if the option is ignored; `make mutations` ignores each of them once.
"""

import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import msgspec
import pytest

from tests.router.scripts import take
from tests.support.router_rig import FAST, QUICK, SERVING, RouterRig, quick_router
from tests.support.router_steps import Steps, spec
from tests.support.scripted_engine import ScriptedEngine
from tests.support.scripted_spec import Fault, FaultKind
from tests.support.server_process import free_ports
from tests.support.waiting import until
from vllm_kvpool.router.config import (
    ReplicaConfig,
    RouterConfig,
    TenantConfig,
    controller_of,
    read_config,
)
from vllm_kvpool.router.control.events import Added
from vllm_kvpool.router.control.fleet import Replica
from vllm_kvpool.router.control.settings import Section
from vllm_kvpool.router.control.states import ReplicaId, State

ENGINE = {"url": "http://a:1", "role": "both"}
NAME = ReplicaId("engine")
ROOT = Path(__file__).parents[2]
SHORT_S, LONG_S = 0.05, 3600.0
HANG_S = 0.5  # a healthy engine answers sooner, on a busy machine too


class Decision(NamedTuple):
    """A decision that depends on an option. Steps are those of `scripts.py`."""

    value: Any
    steps: str
    with_option: str
    without: str
    beside: str = ""
    """Another option that both controllers have: `section.name=value`."""
    spares: int = 0


BUSY = "flow.decode_requests=1"
AUTOMATIC = "planner.mode=automatic"
DECISIONS = {
    "planner.mode": Decision(
        "automatic", "fleet / d", "tick -> load s-1 prefill", "tick -> nothing", spares=1
    ),
    "planner.min_prefill": Decision(
        2,
        "fleet p / d; pass 9",
        "state s-1 loading_prefill_assigned",
        "state s-1 inactive",
        AUTOMATIC,
        spares=1,
    ),
    "planner.min_decode": Decision(
        2,
        "fleet p / d; pass 9",
        "state s-1 loading_decode",
        "state s-1 inactive",
        AUTOMATIC,
        spares=1,
    ),
    "planner.down_hold_s": Decision(
        5.0, "fleet p q / d; pass 60", "state p standby", "state p prefill", AUTOMATIC
    ),
    "planner.standby_ttl_s": Decision(
        10.0,
        "fleet p q / d; plan_drains q; pass 20",
        "state q inactive",
        "state q standby",
        AUTOMATIC,
    ),
    "planner.live_takeover": Decision(
        False,
        "fleet p / d; ask r; start prefill",
        "state n-1 loading_prefill",
        "state n-1 loading_prefill_assigned",
    ),
    "overload.ttft_target_s": Decision(
        1.0, "fleet / d; ask r 20; ask s 20", "tick 3 -> refuse s 503", "tick 3 -> nothing", BUSY
    ),
    "overload.max_queue": Decision(
        2,
        "fleet / d; ask r 20; ask s 20; ask t 20",
        "ask u 20 -> refuse u 429",
        "ask u 20 -> nothing",
        BUSY,
    ),
    "flow.prefill_tokens": Decision(
        1500, "fleet p / d; ask r", "ask s -> nothing", "ask s -> prefill s p"
    ),
    "flow.decode_requests": Decision(
        1, "fleet / d; ask r 20", "ask s 20 -> nothing", "ask s 20 -> decode s d"
    ),
    "flow.headroom": Decision(
        0.5,
        "fleet / d; measure d blocks=20; ask r 20",
        "ask s 20 -> nothing",
        "ask s 20 -> decode s d",
    ),
    "flow.max_attempts": Decision(
        1,
        "fleet p q / d; ask r",
        "prefilled r p failed -> ... refuse r 502",
        "prefilled r p failed -> ... prefill r q",
    ),
    "flow.max_lost": Decision(
        1,
        "fleet p q / d; ask r",
        "prefilled r p lost -> ... refuse r 502",
        "prefilled r p lost -> ... prefill r q",
    ),
    "flow.drain_timeout_s": Decision(
        10.0,
        "fleet / d e; ask r 20; place r d; began r; drain d",
        "tick 11 -> abort r d",
        "tick 11 -> nothing",
    ),
    "flow.hands_over": Decision(
        False, "fleet p / d", "ask r -> decode r d", "ask r -> prefill r p"
    ),
    "health.max_failures": Decision(
        1, "fleet p / d; failed p; tick", "state p quarantined", "state p failed"
    ),
    "health.quarantine_s": Decision(
        5.0,
        "fleet p / d; failed p; tick; failed p; tick; failed p",
        "tick 6 -> load p prefill",
        "tick 6 -> nothing",
    ),
}


def controller_with(options: dict[str, Any], spares: int) -> Steps:
    """Return the steps of a controller that a file's options make."""
    file: dict[str, Any] = {"replicas": [ENGINE]}
    for name, value in options.items():
        section, _, option = name.partition(".")
        file.setdefault(section, {})[option] = value
    steps = Steps()
    steps.controller = controller_of(read_config(file))
    for number in range(1, spares + 1):
        steps.step(Added(spec=spec(f"s-{number}", is_started=True)))
    return steps


@pytest.mark.parametrize("option", DECISIONS)
@pytest.mark.parametrize("is_set", [True, False])
def test_controller_decides_by_an_option_of_its_file(option: str, is_set: bool) -> None:
    row = DECISIONS[option]
    name, _, value = row.beside.partition("=")
    beside = {name: msgspec.json.decode(value) if value.isdigit() else value} if name else {}
    steps = controller_with({**beside, option: row.value} if is_set else beside, row.spares)
    for step in [*row.steps.split("; "), row.with_option if is_set else row.without]:
        take(steps, step)


# Options of the other parts


@asynccontextmanager
async def watching(
    engine: str, health: dict[str, Any], **replica: Any
) -> AsyncIterator[Callable[[], Replica]]:
    """Run a router over one engine, and yield a function that returns its replica."""
    file = {name: dict(section) for name, section in QUICK.items()}
    file["health"] |= health
    replicas = [{"url": engine, "role": "both", "id": NAME, **replica}]
    router = quick_router(read_config({**file, "replicas": replicas}))
    await router.start()
    try:
        yield lambda: router.controller.state.fleet[NAME]
    finally:
        await router.stop()


HUNG = ("/health", "/metrics")
LIMITS = {
    "timeout_s": ({"timeout_s": HANG_S, "failures": 1}, {"timeout_s": LONG_S, "failures": 1}),
    "failures": (
        {"timeout_s": HANG_S, "failures": 1},
        {"timeout_s": HANG_S, "failures": 1_000_000},
    ),
}


@pytest.mark.parametrize("option", LIMITS)
async def test_engine_that_hangs_has_failed_after_the_limits_of_its_file(option: str) -> None:
    engine = ScriptedEngine(FAST, None)
    await engine.start()
    hasty, patient = LIMITS[option]
    try:
        async with watching(engine.url, hasty) as ours, watching(engine.url, patient) as others:
            for each in (ours, others):
                await until(lambda each=each: each().state in SERVING)  # type: ignore[misc]
            engine.fail(Fault(kind=FaultKind.HANG, paths=HUNG))
            began = time.monotonic()
            await until(lambda: ours().state is State.FAILED)
            # With equal limits the other router would follow in less than that time.
            end = 2 * time.monotonic() - began
            await until(lambda: others().state not in SERVING or time.monotonic() > end)
            assert others().state in SERVING
    finally:
        await engine.stop()


async def test_engine_is_measured_as_often_as_the_file_says() -> None:
    engine = ScriptedEngine(FAST, None)
    await engine.start()
    try:
        async with (
            watching(engine.url, {"every_s": SHORT_S}) as often,
            watching(engine.url, {"every_s": LONG_S}) as seldom,
        ):
            await until(lambda: often().sampled_at and seldom().sampled_at)
            first = seldom().sampled_at
            for _ in range(3):  # with equal periods the other router would measure in between
                last = often().sampled_at
                await until(lambda last=last: often().sampled_at != last)  # type: ignore[misc]
            assert seldom().sampled_at == first
    finally:
        await engine.stop()


@pytest.mark.parametrize(
    ("option", "replica"),
    [
        ("load_timeout_s", {}),
        ("command_timeout_s", {"start": ["sleep", "60"], "stop": ["true"]}),
    ],
)
async def test_load_ends_after_the_limits_of_its_file(option: str, replica: dict[str, Any]) -> None:
    """No engine listens at the port."""
    url = f"http://127.0.0.1:{free_ports(1)[0]}"
    async with (
        watching(url, {option: SHORT_S}, **replica) as hasty,
        watching(url, {option: LONG_S}, **replica) as patient,
    ):
        await until(lambda: hasty().state is State.FAILED)
        assert patient().state is not State.FAILED


async def test_router_listens_where_its_file_says_and_takes_the_files_token_and_names(
    tmp_path: Path,
) -> None:
    token_file = tmp_path / "token"
    token_file.write_text("of the file")
    token_file.chmod(0o600)
    front, admin = free_ports(2)
    for given, token in (
        ({"token": "given"}, "given"),
        ({"token_file": str(token_file)}, "of the file"),
    ):
        options = {"listen": f"127.0.0.1:{admin}", "hosts": ["router.svc"], **given}
        async with RouterRig(0, 1, front={"listen": f"127.0.0.1:{front}"}, admin=options) as rig:
            for host, key, status in (
                ("router.svc", token, 200),
                ("other.svc", token, 403),
                ("router.svc", "wrong", 401),
            ):
                headers = {"Host": host, "Authorization": f"Bearer {key}"}
                url = f"http://127.0.0.1:{admin}/state"
                async with rig.session.get(url, headers=headers) as answer:
                    assert answer.status == status
            async with rig.session.get(f"http://127.0.0.1:{front}/health") as answer:
                assert answer.status == 200


SHOWN_BY = """
test_option_effects.py
    test_router_listens_where_its_file_says_and_takes_the_files_token_and_names
        front.listen admin.listen admin.token admin.token_file admin.hosts
    test_engine_is_measured_as_often_as_the_file_says
        health.every_s replicas.url replicas.id
    test_engine_that_hangs_has_failed_after_the_limits_of_its_file
        health.timeout_s health.failures
    test_load_ends_after_the_limits_of_its_file
        health.load_timeout_s health.command_timeout_s
test_tenants.py
    test_clients_are_answered_as_their_keys_allow
        front.keys_file tenants.key tenants.models tenants.max_running api_key
    test_tenants_are_kept_apart_by_salts_that_they_cannot_name
        front.salt_file
    test_engines_are_told_whose_request_it_is
        tenants.name
    test_clients_wait_as_the_rate_in_the_file_of_keys_says
        tenants.requests_per_s tenants.burst
test_server.py
    test_a_body_at_the_limit_is_served_and_one_beyond_it_is_not
        front.max_body_bytes
    test_a_second_request_must_come_in_time_too
        front.read_timeout_s
    test_all_bodies_together_are_bounded
        front.max_bodies_bytes
    test_more_connections_than_allowed_are_closed
        front.max_connections
test_run.py
    test_who_waits_longer_than_allowed_is_refused
        front.max_wait_s
    test_requests_that_do_not_end_hold_up_no_stop
        front.shutdown_timeout_s
test_failover.py
    test_whatever_happens_to_one_decode_engine
        front.engine_timeout_s
    test_whatever_happens_to_a_prefill_engine
        front.answer_timeout_s
test_request_handler.py
    test_a_client_that_reads_nothing_is_let_go_and_its_engine_is_not_blamed
        front.client_timeout_s
    test_clients_steer_engines_where_they_are_trusted
        front.trust_clients
    test_a_long_prompt_is_computed_by_one_engine_and_decoded_by_another
        replicas.role
test_request_log.py
    test_a_line_says_who_answered_how_soon_and_how_much
        front.access_log
test_tracing.py
    test_a_request_is_a_span_between_its_client_and_its_engines
        front.otlp_traces_endpoint
test_origins.py
    test_router_takes_its_own_names
        front.hosts
test_handovers.py
    test_engines_without_a_common_store_stop_waiting_for_each_other
        front.expect_timeout_ms
test_discovery.py
    test_a_file_is_watched_and_one_that_is_wrong_changes_nothing
        discovery.file
    test_each_address_of_a_name_is_an_engine
        discovery.prefill_dns discovery.decode_dns
test_start_stop.py
    test_engine_is_started_when_it_dies_or_hangs_and_ended_when_it_is_removed
        replicas.start replicas.stop
"""
"""For each test that fails if an option is ignored: its file, its name and its options."""


def shown_options() -> dict[str, str]:
    """Return the test that shows each option of `SHOWN_BY`."""
    found: dict[str, str] = {}
    file = test = ""
    for line in SHOWN_BY.strip().splitlines():
        if not line.startswith(" "):
            file = line
        elif not line.startswith(8 * " "):
            test = f"tests/router/{file}::{line.strip()}"
        else:
            found |= dict.fromkeys(line.split(), test)
    return found


SHOWN = shown_options()


def options() -> Iterator[tuple[str, type[Section], str]]:
    """Yield each option of the file and of the keys' file, with its section and name."""
    kinds = dict(get_type_hints(RouterConfig))
    kinds |= {"replicas": ReplicaConfig, "tenants": TenantConfig}
    for name, kind in kinds.items():
        if issubclass(kind, Section):
            yield from ((f"{name}.{each}", kind, each) for each in kind.__struct_fields__)
        else:
            yield name, RouterConfig, name


def test_every_option_of_the_file_has_a_row_or_names_a_test() -> None:
    assert {name for name, *_ in options()} == DECISIONS.keys() | SHOWN.keys()
    assert not DECISIONS.keys() & SHOWN.keys()


@pytest.mark.parametrize("shown_by", sorted(set(SHOWN.values())))
def test_named_test_exists(shown_by: str) -> None:
    file, _, name = shown_by.partition("::")
    assert f"def {name}(" in (ROOT / file).read_text()
