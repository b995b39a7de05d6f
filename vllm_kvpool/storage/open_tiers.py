"""Open stores of an engine's tiers, in the scheduler's process and in each worker's.

A store that cannot be reached is opened in the background (`guarded.py`), unless its URL says
`required=1`. Until it is open, lookups miss and saves are dropped.
"""

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_kvpool.config import KVPoolConfig, set_where_unset
from vllm_kvpool.errors import ConfigError, StoreError
from vllm_kvpool.storage.backends import capabilities_of, open_store
from vllm_kvpool.storage.base import Buffer, Store
from vllm_kvpool.storage.guarded import OPEN_WAIT_S, CallTimeouts, GuardedStore
from vllm_kvpool.storage.start_notes import StoreState, host_in_words, store_in_words
from vllm_kvpool.storage.tiers import TierSpecs
from vllm_kvpool.storage.url import StoreSpec, environment_for, uses_device

if TYPE_CHECKING:
    from vllm_kvpool.storage.contents.encryption import EncryptedCells

logger = logging.getLogger(__name__)

REQUIRED_WAIT_S = 120.0  # Mooncake tries for 90 s


@dataclass(frozen=True, slots=True)
class OpenTiers:
    """The open stores, nearest first: their names in metrics, and the threads of their lanes."""

    stores: tuple[GuardedStore, ...]
    names: tuple[str, ...]
    get_lanes: tuple[int, ...]
    put_lanes: tuple[int, ...]

    def close(self, registered: Buffer | None = None) -> None:
        """Close every store, after taking back the memory that was registered with it."""
        for store in self.stores:
            try:
                if registered is not None:
                    store.unregister(registered)
                store.close()
            except StoreError as error:
                logger.warning("kvpool: closing %s: %s", store.capabilities.name, error)
                store.leave_open()

    def leave_open(self) -> None:
        """Leave the stores open until the process ends: a call has not returned."""
        logger.warning(
            "kvpool: a store call has not returned; the stores and the staging memory stay open "
            "until the process exits"
        )
        for store in self.stores:
            store.leave_open()


def open_tiers(
    specs: Sequence[StoreSpec],
    timeouts: CallTimeouts,
    *,
    segment: bool,
    enter_device: Callable[[], None] = lambda: None,
) -> OpenTiers:
    """Open the stores; ConfigError if a required one cannot be reached.

    `segment`: whether to give memory to a pool that is made of its members' memory. Threads that
    work for a store that uses a device call `enter_device` first.
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
            on_start = enter_device if uses_device(spec) else lambda: None
            store = GuardedStore(opening, each, name, timeouts, wait_s, on_start=on_start)
            undo.callback(store.close)
            stores.append(store)
            if not store.opened and spec.required:
                raise ConfigError(f"{store.trouble}; the store is required (required=1)")
            if not store.opened:
                logger.warning("kvpool: %s; it is tried again in the background", store.trouble)
        undo.pop_all()
    if specs and not any(store.opened for store in stores):
        logger.warning("kvpool: no store can be reached; nothing is loaded or saved until one can")
    return OpenTiers(tuple(stores), names, tuple(gets), tuple(puts))


def tier_names(kinds: Sequence[str]) -> tuple[str, ...]:
    """Return a unique name for each tier.

    A name is the kind of the store, numbered from the second of a kind on.
    """
    seen: dict[str, int] = {}
    names = []
    for kind in kinds:
        seen[kind] = seen.get(kind, 0) + 1
        names.append(kind if seen[kind] == 1 else f"{kind}{seen[kind]}")
    return tuple(names)


def encrypted_cells(config: KVPoolConfig, stores: Sequence[Store]) -> "EncryptedCells | None":
    """Return the encryption of cells; None if cells are not encrypted. Raises ConfigError."""
    if not config.encrypts_cells:
        return None
    try:
        from vllm_kvpool.storage.contents.encryption import CellCipher, EncryptedCells, read_keys
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"encryption of cells needs cryptography ({error}); run: "
            "pip install 'vllm-kvpool[encryption]'"
        ) from error
    return EncryptedCells(CellCipher(read_keys(Path(config.encryption_key_file))), stores)


def _state_of(store: GuardedStore) -> StoreState:
    if not store.opened:
        return StoreState.AWAY
    return StoreState.OPEN if store.writable else StoreState.READ_ONLY


def tiers_in_words(specs: TierSpecs, tiers: OpenTiers) -> list[str]:
    """Return each tier for the engine's first log line, nearest first."""
    host = [host_in_words(specs.host.nbytes)] if specs.host.nbytes else []
    each = zip(tiers.names, specs.stores, tiers.stores, strict=True)
    return [*host, *(store_in_words(name, spec, _state_of(store)) for name, spec, store in each)]
