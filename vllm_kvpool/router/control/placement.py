"""Which replica computes a prompt, and which one decodes (pure).

A prompt goes where it will be computed soonest: what the replica has been given already and what
is not in its own cache, counted in tokens. A request goes to the decoder that has most of its
prompt, of those with a bounded load (at most LOAD_BOUND times the mean and LOAD_SLACK requests
more, as in consistent hashing with bounded loads); else to the one with the most room left relative
to its size.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from vllm_kvpool.router.control.fleet import Replica
from vllm_kvpool.router.control.requests import Request

DEFAULT_BLOCK_SIZE = 16
LOAD_BOUND, LOAD_SLACK = 1.25, 4.0
NONE_HELD: Mapping[Replica, int] = {}
MISSING_STEPS = 8
"""Eighths of a prompt: smaller differences in what decoders have of it do not count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """How much a replica is given at a time."""

    prefill_tokens: int = 16_384
    """Uncached prompt tokens in flight at one replica, unless it is a single prompt."""
    prefill_requests: int = 16
    permits: int = 16
    """Requests being handed over to one decoder, until each has brought its first token."""
    decode_requests: int = 256
    headroom: float = 0.95
    """Share of a decoder's blocks that may be committed."""


class PrefillChoice(NamedTuple):
    replica: Replica
    uncached_tokens: int


def blocks_for(tokens: int, replica: Replica) -> int:
    """Blocks that so many tokens take at a replica."""
    return -(-tokens // (replica.sample.block_size or DEFAULT_BLOCK_SIZE))


def choose_prefill(
    request: Request,
    replicas: Iterable[Replica],
    budgets: Budgets,
    now: float,
    held: Mapping[Replica, int] = NONE_HELD,
) -> PrefillChoice | None:
    """Where the prompt is computed soonest; None while every replica has enough to do.

    `held`: tokens of the prompt that replicas have.
    """
    best: tuple[tuple[bool, int, str], PrefillChoice] | None = None
    for replica in replicas:
        load = replica.prefill_tokens
        if (
            not replica.serves(request.ask.model)
            or not replica.is_open(now)
            or len(replica.prefills) >= budgets.prefill_requests
        ):
            continue
        uncached = max(1, request.ask.prompt_tokens - held.get(replica, 0))
        if load and load + uncached > budgets.prefill_tokens:
            continue
        # Who has failed it is asked again only if nobody else is left.
        rank = (replica.replica_id in request.avoid, load + uncached, replica.replica_id)
        if best is None or rank < best[0]:
            best = rank, PrefillChoice(replica, uncached)
    return best[1] if best else None


def fits(replica: Replica, blocks: int, budgets: Budgets) -> bool:
    """Whether a decoder has room for so many blocks more.

    One that has nothing takes whatever fits into it at all: what is larger than that is for the
    engine to refuse.
    """
    if not replica.stays:
        return True
    total = replica.sample.total_blocks
    return total == 0 or replica.used_blocks + blocks <= total * budgets.headroom


def choose_decode(
    request: Request,
    tokens: int,
    gates: Iterable[Replica],
    budgets: Budgets,
    held: Mapping[Replica, int] = NONE_HELD,
    mean_requests: float = 0.0,
) -> Replica | None:
    """The gate for so many tokens, answer included; None if all are too full.

    `held`: tokens of the prompt that replicas have. `mean_requests`: of all decoders.
    """
    ask = request.ask
    bound = LOAD_SLACK + LOAD_BOUND * mean_requests
    best: tuple[tuple[bool, int, float, int, str], Replica] | None = None
    for replica in gates:
        blocks = blocks_for(tokens, replica)
        if not fits(replica, blocks, budgets):
            continue
        missing, known = MISSING_STEPS, held.get(replica, 0)
        if known and len(replica.stays) < bound:
            missing = MISSING_STEPS * max(1, ask.prompt_tokens - known) // ask.prompt_tokens
        rank = (
            *(replica.replica_id in request.avoid, missing, _share(replica, blocks)),
            *(len(replica.stays) + len(replica.prefills), replica.replica_id),
        )
        if best is None or rank < best[0]:
            best = rank, replica
    return best[1] if best else None


def choose_to_clear(tokens: int, gates: Collection[Replica], budgets: Budgets) -> Replica:
    """Who is to get nothing else until so many tokens, too many for all of them now, fit."""
    large_enough = [
        each
        for each in gates
        if blocks_for(tokens, each) <= each.sample.total_blocks * budgets.headroom
    ]
    return min(large_enough or gates, key=lambda each: (_share(each, 0), each.replica_id))


def _share(replica: Replica, blocks: int) -> float:
    """Of its blocks, in use with so many more."""
    return (replica.used_blocks + blocks) / (replica.sample.total_blocks or 1 << 30)
