"""The configured stores as one side has them open, nearest first.

A store that cannot be reached is looked for in the background (`storage/guarded.py`), unless it is
required; until it is there lookups miss and saves are dropped. Opened and closed by one thread.
"""

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from vllm_kvpool.config import KVPoolConfig, set_where_unset
from vllm_kvpool.errors import ConfigError, StoreError
from vllm_kvpool.staging.arena import Arena
from vllm_kvpool.staging.devices import Device, HostDevice
from vllm_kvpool.storage.backends import capabilities_of, open_store
from vllm_kvpool.storage.guarded import OPEN_WAIT_S, GuardedStore, Patience
from vllm_kvpool.storage.tiers import tier_specs
from vllm_kvpool.storage.url import StoreSpec, check_capacity, environment_for, uses_device
from vllm_kvpool.transfer.context import tier_names
from vllm_kvpool.transfer.engine import lane_names
from vllm_kvpool.transfer.ops import REPLICA, LaneName, OpKind

logger = logging.getLogger(__name__)

REQUIRED_WAIT_S = 120.0  # Mooncake tries for 90 s
REPLICA_LANES = 2  # one copies while the other waits
HOST_DEVICE: Device = HostDevice()


@dataclass(frozen=True, slots=True)
class OpenTiers:
    """The stores, nearest first, and what they are called in metrics."""

    stores: tuple[GuardedStore, ...]
    names: tuple[str, ...]
    get_lanes: tuple[int, ...] = ()
    put_lanes: tuple[int, ...] = ()

    def close(self, arena: Arena | None = None) -> None:
        """Close every store, after taking back the memory that was registered with it."""
        for store in self.stores:
            try:
                if arena is not None:
                    store.unregister(arena.whole)
                store.close()
            except StoreError as error:
                logger.warning("kvpool: closing %s: %s", store.capabilities.name, error)
                store.leave()

    def leave(self) -> None:
        """Some call has not ended: the stores stay as they are, until the process ends."""
        logger.warning(
            "kvpool: a store call does not end; the stores and its memory stay open until exit"
        )
        for store in self.stores:
            store.leave()


def open_tiers(
    specs: Sequence[StoreSpec],
    patience: Patience,
    *,
    segment: bool,
    device: Device = HOST_DEVICE,
) -> OpenTiers:
    """Open the stores; one that cannot be reached is looked for later, unless it is required.

    `segment`: whether to give memory to a pool that is made of its members' memory. Threads that
    work for a store enter `device` if the store uses it.
    """
    known = [capabilities_of(spec) for spec in specs]
    names = tier_names([each.name for each in known])
    gets = [spec.get_lanes or each.parallel_gets for spec, each in zip(specs, known, strict=True)]
    puts = [spec.put_lanes or each.parallel_puts for spec, each in zip(specs, known, strict=True)]
    stores: list[GuardedStore] = []
    with contextlib.ExitStack() as undo:
        for spec, each, name in zip(specs, known, names, strict=True):
            set_where_unset(environment_for(spec))
            wait_s = REQUIRED_WAIT_S if spec.required else OPEN_WAIT_S
            opening = partial(open_store, spec, segment=segment)
            enter = device.enter_thread if uses_device(spec) else _enter_nothing
            store = GuardedStore(opening, each, name, patience, wait_s, on_start=enter)
            undo.callback(store.close)
            stores.append(store)
            if not store.opened and spec.required:
                raise ConfigError(f"{store.trouble}; the store is required (required=1)")
            if not store.opened:
                logger.warning(
                    "kvpool: %s; opening it is tried again in the background", store.trouble
                )
        undo.pop_all()
    if specs and not any(store.opened for store in stores):
        logger.warning("kvpool: no store can be reached; until one can, nothing is loaded or saved")
    return OpenTiers(tuple(stores), names, tuple(gets), tuple(puts))


def _enter_nothing() -> None:
    pass


def check_tiers(config: KVPoolConfig, cell_bytes: int) -> None:
    """ConfigError if a configured store could not hold one cell."""
    for spec in tier_specs(config).stores:
        check_capacity(spec, cell_bytes)


def lane_counts(tiers: OpenTiers, *, replicas: bool = False) -> dict[LaneName, int]:
    """How many threads each lane has; `replicas` as in `lane_names`."""
    counts = dict.fromkeys(lane_names(len(tiers.stores), replicas=replicas), 1)
    if replicas:
        counts[LaneName(OpKind.GET, REPLICA)] = REPLICA_LANES
    for tier, (gets, puts) in enumerate(zip(tiers.get_lanes, tiers.put_lanes, strict=True)):
        counts[LaneName(OpKind.GET, tier)] = gets
        counts[LaneName(OpKind.PUT, tier)] = puts
    return counts
