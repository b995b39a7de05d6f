"""The connector, with stores that fail as they are told from outside: for drills on real engines.

Name this module as `kv_connector_module_path`, and in `KVPOOL_FAULTS` a directory in which a
`FaultControl` says how. Every store that is opened in a process that imports it is a faulty one.
"""

from functools import cache
from pathlib import Path

from tests.support.faults import ControlledFaults, FaultyStore
from tests.support.store_hooks import wrap_stores
from vllm_kvpool.config import environment
from vllm_kvpool.connector import KVPoolConnector
from vllm_kvpool.storage.base import Store

__all__ = ["KVPoolConnector"]

DIRECTORY_ENV = "KVPOOL_FAULTS"


@cache
def _faults() -> ControlledFaults:
    return ControlledFaults(Path(environment()[DIRECTORY_ENV]))


def _spoil(store: Store) -> Store:
    _faults().begin("", "open", [""])
    return FaultyStore(store, faults=_faults())


wrap_stores(_spoil)
