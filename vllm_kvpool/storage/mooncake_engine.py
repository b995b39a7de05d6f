"""The one Mooncake transfer engine of a process and protocol.

Over `ascend` an engine takes a card's ports and contexts, so everything in a process that speaks
Mooncake shares one: stores of several tiers, and vLLM-Ascend's own connectors beside ours
(`use_engine_of`). It is made by the first who needs it, on that thread, which must have entered its
device; it is never ended, since other users of it are not known.

Memory is registered with the engine itself, once however many stores use it. Nobody registers on
another's behalf, and regions never overlap. Any thread may call.

Embeddings are written with it directly, to another process's engine: over every protocol, since
those transfers have no store between them.
"""

import logging
import threading
from collections.abc import Callable
from typing import Any, Protocol, cast

from vllm_kvpool.errors import ConfigError, StoreError, StoreUnreachable

logger = logging.getLogger(__name__)

OK = 0
METADATA = "P2PHANDSHAKE"

# What `transfer_submit_write` and `transfer_check_status` answer.
REFUSED = 0
WRITTEN = 1
FAILED = -1


class NativeEngine(Protocol):
    """The part of the wheel's `TransferEngine` that we call."""

    def initialize(self, hostname: str, metadata: str, protocol: str, device: str) -> int: ...
    def get_rpc_port(self) -> int: ...
    def get_engine(self) -> object: ...
    def register_memory(self, address: int, nbytes: int) -> int: ...
    def unregister_memory(self, address: int) -> int: ...
    def send_probe(self, session: str) -> int: ...
    def transfer_submit_write(self, session: str, source: int, target: int, nbytes: int) -> int:
        """Begin a write; its number, or REFUSED. Blocks to connect to a session it has not met."""

    def transfer_check_status(self, number: int) -> int:
        """WRITTEN or FAILED when it has ended, which ends the number too: it must not be asked
        about again. Anything else says that it goes on."""


class SharedEngine:
    """See the module docstring."""

    def __init__(self, protocol: str, make: Callable[[str], NativeEngine] | None = None) -> None:
        self._protocol = protocol
        self._make = make
        self._lock = threading.Lock()  # guards what follows
        self._native: NativeEngine | None = None
        self._regions: dict[int, tuple[int, int]] = {}  # address -> bytes, how often registered

    def open(self, host: str, device: str = "") -> NativeEngine:
        """The engine; `host` is where others reach this process, and `device` names network devices
        ("" lets Mooncake choose), both for whoever comes first.

        StoreUnreachable if it cannot be made now.
        """
        with self._lock:
            if self._native is None:
                made = self._make
                self._native = self._make_own(host, device) if made is None else made(host)
            return self._native

    def register(self, address: int, nbytes: int) -> None:
        """Prepare memory for transfers; again for the same memory does nothing but count."""
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
        code = engine.initialize(host, METADATA, self._protocol, device)
        if code != OK:
            raise StoreUnreachable(
                f"Mooncake's transfer engine cannot be started over {self._protocol} "
                f"(code {code}) at {host}; check that {host} is an address of this machine; over "
                "rdma check the device's name; on Ascend check /etc/hccn.conf, CANN's release and "
                "that the card is visible"
            )
        return engine


def _engine_wheel() -> Any:
    try:
        import mooncake.engine
    except ImportError as error:
        raise ConfigError(f"the Mooncake wheel has no transfer engine ({error})") from error
    return mooncake.engine


def session_of(host: str, engine: NativeEngine) -> str:
    """What others call this process's engine; `host` as given to `open`, IPv6 without brackets."""
    bare = f"[{host}]" if ":" in host and not host.startswith("[") else host
    return f"{bare}:{engine.get_rpc_port()}"


def environment_of(protocol: str) -> dict[str, str]:
    """What an engine that writes to others should find in the environment when it is made.

    Without its pool of connections Mooncake opens a socket for every transfer over TCP, and blocks
    for as long as that takes. On a machine with RDMA devices it uses them, whatever protocol is
    asked for, unless it is forced; that holds for all engines of the process.
    """
    if protocol != "tcp":
        return {}
    return {"MC_TCP_ENABLE_CONNECTION_POOL": "1", "MC_FORCE_TCP": "1"}


_engines: dict[str, SharedEngine] = {}
_lock = threading.Lock()  # guards `_engines`


def shared_engine(protocol: str) -> SharedEngine:
    """The process's engine for a protocol."""
    with _lock:
        return _engines.setdefault(protocol, SharedEngine(protocol))


def use_engine_of(protocol: str, make: Callable[[str], NativeEngine]) -> None:
    """Take the engine that something else in this process makes or has made.

    `make` is told where others reach this process. Once an engine is there it stays.
    """
    with _lock:
        _engines.setdefault(protocol, SharedEngine(protocol, make))
