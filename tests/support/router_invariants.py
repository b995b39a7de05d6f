"""Invariants of the controller's parts, which hold between its steps."""

from collections import Counter

from vllm_kvpool.router.control.controller import Controller
from vllm_kvpool.router.control.controller_state import ControllerState
from vllm_kvpool.router.control.fleet import Fleet, Replica
from vllm_kvpool.router.control.overload import Overload
from vllm_kvpool.router.control.placement import NOTHING, LoadTable, Totals
from vllm_kvpool.router.control.prefix_index import PrefixIndex
from vllm_kvpool.router.control.requests import Phase, Request, RequestQueue, Waiting
from vllm_kvpool.router.control.states import (
    BROKEN,
    DRAINING,
    HAS_BOUND,
    LOADING,
    ROLE_OF,
    Goal,
    State,
)


def check_controller(controller: Controller) -> None:
    """Assert all invariants of a controller."""
    state = controller.state
    check_fleet(state.fleet)
    check_queue(state.queue)
    check_queue(state.migration)
    check_overload(state.overload)
    check_table(state.table)
    assert state.overload.locked <= {each.replica_id for each in state.fleet.decoders()}
    phases = Counter(each.phase for each in state.requests.values())
    for request in state.requests.values():
        _check_request(state, request)
    assert len(state.queue) == phases[Phase.QUEUED]
    assert sum(len(each.work.bound) for each in state.fleet) == phases[Phase.BOUND]
    assert len(state.migration) == phases[Phase.HANDING]


def _check_request(state: ControllerState, request: Request) -> None:
    """Assert that a request is in the collection of its phase, and in no other."""
    request_id, phase = request.ask.request_id, request.phase
    replica = state.fleet.get(request.replica) if request.replica is not None else None
    assert (replica is None) == (phase in (Phase.QUEUED, Phase.HANDING)), request
    assert (request in state.queue) == (phase is Phase.QUEUED), request
    assert (request in state.migration) == (phase is Phase.HANDING), request
    if request.is_computing:
        assert phase in (Phase.PREFILLING, Phase.HANDING, Phase.DECODING), request
        assert request.source is not None, request
        assert request_id in state.fleet[request.source].work.prefills, request
        assert phase is not Phase.DECODING or request.replica != request.source, request
    if phase is Phase.DECODING and replica is not None:
        active = replica.work.active[request_id]
        # A request that is sent away has lost the replica that it waits for.
        assert not active.awaits_prompt or request.is_computing or active.is_sent_away, request
    if replica is not None:
        is_here = {
            Phase.BOUND: request in replica.work.bound,
            Phase.PREFILLING: request_id in replica.work.prefills,
            Phase.DECODING: request_id in replica.work.active,
        }
        assert is_here[phase], request


def check_fleet(fleet: Fleet) -> None:
    """Assert the invariants of all replicas, and that the fleet's cached views are current."""
    for each in fleet:
        check_replica(each)
        check_goal(each)
    check_prefixes(fleet._prefixes)
    assert all(each.cache.owner is each and not each.cache.is_gone for each in fleet)
    for states, found in fleet._in_states.items():
        wanted = (states,) if isinstance(states, State) else states
        assert found == tuple(each for each in fleet if each.state in wanted)
    kept = fleet._listed, fleet._sharing
    fleet._listed = fleet._sharing = None
    assert kept[0] is None or kept[0] == fleet.listed
    for pair, share in kept[0].shares.items() if kept[0] is not None else ():
        assert share == fleet.share_of(*pair)
    assert kept[1] is None or kept[1] == fleet.sharing()
    fleet._listed, fleet._sharing = kept


def check_replica(replica: Replica) -> None:
    """Assert that a replica's counts match its work, and that its work is legal in its state."""
    stays = replica.work.active.values()
    assert replica.work.prefill_tokens == sum(replica.work.prefills.values()), replica
    assert replica.work.committed_blocks == sum(each.blocks for each in stays), replica
    assert replica.work.num_sequences == sum(each.num_sequences for each in stays), replica
    starting = [each for each in stays if not each.has_first_token]
    assert replica.work.num_starting == len(starting), replica
    assert replica.work.num_computing == sum(not each.is_handed for each in starting), replica
    awaiting = [each for each in stays if each.awaits_prompt]
    assert replica.work.num_awaiting == len(awaiting) <= replica.work.most_awaiting, replica
    assert all(each.is_handed and not each.has_first_token for each in awaiting), replica
    if replica.state is State.INACTIVE or replica.state is State.SHUTTING_NULL:
        assert not replica.work, replica
    if replica.work.bound:
        assert replica.state in HAS_BOUND, replica
    if replica.state in LOADING:
        assert len(replica.work.prefills) + len(stays) == 0, replica


def check_goal(replica: Replica) -> None:
    """Assert that a replica's state is its goal's, or on the way to it."""
    if replica.goal.role is not ROLE_OF[replica.state] and replica.state is not State.INACTIVE:
        # The replica is on the way to its goal, or there.
        assert replica.state in DRAINING | BROKEN | {State.SHUTTING_NULL}, replica
    if replica.goal.role is not None:
        assert replica.state is not State.SHUTTING_NULL, replica
    if replica.goal is Goal.REMOVE:
        assert replica.state in DRAINING | BROKEN, replica
    if replica.is_retried:
        assert replica.goal.role is not None, replica


def check_prefixes(index: PrefixIndex) -> None:
    """Assert that the counts of holders match the entries."""
    assert len(index._holders) <= index._max_hashes
    held = Counter(holder for each in index._holders.values() for holder in each)
    assert all(holder.num_held == number for holder, number in held.items())


def check_queue(queue: RequestQueue) -> None:
    """Assert that the order and the sums match the waiting requests."""
    by_model: dict[str, Waiting] = {}
    for each in queue:
        by_model.setdefault(each.ask.model, Waiting()).add(each)
    assert by_model == queue.by_model
    assert queue._sorted.keys() == by_model.keys()
    assert all(each == sorted(each) for each in queue._sorted.values())
    assert len(queue) == sum(each.requests for each in by_model.values())


def check_overload(overload: Overload) -> None:
    """Assert that locked replicas are full."""
    assert overload.locked <= set(overload.full)


def check_table(table: LoadTable) -> None:
    """Assert that the table's sums match a new sum over all replicas."""
    fleet = table._fleet
    assert not fleet.changed
    totals: dict[frozenset[str], Totals] = {}
    for replica in fleet:
        part = table._part(replica)
        assert (replica.models, part) == table._parts[replica.replica_id], replica
        totals.setdefault(replica.models, Totals()).move(NOTHING, part)
    assert totals == table._totals
    assert table._parts.keys() == {each.replica_id for each in fleet}
