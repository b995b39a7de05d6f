"""Replicas, and the only place where they change their state."""

from itertools import product

import pytest

from tests.support.router_invariants import check_replica
from tests.support.router_steps import ask, spec
from vllm_kvpool.router.control.events import Sample
from vllm_kvpool.router.control.fleet import MAX_KEPT_TRANSITIONS, Fleet, Replica, Transition
from vllm_kvpool.router.control.requests import Request, RequestId
from vllm_kvpool.router.control.states import EDGES, Cause, IllegalEdge, ReplicaId, Role, State
from vllm_kvpool.router.control.work import ActiveRequest


def replica_in(state: State) -> tuple[Fleet, Replica]:
    fleet = Fleet()
    replica = fleet.add(spec("x"), 1.0)
    replica.state = state
    return fleet, replica


def test_a_move_follows_its_edge_and_is_kept() -> None:
    for (before, cause), after in EDGES.items():
        fleet, replica = replica_in(before)
        fleet.move(replica, cause, "because", 5.0)
        assert (replica.state, replica.since) == (after, 5.0)
        assert list(fleet.transitions) == [
            Transition(5.0, ReplicaId("x"), before, cause, after, "because")
        ]
        assert fleet.counts == {(before, cause): 1}
        assert fleet.in_states(frozenset({after})) == (replica,)


def test_an_illegal_move_changes_nothing() -> None:
    for state, cause in set(product(State, Cause)) - EDGES.keys():
        fleet, replica = replica_in(state)
        with pytest.raises(IllegalEdge):
            fleet.move(replica, cause, "because", 5.0)
        assert (replica.state, replica.since, replica.role) == (state, 1.0, Role.PREFILL)
        assert not fleet.transitions
        assert not fleet.counts


def test_a_replica_remembers_what_it_was_last_wanted_for() -> None:
    fleet, replica = replica_in(State.INACTIVE)
    fleet.move(replica, Cause.LOAD_DECODE, "", 1.0)
    fleet.move(replica, Cause.FAIL, "", 2.0)
    fleet.move(replica, Cause.RESET, "", 3.0)
    assert replica.role is Role.DECODE


def test_old_transitions_are_forgotten() -> None:
    fleet, replica = replica_in(State.INACTIVE)
    for _ in range(MAX_KEPT_TRANSITIONS):
        fleet.move(replica, Cause.LOAD_DECODE, "", 1.0)
        fleet.move(replica, Cause.GIVE_UP, "", 1.0)
    assert len(fleet.transitions) == MAX_KEPT_TRANSITIONS
    assert fleet.counts[State.INACTIVE, Cause.LOAD_DECODE] == MAX_KEPT_TRANSITIONS


def test_bound_requests_stand_in_their_order() -> None:
    replica = Replica(spec("x"), state=State.NEW_PREFILL)
    made = [Request(ask(f"r{n}", priority=p), 0.0, n, 9) for n, p in enumerate((0, 1, -1, 0))]
    for request in made:
        replica.work.assign(request)
    assert replica.work.bound == [made[2], made[0], made[3], made[1]]
    check_replica(replica)


def test_what_has_ended_since_an_engine_told_its_metrics_is_not_in_use() -> None:
    replica = Replica(spec("x"), state=State.DECODE)
    for name in "ab":
        replica.work.begin_decode(RequestId(name), ActiveRequest(50, is_handed=False), 0.0)
    replica.work.end_decode(RequestId("a"), 0.5)
    replica.measured(Sample(used_blocks=110), 1.0)  # as it was before that
    assert replica.work.used_blocks == 50 + 10
    replica.work.end_decode(RequestId("b"), 1.5)
    assert replica.work.used_blocks == 10


def test_nothing_of_an_engine_that_has_ended_is_believed() -> None:
    replica = Replica(spec("x"), sample=Sample(used_blocks=70, total_blocks=100), sampled_at=1.0)
    replica.remember((1, 2))
    replica.forget_engine()
    assert (replica.work.used_blocks, replica.sample.total_blocks, replica.sampled_at) == (
        0,
        100,
        None,
    )
    assert replica.cache.num_held == 0


@pytest.mark.parametrize("state", [State.INACTIVE, State.SHUTTING_NULL, State.LOADING_DECODE])
def test_work_where_there_can_be_none_is_noticed(state: State) -> None:
    replica = Replica(spec("x"), state=state)
    check_replica(replica)
    replica.work.begin_prefill(RequestId("r"), 10, 0.0)
    with pytest.raises(AssertionError):
        check_replica(replica)


def test_a_replica_with_work_is_not_forgotten() -> None:
    fleet, replica = replica_in(State.PREFILL)
    replica.work.begin_prefill(RequestId("r"), 10, 0.0)
    with pytest.raises(AssertionError):
        fleet.forget(replica.replica_id)
    assert replica.replica_id in fleet


def flows(replica: Replica, now: float) -> dict[str, float]:
    return {name: meter.per_second(now) for name, meter in replica.meters.items()}


def test_each_counter_is_a_flow_of_its_own() -> None:
    replica = Replica(spec("a"))
    replica.measured(Sample(), 10.0)
    counted = {"bytes_in": 20, "bytes_out": 40, "prompt_tokens": 60, "generated_tokens": 80}
    replica.measured(Sample(**counted), 12.0)
    assert flows(replica, 12.0) == {name: number / 2 for name, number in counted.items()}


def test_seconds_of_work_begin_with_the_first_prompt_after_a_pause() -> None:
    replica = Replica(spec("x"), state=State.PREFILL)
    for name, now in (("a", 1.0), ("b", 2.0)):
        replica.work.begin_prefill(RequestId(name), 10, now)
        replica.work.begin_decode(RequestId(name), ActiveRequest(1, is_handed=True), now)
    assert (replica.work.prefill_since, replica.work.transfer_since) == (1.0, 1.0)
    for name in "ab":
        replica.work.end_prefill(RequestId(name))
        replica.work.note_first_token(RequestId(name), 3.0)
    replica.work.begin_prefill(RequestId("c"), 10, 9.0)
    replica.work.begin_decode(RequestId("c"), ActiveRequest(1, is_handed=False), 9.0)
    replica.work.begin_decode(RequestId("d"), ActiveRequest(1, is_handed=True), 10.0)
    assert (replica.work.prefill_since, replica.work.transfer_since) == (9.0, 10.0)


def test_times_of_a_start_are_its_own_if_no_request_waits_beside_it() -> None:
    work = Replica(spec("x"), state=State.PREFILL).work
    first, second, third = (ActiveRequest(1, is_handed=each) for each in (False, True, True))
    work.begin_decode(RequestId("a"), first, 9.0)
    assert (work.alone, work.transfer_since) == (first, 0.0)
    work.begin_decode(RequestId("b"), second, 10.0)
    assert (work.alone, work.transfer_since) == (None, 10.0)
    for name in "ab":
        work.end_decode(RequestId(name), 11.0)
    work.measured(Sample(waiting=2))
    work.begin_decode(RequestId("c"), third, 13.0)
    assert work.alone is None


def test_fleet_version_changes_with_what_may_give_a_request_room() -> None:
    fleet = Fleet()
    versions = [fleet.version]
    replica = fleet.add(spec("x"), 1.0)
    versions.append(fleet.version)
    fleet.move(replica, Cause.LOAD_DECODE, "because", 2.0)
    versions.append(fleet.version)
    fleet.list_models(replica, frozenset({"a"}))
    versions.append(fleet.version)
    fleet.handovers.forget(replica.replica_id)
    versions.append(fleet.version)
    assert len(set(versions)) == len(versions)
    replica.remember((1, 2))
    replica.measured(Sample(total_blocks=100), 3.0)
    assert fleet.version == versions[-1], "the table of loads has not been asked"


def test_fleet_listed_models_follow_replicas_and_their_lists() -> None:
    fleet = Fleet()
    first, second = fleet.add(spec("x"), 1.0), fleet.add(spec("y"), 1.0)
    fleet.list_models(first, frozenset({"a"}))
    assert (fleet.listed.groups.keys(), fleet.listed.is_single_set) == ({"a"}, True)
    fleet.list_models(second, frozenset({"a", "b"}))
    assert (fleet.listed.groups.keys(), fleet.listed.is_single_set) == ({"a", "b"}, False)
    assert fleet.share_of("b", "a") == 0.5
    # Admission asks for each pair of models, under overload at each request.
    assert fleet.listed.shares == {("b", "a"): 0.5}
    fleet.forget(first.replica_id)
    assert (fleet.share_of("b", "a"), fleet.listed.is_single_set) == (1.0, True)
