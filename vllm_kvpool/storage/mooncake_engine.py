"""The Mooncake transfer engine that a process shares, one for each protocol; thread-safe.

Over `ascend` an engine takes a card's ports and contexts, so all users in a process share one:
stores of several tiers, and vLLM-Ascend's own connectors (`use_engine_of`). The first user makes it
on its thread, which must have entered the device. It is never closed, as its other users are
unknown. Memory is registered with it once, however many stores use it; regions must not overlap.

Embeddings are written with it directly to another process's engine, over every protocol.
"""

import logging
import threading
from collections.abc import Callable
from typing import Any, Protocol, cast

from vllm_kvpool.config import set_meanwhile
from vllm_kvpool.errors import ConfigError, StoreError, StoreUnreachable
from vllm_kvpool.storage.mooncake_wheel import FORCE_TCP_NAME, advice, installed_wheels, transport

logger = logging.getLogger(__name__)

OK = 0
METADATA = "P2PHANDSHAKE"

# Without it an engine uses RDMA devices, where there are any, whatever its protocol; with it, and
# whatever its value, every engine made then uses TCP alone. Others of the process may want RDMA.
FORCE_TCP = {FORCE_TCP_NAME: "1"}

# Results of `transfer_submit_write`, `batch_transfer_async_read` and `transfer_check_status`.
REFUSED = 0
WRITTEN = 1
FAILED = -1


class NativeEngine(Protocol):
    """The part of the wheel's `TransferEngine` that is used here."""

    def initialize(self, hostname: str, metadata: str, protocol: str, device: str) -> int:
        """Start the engine and return 0 or an error code; an empty `device` means any."""

    def get_rpc_port(self) -> int:
        """Return the port on which other engines reach this one."""

    def get_engine(self) -> object:
        """Return the C++ engine, which a store's client can share."""

    def register_memory(self, address: int, nbytes: int) -> int:
        """Register memory for transfers and return 0 or an error code."""

    def unregister_memory(self, address: int) -> int:
        """Unregister memory and return 0 or an error code."""

    def send_probe(self, session: str) -> int:
        """Probe the engine at `session` (`host:port`) and return 0 or an error code."""

    def transfer_submit_write(self, session: str, source: int, target: int, nbytes: int) -> int:
        """Start a write; its number, or REFUSED. Blocks to connect to a new session."""

    def batch_transfer_async_read(
        self, session: str, targets: list[int], sources: list[int], sizes: list[int]
    ) -> int:
        """Start a read; its number, or REFUSED. Blocks to connect to a new session."""

    def transfer_check_status(self, number: int) -> int:
        """Return WRITTEN or FAILED if a transfer has ended, another value while it goes on.

        The number of a transfer that has ended is invalid.
        """


class SharedEngine:
    """The engine of one protocol, made by the first `open`."""

    def __init__(self, protocol: str, make: Callable[[str], NativeEngine] | None = None) -> None:
        self._protocol = protocol
        self._make = make
        self._lock = threading.Lock()  # guards what follows
        self._native: NativeEngine | None = None
        self._host = ""
        self._regions: dict[int, tuple[int, int]] = {}  # address -> bytes, how often registered

    def open(self, host: str, device: str = "") -> NativeEngine:
        """Return the engine; StoreUnreachable if it cannot be made now.

        `host` is where others reach this process, `device` names network devices ("" lets Mooncake
        choose); only the first call's values count.
        """
        with self._lock:
            if self._native is None:
                made = self._make
                self._native = self._make_own(host, device) if made is None else made(host)
                self._host = host
            return self._native

    @property
    def session(self) -> str:
        """The engine's name for others; it is open."""
        with self._lock:
            assert self._native is not None, "open comes first"
            return session_of(self._host, self._native)

    def register(self, address: int, nbytes: int) -> None:
        """Prepare memory for transfers; counts repeated calls for the same memory."""
        with self._lock:
            assert self._native is not None, "open comes first"
            known, count = self._regions.get(address, (nbytes, 0))
            assert known == nbytes, "memory is registered whole"
            if not count:
                code = self._native.register_memory(address, nbytes)
                if code != OK:
                    raise StoreError(
                        f"Mooncake's {self._protocol} engine cannot register {nbytes} bytes at "
                        f"{address:#x} (code {code}); its log says why: memory that the device's "
                        "runtime does not know, or that overlaps what another connector registered"
                    )
            self._regions[address] = (nbytes, count + 1)

    def unregister(self, address: int) -> None:
        """Undo one `register`."""
        with self._lock:
            assert self._native is not None, "open comes first"
            nbytes, count = self._regions.pop(address)
            if count > 1:
                self._regions[address] = (nbytes, count - 1)
            elif (code := self._native.unregister_memory(address)) != OK:
                logger.warning("Mooncake cannot unregister %#x: code %d", address, code)

    def _make_own(self, host: str, device: str) -> NativeEngine:
        engine = cast("NativeEngine", _engine_wheel().TransferEngine())
        with set_meanwhile(FORCE_TCP if self._protocol == "tcp" else {}):
            code = engine.initialize(host, METADATA, self._protocol, device)
        if code != OK:
            raise StoreUnreachable(
                f"Mooncake's transfer engine cannot be started over {self._protocol} "
                f"(code {code}) at {host}; check that {host} is an address of this machine; over "
                "rdma check the device's name; on Ascend check /etc/hccn.conf, CANN's release and "
                "that the card is visible"
            )
        used, problem = transport(self._protocol, device)
        logger.info("kvpool: Mooncake's transfer engine at %s: transport %s", host, used)
        if problem:
            logger.warning(
                "kvpool: Mooncake's transfer engine at %s: protocol=%s: %s",
                host,
                self._protocol,
                problem,
            )
        return engine


def _engine_wheel() -> Any:
    try:
        import mooncake.engine
    except ImportError as error:
        raise ConfigError(advice(error, installed_wheels())) from error
    return mooncake.engine


def session_of(host: str, engine: NativeEngine) -> str:
    """Return the name of this process's engine for others; `host` as given to `open`."""
    bare = f"[{host}]" if ":" in host and not host.startswith("[") else host
    return f"{bare}:{engine.get_rpc_port()}"


def environment_of(protocol: str) -> dict[str, str]:
    """Return the environment variables for an engine that moves bytes to or from other hosts.

    The engine needs them when it is made. Without a connection pool Mooncake opens a socket for
    every transfer over TCP.
    """
    return {"MC_TCP_ENABLE_CONNECTION_POOL": "1"} if protocol == "tcp" else {}


_engines: dict[str, SharedEngine] = {}
_lock = threading.Lock()  # guards `_engines`


def shared_engine(protocol: str) -> SharedEngine:
    """Return the process's engine for a protocol."""
    with _lock:
        return _engines.setdefault(protocol, SharedEngine(protocol))


def use_engine_of(protocol: str, make: Callable[[str], NativeEngine]) -> None:
    """Use the engine of another component of this process, unless there is one already.

    `make` gets the host where others reach this process.
    """
    with _lock:
        _engines.setdefault(protocol, SharedEngine(protocol, make))
