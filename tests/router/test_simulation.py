"""The router's controller in simulated clusters: random lives, long days, bursts."""

import pickle
import random
from collections import Counter
from dataclasses import replace
from functools import cache
from math import sin, tau
from statistics import mean
from typing import Any

import msgspec
import pytest

from tests.support.router_burst import Way, burst, load
from tests.support.router_chaos import HOUR_S, Chaos
from tests.support.router_engines import engine_spec
from tests.support.router_world import Habits, World
from tests.support.scripted_spec import ScriptedSpec
from tests.support.seeds import seeds
from vllm_kvpool.router.control.controller import Controller
from vllm_kvpool.router.control.events import Mode
from vllm_kvpool.router.control.placement import FIRST_LIMIT, limit
from vllm_kvpool.router.control.rates import Rates
from vllm_kvpool.router.control.settings import OverloadConfig, PlannerConfig, Settings
from vllm_kvpool.router.control.states import DRAINING, EDGES, LOADING, Cause, Role, State
from vllm_kvpool.router.ops.snapshot import COUNTS, OUTCOMES, RouterView, state_of

HOURS = 5
STORM_S = 200.0
HEAL_S = 1500.0
DAY_S = 21_600.0
"""A simulated day lasts 6 h: the load rises and falls four times as fast."""
PASSING = DRAINING | LOADING | {State.REFRACTORY_PREFILL, State.AUS_PREFILL, State.AUS_DECODE}
LONGEST_PASSING_S = 1200.0
ENDS = ("served", "refused", "cancelled", "rejected", "hopeless")


def random_controller(chance: random.Random) -> Controller:
    """Return a controller with a random configuration."""
    return Controller(
        Settings(
            prefill_tokens=chance.choice((2_000, 16_384)),
            prefill_requests=chance.choice((1, 4, 16)),
            max_pending_handoffs=chance.choice((1, 4, 16)),
            decode_requests=chance.choice((2, 16, 256)),
            max_attempts=chance.choice((1, 2, 4)),
            drain_timeout_s=chance.choice((5.0, 120.0)),
            hands_over=chance.random() < 0.9,
        ),
        planner=PlannerConfig(
            mode=chance.choice((Mode.AUTOMATIC, Mode.AUTOMATIC, Mode.MANUAL, Mode.DRY_RUN)),
            live_takeover=chance.random() < 0.7,
        ),
    )


def check_view(world: World) -> None:
    """Assert that the view can be encoded, and that each request is in flight or has ended once."""
    view = state_of(world.controller, world.now)
    assert msgspec.json.decode(msgspec.json.encode(view), type=RouterView) == view
    assert view.counts["arrived"] == view.in_flight + sum(view.counts[name] for name in OUTCOMES)
    assert view.counts.keys() == set(COUNTS)
    refused = ("shed", "late", "given_up")
    assert sum(view.refusals.values()) == sum(view.counts[name] for name in refused)
    for each in view.replicas:
        assert (each.lock_why != "") is each.locked
        assert 0 <= each.starting <= each.decodes


def watch_for_bounds(world: World) -> None:
    """No loading replica is bound to more than its limit, no passing state lasts."""
    fleet = world.controller.state.fleet
    bound: Counter[str] = Counter()

    def look() -> None:
        for replica in fleet.in_states(frozenset({State.NEW_PREFILL})):
            number = len(replica.work.bound)
            assert number <= FIRST_LIMIT
            if number > bound[replica.replica_id]:
                assert number <= limit(replica, world.now)
            bound[replica.replica_id] = number
        if world.num_steps % 100 == 0:
            check_view(world)
            for replica in fleet.in_states(PASSING):
                assert world.now - replica.since < LONGEST_PASSING_S, replica

    world.after_steps.append(look)


def random_world(seed: int) -> tuple[World, Chaos]:
    chance = random.Random(seed)
    shares = chance.choice((0.0, 0.02))
    world = World(
        random_controller(chance),
        seed=seed,
        check_every=3,  # checks are half the cost, and what is wrong once stays so
        kind=engine_spec(
            prefill_tokens_per_s=chance.choice((2_000.0, 8_000.0)),
            kv_blocks=chance.choice((400, 1000, 4000)),
            load_s=chance.choice((5.0, 60.0)),
        ),
        habits=Habits(
            scrape_s=chance.choice((1.0, 3.0)),
            quiet_scrape_s=600.0,
            quiet_after_s=10.0,
            failed_share=shares,
            rejected_share=shares,
            hopeless_share=shares,
            load_fails_share=shares * 5,
            lost_share=chance.choice((0.02, 0.3)),
        ),
    )
    chaos = Chaos(world, seed)
    watch_for_bounds(world)
    for number in range(chance.randint(1, 3)):
        world.add(f"p{number}", Role.PREFILL)
    for number in range(chance.randint(1, 3)):
        world.add(f"d{number}", Role.DECODE)
    return world, chaos


def check_at_rest(world: World) -> None:
    """Assert that no request, queue entry or lock is left, and no replica is in transition."""
    state, calls = world.controller.state, world.calls
    assert not calls.clients
    assert not calls.live
    assert sum(calls.fates[end] for end in ENDS) == calls.fates["arrived"]
    assert not state.requests
    assert not state.queue
    assert not state.migration
    assert state.overload.locked == frozenset()
    assert not [each for each in state.fleet if each.state in PASSING]
    assert state.counts.events["locks"] == state.counts.events["releases"]


def check_transitions(world: World) -> None:
    fleet = world.controller.state.fleet
    assert set(fleet.counts) <= set(EDGES)
    for each in fleet.transitions:
        assert EDGES[each.before, each.cause] is each.after


def live(seed: int) -> None:
    world, chaos = random_world(seed)
    for _ in range(HOURS):
        chaos.hour()
    chaos.heal(HEAL_S)
    check_transitions(world)
    check_at_rest(world)


def endure(seed: int) -> None:
    world, chaos = random_world(seed)
    chaos.storm(STORM_S)
    chaos.heal(HEAL_S)
    check_transitions(world)
    check_at_rest(world)


@pytest.mark.parametrize("seed", seeds(24, 200))
def test_a_random_life(seed: int) -> None:
    live(seed)


@pytest.mark.parametrize("seed", seeds(5, 20))
def test_a_storm(seed: int) -> None:
    endure(seed)


@pytest.mark.parametrize("seed", seeds(6, 60))
def test_storm_in_which_decoders_wait_for_prompts(seed: int) -> None:
    chance = random.Random(seed)
    settings = Settings(max_pending_handoffs=chance.choice((2, 4, 16)))
    unhurried = OverloadConfig(ttft_target_s=1000.0)
    kind = engine_spec(kv_blocks=8000)
    world = World(Controller(settings, overload=unhurried), seed=seed, kind=kind, check_every=3)
    chaos = Chaos(world, seed, sizes=(300, 4000, 6000, 12_000))
    most = 0

    def look() -> None:
        nonlocal most
        most = max(most, *(each.work.num_awaiting for each in world.controller.state.fleet), 0)

    world.after_steps.append(look)
    for number in range(3):
        world.add(f"p{number}", Role.PREFILL)
        world.add(f"d{number}", Role.DECODE)
    chaos.burst(300, STORM_S)
    chaos.storm(STORM_S)
    assert world.calls.num_early
    assert 1 <= most <= settings.max_pending_handoffs // 2
    chaos.heal(HEAL_S)
    check_transitions(world)
    check_at_rest(world)


def test_the_controller_does_not_grow() -> None:
    """The controller's state is no larger after many storms than after a few."""
    controller = Controller(planner=PlannerConfig(mode=Mode.AUTOMATIC))
    habits = Habits(scrape_s=3.0, quiet_scrape_s=600.0)
    world = World(controller, seed=3, habits=habits, check_every=0)  # lives above make them
    chaos = Chaos(world, 3)
    world.add("p", Role.PREFILL)
    world.add("d", Role.DECODE)
    sizes = []
    for _ in range(10):
        for _ in range(2):
            chaos.burst(150, 30.0)
            world.timeline.after(10.0, chaos.fault)
            world.run(HOUR_S)
        check_at_rest(world)
        # These have bounds.
        controller.state.fleet.transitions.clear()
        controller.state.fleet._prefixes._holders.clear()
        controller.state.counts.waits.clear()
        sizes.append(len(pickle.dumps(controller)))
    # One number kept of each request would be a tenth more.
    assert max(sizes[5:]) < 1.05 * max(sizes[:5]), sizes


# Plans

LUMPY = engine_spec(
    prefill_tokens_per_s=2_000.0,
    step_base_s=0.05,
    decode_sequence_s=0.005,
    kv_blocks=3_000,
    load_s=30.0,
)
ROLE_CHANGES = {
    *(Cause.LOAD_PREFILL, Cause.LOAD_DECODE, Cause.TAKE_OVER, Cause.USE_PREFILL),
    *(Cause.USE_DECODE, Cause.MUTATE, Cause.REVIVE, Cause.DEACTIVATE),
}


SPARES = 8


def planned_world(seed: int, kind: ScriptedSpec, **limits: Any) -> World:
    rates = Rates(prefill_tokens_per_s=kind.prefill_tokens_per_s)
    planner = PlannerConfig(mode=Mode.AUTOMATIC, **limits)
    overload = OverloadConfig(ttft_target_s=15.0)
    world = World(
        Controller(planner=planner, rates=rates, overload=overload),
        seed=seed,
        kind=kind,
        habits=Habits(tick_s=1.0, scrape_s=3.0),
        check_every=0,  # they are made elsewhere, at a cost
    )
    world.add("p", Role.PREFILL)
    world.add("d", Role.DECODE)
    add_spares(world, SPARES)
    return world


def add_spares(world: World, number: int) -> None:
    """Add engines that the router can start."""
    for each in range(number):
        world.add(f"s{each}", None, is_up=False, is_started=True)


def role_changes(world: World) -> int:
    counts = world.controller.state.fleet.counts
    return sum(number for (_, cause), number in counts.items() if cause in ROLE_CHANGES)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("per_second", "down_hold_s", "most_per_hour", "crashes"),
    # A replica is busy with one of these prompts for a second and a half, so that chance alone
    # makes any of these loads look like another one for minutes.
    [
        (0.2, 30.0, 12, 0),
        (0.5, 30.0, 20, 3),
        (0.2, 120.0, 8, 3),
        (0.5, 120.0, 8, 0),
        (1.0, 120.0, 8, 3),
    ],
)
def test_plans_do_not_flap_under_a_steady_load(
    per_second: float, down_hold_s: float, most_per_hour: int, crashes: int
) -> None:
    world = planned_world(1, LUMPY, down_hold_s=down_hold_s)
    load(world, 2 * HOUR_S, lambda now: per_second, seed=1)
    world.run(HOUR_S / 2)
    before = role_changes(world)
    for number in range(crashes):
        engine = list(world.watch.engines.values())[number % len(world.watch.engines)]
        world.timeline.after(number * 1000.0, lambda e=engine: world.watch.crash(e, 20.0))
    world.run(HOUR_S)
    # A crash costs the load of another engine, and its going when the first is back.
    assert role_changes(world) - before <= most_per_hour + 4 * crashes
    assert world.calls.fates["refused"] < 0.05 * world.calls.fates["arrived"]


@pytest.mark.slow
def test_replicas_follow_the_load_of_a_day() -> None:
    kind = replace(LUMPY, prefill_tokens_per_s=1_000.0, step_base_s=0.1, decode_sequence_s=0.01)
    world = planned_world(1, kind, min_decode=2)
    fleet = world.controller.state.fleet
    load(world, DAY_S, lambda now: 0.02 + 0.6 * max(0.0, sin((now / DAY_S - 0.25) * tau)))
    serving: list[tuple[int, int]] = []
    for _ in range(24 * 6):
        world.run(DAY_S / (24 * 6))
        if world.now > 600.0:
            assert len(fleet.prefillers()) >= 1
            assert len(fleet.decoders()) >= 2
        serving.append((len(fleet.prefillers()), len(fleet.decoders())))
    night = [sum(each) for each in serving[6 : 5 * 6] + serving[20 * 6 :]]
    noon = [sum(each) for each in serving[11 * 6 : 13 * 6]]
    assert mean(night) <= 6.0  # steps down that were taken back have made it patient
    assert mean(noon) > mean(night) + 2.0
    assert max(sum(each) for each in serving) <= 10
    assert max(each for each, _ in serving) > 2
    assert max(each for _, each in serving) > 2
    assert world.calls.fates["refused"] < 0.05 * world.calls.fates["arrived"]


# A burst while engines are started


@cache
def waits_in_a_burst(way: Way, seed: int) -> tuple[float, ...]:
    """Seconds to the first token, the shortest first; two tests ask for the same burst."""
    world = burst(way, seed)
    check_at_rest(world)
    assert world.calls.fates["served"] == world.calls.fates["arrived"] > 300
    assert (world.controller.state.counts.events["stolen"] > 0) == (way is Way.TAKE_OVER)
    return tuple(sorted(wait_s for _, wait_s in world.calls.waits))


def p99(waits: tuple[float, ...]) -> float:
    return waits[int(0.99 * len(waits))]


@pytest.mark.parametrize("seed", range(3))
def test_taking_over_beats_waiting_for_who_loads(seed: int) -> None:
    taking_over, waiting = (waits_in_a_burst(way, seed) for way in (Way.TAKE_OVER, Way.WAIT))
    assert len(taking_over) == len(waiting)
    assert p99(taking_over) < 0.7 * p99(waiting)


@pytest.mark.parametrize("seed", range(3))
def test_what_is_bound_waits_no_longer_than_what_is_not(seed: int) -> None:
    taking_over, queued = (waits_in_a_burst(way, seed) for way in (Way.TAKE_OVER, Way.QUEUE))
    assert p99(taking_over) < 1.1 * p99(queued)
    assert taking_over[-1] < 1.2 * queued[-1]
