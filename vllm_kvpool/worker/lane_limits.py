"""Sizes of batches, slabs and lanes, by device and stores (pure)."""

import os
from dataclasses import replace

from vllm_kvpool.staging.arena import slot_bytes
from vllm_kvpool.staging.devices import HOST_DEVICE, Device
from vllm_kvpool.storage.open_tiers import OpenTiers
from vllm_kvpool.transfer.engine import lane_names
from vllm_kvpool.transfer.graph import LaneLimits
from vllm_kvpool.transfer.ops import COPIES, HOST, REPLICA, LaneName, OpKind
from vllm_kvpool.transfer.planner import Planner

BATCH_BYTES = 16 << 20  # of a store call
BATCH_CELLS = 64
SLABS_IN_FLIGHT = 8  # at least: a slab waits for all its slots
COPY_SHARE = 8  # a copy's batch is an eighth of the slots at most
COPY_CELL_BYTES = 128 << 10  # of smaller cells a copy's batch has fewer bytes
BUDGET_BATCHES = 4  # bytes in flight in a lane, in batches
REPLICA_ASKS = 256  # slabs that a rank waits for from others
REPLICA_BUDGETS = 2  # so that it asks before a lender fetches them for itself
SPARE_SHARE = 4  # a quarter of a worker's cores computes checksums
MAX_SEAL_THREADS = 4  # more than a link to a device brings


def copy_batch_bytes(device: Device, staging_bytes: int) -> int:
    """Return the largest size of a batch of gathers or scatters.

    Two batches have slots at once, beside those of gets and puts.
    """
    most_staged = max(HOST_DEVICE.copy_batch_bytes, staging_bytes // COPY_SHARE)
    return min(device.copy_batch_bytes, most_staged)


def with_slab_limits(
    planner: Planner, device: Device, staging_bytes: int, *, by_span: bool
) -> Planner:
    """Return the planner with slabs that a call of a store or a copy moves at once.

    The staging arena holds `SLABS_IN_FLIGHT` of them, or as many single cells. `by_span`: loads go
    layer by layer, so a slab has the layers of one span.
    """
    slots = staging_bytes // slot_bytes(planner.max_cell_bytes())
    return replace(
        planner,
        slab_cells=max(1, min(BATCH_CELLS, slots // SLABS_IN_FLIGHT)),
        slab_bytes=min(BATCH_BYTES, device.copy_batch_bytes),
        by_span=by_span,
    )


def spare_threads(device: Device, ranks: int) -> int:
    """Return the number of threads that may compute checksums at once.

    Each computes 12 GB/s without the GIL. On a CPU the model needs the cores; beside a device a
    worker has `SPARE_SHARE` of its part.
    """
    if device.is_host:
        return 1
    cores = len(os.sched_getaffinity(0)) // ranks
    return min(MAX_SEAL_THREADS, max(1, cores // SPARE_SHARE))


def lanes_of(
    tiers: OpenTiers,
    copy_bytes: int,
    copy_threads: int,
    seal_threads: int = 1,
    *,
    replicas: bool = False,
) -> dict[LaneName, tuple[int, LaneLimits]]:
    """Return the number of threads of each lane, and its limits.

    `copy_bytes`: most of a gather or scatter; `copy_threads`: as `Copier.num_threads`.
    `seal_threads`: those of seals and of checks, whose checksums take one core each.
    `replicas`: other ranks on this host hold the same KV. No thread waits for those.
    """
    lanes = {}
    for lane in lane_names(len(tiers.stores), replicas=replicas):
        threads, cells, nbytes, budget = 1, BATCH_CELLS, BATCH_BYTES, BUDGET_BATCHES * BATCH_BYTES
        if lane.tier == REPLICA:
            lanes[lane] = 0, LaneLimits(REPLICA_ASKS, 1, 1, REPLICA_BUDGETS * budget)
            continue
        elif lane.kind is OpKind.FENCE:
            cells = 1  # a plan waits for its own fence, not for those after it
        elif lane.kind in COPIES:
            threads, nbytes = copy_threads, copy_bytes
            cells = nbytes // COPY_CELL_BYTES
            # The last cell of a batch may go beyond its bytes, by a header at least.
            budget = max(budget, (threads + 2) * nbytes)
        elif lane.tier == HOST:
            threads, nbytes = seal_threads, HOST_DEVICE.copy_batch_bytes
            budget = max(budget, (threads + 2) * nbytes)
        elif lane.kind is OpKind.GET:
            threads = tiers.get_lanes[lane.tier]
        elif lane.kind is OpKind.PUT:
            threads = tiers.put_lanes[lane.tier]
            num_batches = tiers.stores[lane.tier].capabilities.batches_per_put
            cells, nbytes = num_batches * cells, num_batches * nbytes
        # A batch more than threads, so that none waits for the engine.
        lanes[lane] = threads, LaneLimits(threads + 1, cells, nbytes, budget)
    return lanes
