"""Requests bound to a replica that still loads, and who may steal them (pure).

The honest form of BlitzScale's zigzag scaling: with stock engines a loading replica cannot run its
first layers, but it can be given a bounded queue, which it works off the moment it is loaded, while
replicas that serve already (`OLD_PREFILL`) take from it whatever they have room for, before they
take what has come later. So no bound request ever waits for the loading alone, and none is passed
by the common queue.
"""

from vllm_kvpool.router.control.fleet import Fleet, Replica
from vllm_kvpool.router.control.requests import Request
from vllm_kvpool.router.control.states import HAS_BOUND, NEW, OLD, Cause, State

FIRST_LIMIT = 4
LEAST_LIMIT = 2
LIMIT_FALLS_EVERY_S = 0.2
"""The longer it loads, the fewer it is given: what it is bound to should not wait long."""

_PREFILL = frozenset({State.PREFILL})


def limit(replica: Replica, now: float) -> int:
    """How many requests a loading replica may be bound to."""
    fallen = int((now - replica.since) / LIMIT_FALLS_EVERY_S)
    return max(LEAST_LIMIT, FIRST_LIMIT - fallen)


def choose_new(fleet: Fleet, now: float, model: str = "") -> Replica | None:
    """The loading replica that one more request may be bound to, the emptiest first."""
    open_ones = [
        each
        for each in fleet.in_states(NEW)
        if each.serves(model) and len(each.bound) < limit(each, now)
    ]
    return min(open_ones, key=lambda each: (len(each.bound), each.replica_id), default=None)


def next_bound(fleet: Fleet) -> tuple[Replica, Request] | None:
    """The bound request that an old replica may steal: whoever would go first in the queue."""
    heads = [(each, each.bound[0]) for each in fleet.in_states(HAS_BOUND) if each.bound]
    return min(heads, key=lambda head: head[1].order, default=None)


def pair(fleet: Fleet, now: float) -> None:
    """As many old replicas as there are new ones, where there are so many."""
    wanted, old = len(fleet.in_states(HAS_BOUND)), fleet.in_states(OLD)
    for replica in fleet.in_states(_PREFILL)[: max(0, wanted - len(old))]:
        fleet.move(replica, Cause.PAIR, "a new replica is bound to requests", now)
    for replica in old[wanted:]:
        fleet.move(replica, Cause.UNPAIR, "no new replica is left", now)
