"""`mooncake://host:port`: cells in the memory of a Mooncake Store cluster.

One native client and its registered memory. Any thread may call. Calls release the GIL and may
block: a master that stopped answering holds one for `MC_RPC_TIMEOUT_MS` or more, so lanes have the
deadlines. Native calls are bounded in keys and bytes, as thousands of segments in one call hang.
Memory that a process gave with `segment=` leaves the pool with it; its own puts fill it first.

Over `ascend`, and over plain TCP by a client that gives memory, the process's shared transfer
engine is used. A3's fabric memory (`fabric`) has neither that nor registered memory.
"""

import logging
import re
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Protocol, TypeVar

from vllm_kvpool.errors import ConfigError, StoreError, StoreUnreachable
from vllm_kvpool.storage.base import Buffer, Capabilities, ChunkRef, GetOutcome, PutOutcome, Store
from vllm_kvpool.storage.mooncake_engine import METADATA, SharedEngine, shared_engine
from vllm_kvpool.storage.mooncake_transfers import (
    EngineReads,
    GetClient,
    PutClient,
    PutSessions,
)
from vllm_kvpool.storage.mooncake_wheel import advice, installed_wheels, transport

logger = logging.getLogger(__name__)

Outcome = TypeVar("Outcome", PutOutcome, GetOutcome)

PROTOCOLS: Final = (
    *("tcp", "rdma", "ascend", "barex", "cxl", "efa", "hip", "maca", "musa"),
    *("nvlink", "nvlink_intra", "nvmeof", "ubshmem"),
)
DEVICE_PROTOCOLS: Final = ("ascend",)  # whose threads and memory belong to the device

PROBE_TIMEOUT_S = 3.0
# The header of an RPC (magic number, version, two kinds, number, function, two lengths) for a
# function that does not exist, which a master answers with an error.
QUESTION = struct.pack("<BBBBIIII", 21, 0, 0, 0, 1, 0, 0, 0)
MAX_BATCH_KEYS = 256
MAX_BATCH_BYTES = 64 << 20
MAX_EXISTS_KEYS = 4096
MAX_REMOVE_KEYS = 4096

# The client reads these from the environment only. Its own 20 attempts of 30 s to connect hold the
# GIL, and the guard retries anyway. A call to a master that does not answer, and a get from a peer
# that was silent before, should end before the guard leaves them behind. A get from a peer that
# falls silent later takes up to 20 s. A put waits so long for each of up to 8 objects.
ENVIRONMENT: Final = {
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",
    "MC_RPC_TIMEOUT_MS": "5000",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "5",
}

# Mooncake's ErrorCode.
OK = 0
EXISTS = 1
NO_ROOM = -200
INVALID_PARAMS = -600
NOT_READY = -703
NOT_FOUND = -704
ALREADY_EXISTS = -705
TRANSFER_FAILED = -800
RPC_CODES = range(-999, -899)  # the master was not reached

_REGEX_SYNTAX = re.compile(r"[\\^$.*+?()\[\]{}|]")

CAPABILITIES = Capabilities(
    name="mooncake",
    durable=True,
    remote=True,
    parallel_gets=1,  # over TCP two at a time are slower than one
    parallel_puts=1,
)


@dataclass(frozen=True, slots=True)
class MooncakeOptions:
    """The arguments of `setup`, from url.py."""

    master_host: str
    master_port: int
    protocol: str
    device: str  # RDMA device names, comma-separated; "" lets Mooncake choose
    metadata: str
    segment_bytes: int
    local_buffer_bytes: int
    local_hostname: str  # where others reach this process; "" for the address towards the master
    fabric: bool = False  # Ascend A3's fabric memory

    @property
    def master_address(self) -> str:
        """`host:port` of the master; an IPv6 host is in brackets."""
        host = f"[{self.master_host}]" if ":" in self.master_host else self.master_host
        return f"{host}:{self.master_port}"


class Native(PutClient, GetClient, Protocol):
    """The part of the wheel's `MooncakeDistributedStore` that is used here."""

    def setup(
        self,
        local_hostname: str,
        metadata_server: str,
        global_segment_size: int,
        local_buffer_size: int,
        protocol: str,
        rdma_devices: str,
        master_server_addr: str,
        engine: object = None,
    ) -> int:
        """Connect to the cluster and return 0 or a negative error code; sizes are in bytes."""

    def register_buffer(self, address: int, nbytes: int) -> int:
        """Register memory for transfers and return 0 or a negative error code."""

    def unregister_buffer(self, address: int) -> int:
        """Unregister memory and return 0 or a negative error code."""

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        """Return for each key 1 (stored), 0 (absent) or a negative error code."""

    def get_size(self, key: str) -> int:
        """Return the bytes of an object, or a negative error code."""

    def get_hostname(self) -> str:
        """Return the `host:port` under which the cluster knows this client."""

    def batch_remove(self, keys: list[str], force: bool) -> list[int]:
        """Return for each key 0 or a negative error code; `force` removes leased objects too."""

    def remove_by_regex(self, pattern: str, force: bool) -> int:
        """Remove the keys that match; return their number or a negative error code."""

    def close(self) -> int:
        """Leave the cluster; any later call crashes the process."""


def import_wheel() -> Any:
    """Import the wheel's module `mooncake.store`, which has no types.

    ConfigError says what to install if the wheel or a library is missing.
    """
    try:
        import mooncake.store
    except ImportError as error:
        raise ConfigError(advice(error, installed_wheels())) from error
    return mooncake.store


def probe_master(options: MooncakeOptions) -> str:
    """Check that a master answers; this host's address towards it.

    `setup` retries for minutes and holds the GIL: if a master accepts connections and never
    answers, all threads would stand still.
    """
    address = (options.master_host, options.master_port)
    try:
        with socket.create_connection(address, timeout=PROBE_TIMEOUT_S) as connection:
            host = connection.getsockname()[0]
            connection.sendall(QUESTION)
            connection.recv(1)  # an answer, or the end of the connection
    except OSError as error:
        raise StoreUnreachable(
            f"no Mooncake master at {options.master_address}: {error} (waited for up to "
            f"{PROBE_TIMEOUT_S:g} s); start it (mooncake_master --rpc_port={options.master_port}) "
            "or correct the address in the store url"
        ) from error
    return str(host)


def cut_batches(
    keys: Sequence[str],
    sizes: Sequence[int],
    max_keys: int,
    max_bytes: int,
    pins: Sequence[int] = (),
) -> Iterator[slice]:
    """Cut a call into bounded runs without a repeated key, and with one value of `pins` each.

    Mooncake merges a repeated key and fills only one of its buffers. A single buffer may exceed
    `max_bytes`.
    """
    start = run_bytes = 0
    seen: set[str] = set()
    for index, (key, nbytes) in enumerate(zip(keys, sizes, strict=True)):
        full = len(seen) == max_keys or run_bytes + nbytes > max_bytes
        pins_differ = bool(pins) and pins[index] != pins[start]
        if seen and (full or key in seen or pins_differ):
            yield slice(start, index)
            start, run_bytes = index, 0
            seen.clear()
        seen.add(key)
        run_bytes += nbytes
    if seen:
        yield slice(start, len(keys))


def cut_keys(keys: Sequence[str], max_keys: int) -> Iterator[list[str]]:
    """Yield `keys` in order, in lists of at most `max_keys`."""
    for start in range(0, len(keys), max_keys):
        yield list(keys[start : start + max_keys])


def all_lost(codes: Sequence[int]) -> bool:
    """Return True if the master was not reached for any key of a native call."""
    return bool(codes) and all(code in RPC_CODES for code in codes)


def checked(codes: list[int], num_keys: int) -> list[int]:
    """Raise StoreError unless there is a code for each key.

    A client that is not set up returns none.
    """
    if len(codes) != num_keys:
        raise StoreError(f"Mooncake gave {len(codes)} results for {num_keys} keys")
    return codes


def set_up(
    native: Native,
    options: MooncakeOptions,
    own_host: str,
    engine: SharedEngine | None,
    *,
    segment: bool,
) -> int:
    """Connect a native client, on a shared engine if one is given; its return code."""
    device_only = options.protocol in DEVICE_PROTOCOLS
    name, extra = own_host, {}
    if engine is not None:
        shared = engine.open(own_host if device_only else bare_host(own_host))
        name = f"{bare_host(own_host)}:{shared.get_rpc_port()}"
        extra = {"engine": shared.get_engine()}
    # A client without a segment of its own should take no memory of the card.
    needs_buffer = not options.fabric and (segment or not device_only)
    return native.setup(
        name,
        options.metadata,
        options.segment_bytes if segment else 0,
        options.local_buffer_bytes if needs_buffer else 0,
        options.protocol,
        options.device,
        options.master_address,
        **extra,
    )


def gets_sleep(native: Native, options: MooncakeOptions) -> bool:
    """Return True if gets go by `mooncake_transfers.py`; wheels before 0.3.13 have no sessions.

    Protocols other than TCP are untried. With a metadata server peers have names that an engine
    without one does not know.
    """
    is_plain_tcp = options.protocol == "tcp" and options.metadata == METADATA
    return hasattr(native, "batch_put_session_start") and is_plain_tcp


def bare_host(address: str) -> str:
    """Return an address without its port; IPv6 gets brackets."""
    if address.count(":") > 1 and not address.startswith("["):
        return f"[{address}]"
    return address if address.endswith("]") else address.rpartition(":")[0] or address


# Other codes are FAILED. Mooncake also answers 0 for a key that existed.
PUT_OUTCOMES: Final = {
    OK: PutOutcome.STORED,
    ALREADY_EXISTS: PutOutcome.EXISTED,
    NO_ROOM: PutOutcome.FULL,
}


def has_groups(wheel: Any) -> bool:
    """Return True if the cluster evicts the cells of a chunk together.

    Wheels before 0.3.12 have no groups; the Ascend documentation pins one.
    """
    return hasattr(wheel.ReplicateConfig(), "group_ids")


def capabilities() -> Capabilities:
    """Return a cluster's capabilities with the installed wheel. Raises ConfigError without one."""
    return replace(CAPABILITIES, loses_cells=not has_groups(import_wheel()))


class MooncakeStore(Store):
    """A client of one cluster."""

    capabilities = CAPABILITIES

    def __init__(self, options: MooncakeOptions, *, segment: bool) -> None:
        self._wheel = import_wheel()
        self.capabilities = capabilities()
        self._address = options.master_address
        own_address = probe_master(options)
        self._is_fabric = options.fabric
        self._engine: SharedEngine | None = None
        if options.protocol in DEVICE_PROTOCOLS and not options.fabric:
            self._engine = shared_engine(options.protocol)
        native: Native = self._wheel.MooncakeDistributedStore()
        own_host = options.local_hostname or own_address
        gives_memory = segment and options.segment_bytes > 0
        reads = shared_engine(options.protocol) if gets_sleep(native, options) else None
        engine = reads if gives_memory and reads is not None else self._engine
        code = set_up(native, options, own_host, engine, segment=segment)
        if code != OK:
            raise StoreUnreachable(
                f"Mooncake's setup with the master at {self._address} failed with {code}; check "
                f"protocol={options.protocol}, device={options.device}, "
                f"metadata= and that {options.segment_bytes} bytes are free"
            )
        self._has_groups = not self.capabilities.loses_cells
        used, problem = transport(options.protocol, options.device)
        groups = "cells of a chunk are evicted as a group"
        logger.info(
            "kvpool: Mooncake at %s: transport %s; %s",
            self._address,
            used,
            groups if self._has_groups else "this wheel has no groups",
        )
        if problem:
            logger.warning(
                "kvpool: Mooncake at %s: protocol=%s: %s", self._address, options.protocol, problem
            )
        action = getattr(self._wheel, "SoftPinAction", None)  # older wheels have none
        self._soft_pin: object = None if action is None else action.ENABLE
        if action is None:
            logger.warning(
                "kvpool: Mooncake at %s: this wheel cannot pin objects: pin_s has no effect there",
                self._address,
            )
        self._own_segment = native.get_hostname() if gives_memory else ""
        self._put_from, self._get_into = native.batch_put_from, native.batch_get_into
        if reads is not None:
            own_session = reads.session if gives_memory else ""
            # Opened by the first get: a scheduler's client has none.
            opened = partial(reads.open, bare_host(own_host))
            self._get_into = EngineReads(native, opened, own_session=own_session).get
            if not gives_memory:
                self._put_from = PutSessions(native).put
        self._native = native
        self._registered: set[int] = set()

    def register(self, buffer: Buffer) -> None:
        """Register memory with the cluster's transfers; StoreError if the wheel refuses."""
        if self._engine is not None:
            self._engine.register(buffer.address, buffer.nbytes)
        elif not self._is_fabric:
            code = self._native.register_buffer(buffer.address, buffer.nbytes)
            if code != OK:
                raise StoreError(
                    f"Mooncake cannot register {buffer.nbytes} bytes (code {code}); for RDMA check "
                    "`ulimit -l`, or lower staging_bytes"
                )
        self._registered.add(buffer.address)

    def unregister(self, buffer: Buffer) -> None:
        """Unregister memory that `register` was called with."""
        self._registered.remove(buffer.address)
        self._unregister(buffer.address)

    def _unregister(self, address: int) -> None:
        if self._engine is not None:
            self._engine.unregister(address)
        elif not self._is_fabric and (code := self._native.unregister_buffer(address)) != OK:
            logger.warning("Mooncake cannot unregister %#x: code %d", address, code)

    def exists(self, keys: Sequence[str]) -> list[bool]:
        """Ask the master for each key; StoreUnreachable if it does not answer."""
        found: list[bool] = []
        for part in cut_keys(keys, MAX_EXISTS_KEYS):
            codes = checked(self._native.batch_is_exist(part), len(part))
            if min(codes) < 0:  # an error, such as -900 from a dead master
                raise StoreUnreachable(
                    f"the Mooncake master at {self._address} does not answer (code {min(codes)})"
                )
            found += [code == EXISTS for code in codes]
        return found

    def put(
        self, keys: Sequence[str], buffers: Sequence[Buffer], chunks: Sequence[ChunkRef]
    ) -> list[PutOutcome]:
        """Put in batches, into this host's segment first; later batches fail once one is lost."""
        assert len(keys) == len(buffers) == len(chunks), (len(keys), len(buffers), len(chunks))
        addresses = [buffer.address for buffer in buffers]
        sizes = [buffer.nbytes for buffer in buffers]
        outcomes: list[PutOutcome] = []
        pins = [chunk.retention.pinned_until_ns for chunk in chunks]
        for part in cut_batches(keys, sizes, MAX_BATCH_KEYS, MAX_BATCH_BYTES, pins):
            config = self._wheel.ReplicateConfig()
            config.preferred_segment = self._own_segment
            if self._has_groups:
                config.group_ids = [chunk.id for chunk in chunks[part]]
            if pins[part.start] and self._soft_pin is not None:
                config.soft_pin_action = self._soft_pin
                left_ns = pins[part.start] - time.time_ns()
                config.soft_pin_ttl_ms = max(1, left_ns // 1_000_000)
            run = list(keys[part])
            codes = checked(self._put_from(run, addresses[part], sizes[part], config), len(run))
            if all_lost(codes):
                return self._give_up(outcomes, PutOutcome.FAILED, len(keys))
            outcomes += [PUT_OUTCOMES.get(code, PutOutcome.FAILED) for code in codes]
        return outcomes

    def get(self, keys: Sequence[str], buffers: Sequence[Buffer]) -> list[GetOutcome]:
        """Get in batches; the remaining keys fail once a whole batch is lost."""
        assert len(keys) == len(buffers), (len(keys), len(buffers))
        addresses = [buffer.address for buffer in buffers]
        sizes = [buffer.nbytes for buffer in buffers]
        outcomes: list[GetOutcome] = []
        for part in cut_batches(keys, sizes, MAX_BATCH_KEYS, MAX_BATCH_BYTES):
            run = list(keys[part])
            codes = checked(self._get_into(run, addresses[part], sizes[part]), len(run))
            if all_lost(codes):
                return self._give_up(outcomes, GetOutcome.FAILED, len(keys))
            outcomes += map(self._get_outcome, run, sizes[part], codes)
        return outcomes

    def remove(self, keys: Sequence[str]) -> int:
        """Remove cells, leased ones too; StoreUnreachable if the master does not answer."""
        num_removed = 0
        # Forced, as `exists` and reads hold leases for seconds.
        for part in cut_keys(list(dict.fromkeys(keys)), MAX_REMOVE_KEYS):
            codes = checked(self._native.batch_remove(part, True), len(part))
            if all_lost(codes):
                raise StoreUnreachable(f"the Mooncake master at {self._address} does not answer")
            num_removed += codes.count(OK)
        return num_removed

    def remove_namespace(self, namespace: str) -> int:
        """Remove a namespace's cells by a pattern; StoreUnreachable if the master fails."""
        pattern = "^" + _REGEX_SYNTAX.sub(r"\\\g<0>", namespace) + "@"
        count = self._native.remove_by_regex(pattern, True)
        if count < 0:
            raise StoreUnreachable(f"the Mooncake master at {self._address} failed with {count}")
        return count

    def close(self) -> None:
        """Unregister all memory and leave the cluster; no call may be under way or follow."""
        # A native call that is under way, or comes later, would be a segmentation fault.
        for address in self._registered:  # memory left registered can crash the exit
            self._unregister(address)
        self._native.close()

    def _get_outcome(self, key: str, nbytes: int, code: int) -> GetOutcome:
        if code >= 0:
            return GetOutcome.OK if code == nbytes else GetOutcome.WRONG_SIZE
        if code in (NOT_FOUND, NOT_READY):
            return GetOutcome.MISSING
        if code in (INVALID_PARAMS, TRANSFER_FAILED):
            # The sizes differ or the transfer failed; only the master can tell which.
            object_bytes = self._native.get_size(key)
            if object_bytes >= 0 and object_bytes != nbytes:
                return GetOutcome.WRONG_SIZE
        return GetOutcome.FAILED

    def _give_up(self, outcomes: list[Outcome], failed: Outcome, num_keys: int) -> list[Outcome]:
        """Return the outcomes so far and FAILED for the rest.

        Raises StoreUnreachable if there are none.
        """
        if not outcomes:
            raise StoreUnreachable(f"the Mooncake master at {self._address} does not answer")
        return outcomes + [failed] * (num_keys - len(outcomes))
