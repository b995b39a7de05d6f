"""The effective configuration, for the engine's first log line and `kvpool doctor`."""

import os
from collections.abc import Iterator
from enum import Enum

from vllm_kvpool.config import KVPoolConfig, KVRole, Verify, WritePolicy
from vllm_kvpool.storage.file.file_system import file_system_of
from vllm_kvpool.storage.mooncake import MooncakeOptions
from vllm_kvpool.storage.mooncake_wheel import transport
from vllm_kvpool.storage.tiers import TierSpecs
from vllm_kvpool.storage.url import FileOptions, StoreSpec


class StoreState(Enum):
    """The state of a store after the first attempt to open it; in words where it is not usual."""

    OPEN = ""
    READ_ONLY = "read-only: nothing is saved there"
    AWAY = "away: it is tried again"


def host_in_words(nbytes: int) -> str:
    """Return the host tier for the first log line."""
    return f"host ({nbytes >> 20} MiB for each worker)"


def store_in_words(name: str, spec: StoreSpec, state: StoreState) -> str:
    """Return a store for the first log line: its name, its transport, what keeps it from work."""
    words = []
    if isinstance(spec.options, MooncakeOptions):
        used, problem = transport(spec.options.protocol, spec.options.device)
        # The store itself logs the problem when it is open.
        words.append(f"{used}, not as its URL says: {spec.options.protocol}" if problem else used)
    if state.value:
        words.append(state.value)
    return f"{name} ({'; '.join(words)})" if words else name


def work_in_words(config: KVPoolConfig, role: KVRole, *, loads: bool) -> str:
    """Return what an engine loads and saves, and how much of it is checked."""
    if role is KVRole.CONSUMER and not config.save_decode:
        saves = "nothing (kv_consumer without save_decode)"
    else:
        saves = "prompts and generated tokens" if config.save_decode else "prompts"
    is_whole = config.verify is Verify.CHECKSUM or config.encrypts_cells
    hits = "hits" if is_whole else "hits, of which lengths alone are checked (verify=length)"
    return f"loads {hits if loads else 'nothing'}, saves {saves}"


def without_effect(config: KVPoolConfig, specs: TierSpecs) -> Iterator[str]:
    """Yield a sentence for each option that is set and has no effect."""
    has_host, num_stores = specs.host.nbytes > 0, len(specs.stores)
    if config.write_policy is WritePolicy.BACK and has_host and not num_stores:
        yield "write_policy=back has no effect: there is no store behind host:// to write back to"
    if config.write_policy is WritePolicy.BACK and not has_host:
        yield "write_policy=back has no effect: without host://, every cell goes to stores at once"
    if config.verify is Verify.LENGTH and config.encrypts_cells:
        yield "verify=length has no effect: encrypted cells are checked whole"


def without_shared_store(specs: TierSpecs, num_hosts: int) -> Iterator[str]:
    """Yield a sentence if an engine's workers run on several hosts without a common store."""
    if num_hosts > 1 and specs.stores and all(map(_is_of_one_host, specs.stores)):
        urls = " and ".join(each.url for each in specs.stores)
        yield (
            f"the engine's workers run on {num_hosts} hosts, and each has its own files in {urls}"
            ": lookups see this host's cells alone, so nothing is found there; add one that all "
            "hosts reach: mooncake://, s3://, or file:// on a file system that all of them mount"
        )


def _is_of_one_host(spec: StoreSpec) -> bool:
    """Return True if a store's directory is, or will be made, on a local file system."""
    if not isinstance(spec.options, FileOptions):
        return False
    path = spec.options.path
    while not os.path.isdir(path) and path != os.path.dirname(path):
        path = os.path.dirname(path)
    try:
        return file_system_of(path).is_local
    except OSError:  # opening the store says what is wrong with it
        return False
