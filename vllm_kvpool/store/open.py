"""From a store url to an open store.

Owns the url grammar: `parse_store_url` is pure and says everything that can be known to be wrong
before a store is opened; `open_store` imports the one backend that is asked for. Every store is
opened by its user's own thread; opening blocks (mooncake.py says for how long).

Options of every scheme: `required=1` (no start without this store). `size=` and the like take
plain bytes, KB/MB/GB/TB (decimal) or KiB/MiB/GiB/TiB (binary).
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from vllm_kvpool.errors import ConfigError, nearest
from vllm_kvpool.sizes import parse_size
from vllm_kvpool.store.base import Store
from vllm_kvpool.store.mooncake import PROTOCOLS, MooncakeOptions

MOONCAKE_CONFIG_ENV = "MOONCAKE_CONFIG_PATH"  # Mooncake's own

MIN_STORE_BYTES = 1 << 20
MAX_STORE_BYTES = 1 << 50
DEFAULT_MEMORY_BYTES = 1 << 30
DEFAULT_FILE_BYTES = 20 << 30
MIN_SEGMENT_BYTES = 16 << 20  # below it Mooncake's allocator has no room for anything
DEFAULT_SEGMENT_BYTES = 4 << 30
DEFAULT_LOCAL_BUFFER_BYTES = 16 << 20  # cells go through registered memory, not through it
FILE_BLOCK_BYTES = 4096  # what a file occupies is a multiple of this
MAX_PORT = 65535

_FLAGS = {"1": True, "true": True, "0": False, "false": False}


@dataclass(frozen=True, slots=True)
class MemoryOptions:
    name: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class FileOptions:
    path: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class StoreSpec:
    """A store that can be opened, as far as its url tells."""

    url: str
    scheme: str
    required: bool
    options: MemoryOptions | FileOptions | MooncakeOptions


class _Query:
    """The options of one url, each taken at most once, by name."""

    def __init__(self, url: str, query: str) -> None:
        self.url = url
        self._values: dict[str, str] = {}
        self._known: list[str] = []
        for name, value in parse_qsl(query, keep_blank_values=True):
            if name in self._values:
                raise ConfigError(f"{url}: option {name} is given twice")
            self._values[name] = value

    def text(self, name: str, default: str = "") -> str:
        self._known.append(name)
        return self._values.get(name, default)

    def flag(self, name: str) -> bool:
        value = self.text(name, "0").lower()
        if value not in _FLAGS:
            raise ConfigError(f"{self.url}: {name}={value} must be 0 or 1")
        return _FLAGS[value]

    def size(self, name: str, default: str | int, *, least: int, or_zero: bool = False) -> int:
        given = self.text(name, str(default))
        if or_zero and given.strip() == "0":
            return 0
        nbytes = parse_size(given, f"{self.url}: {name}")
        if not least <= nbytes <= MAX_STORE_BYTES:
            raise ConfigError(
                f"{self.url}: {name}={given} must be from {least} to {MAX_STORE_BYTES} bytes"
                + (", or 0" if or_zero else "")
            )
        return nbytes

    def finish(self) -> None:
        """ConfigError for an option that nobody asked for."""
        for name in self._values:
            if name not in self._known:
                raise ConfigError(
                    f"{self.url}: unknown option {name}; {nearest(name, self._known)}"
                )


def parse_store_url(url: str, mooncake_config: Mapping[str, object] | None = None) -> StoreSpec:
    """Read a url; ConfigError says what to change. Pure.

    `mooncake_config` is what the file named by `MOONCAKE_CONFIG_ENV` holds; it is read where
    `mooncake://` names no master, and the url's own options go before it.
    """
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise ConfigError(f"{url}: {error}") from None
    if not parts.scheme or not url.lower().startswith(f"{parts.scheme}://"):
        raise ConfigError(f"not a store url: {url!r}; write for example file:///var/cache/kvpool")
    if parts.scheme not in _PARSERS:
        hint = nearest(parts.scheme, _PARSERS)
        raise ConfigError(f"{url}: unknown store scheme {parts.scheme}://; {hint}")
    if parts.fragment or parts.username is not None:
        raise ConfigError(
            f"{url}: a store url has no user and no #fragment; escape them (%23, %40)"
        )
    query = _Query(url, parts.query)
    required = query.flag("required")
    options = _PARSERS[parts.scheme](parts, query, mooncake_config)
    query.finish()
    return StoreSpec(url, parts.scheme, required, options)


def names_no_master(url: str) -> bool:
    """Whether it is a `mooncake://` url that leaves everything to Mooncake's own configuration."""
    return url.partition("?")[0].lower().rstrip("/") == "mooncake:"


def check_capacity(spec: StoreSpec, cell_bytes: int) -> None:
    """ConfigError if the store could not hold one cell."""
    match spec.options:
        case MemoryOptions(size_bytes=size_bytes):
            name, least_bytes = "size", cell_bytes
        case FileOptions(size_bytes=size_bytes):
            name, least_bytes = "size", -(-cell_bytes // FILE_BLOCK_BYTES) * FILE_BLOCK_BYTES
        case MooncakeOptions(segment_bytes=size_bytes):
            name, least_bytes = "segment", cell_bytes if size_bytes else 0
    if size_bytes < least_bytes:
        raise ConfigError(
            f"{spec.url}: {name} is {size_bytes} bytes, but one cell needs {least_bytes}; "
            f"raise {name}= or lower layer_span or chunk_tokens"
        )


def open_store(spec: StoreSpec, *, segment: bool) -> Store:
    """Open a store; `segment` says whether to give memory to a pool that is made of its members'.

    ConfigError if it can never work as configured, StoreUnreachable if it cannot be reached now.
    """
    match spec.options:
        case MemoryOptions(name, size_bytes):
            from vllm_kvpool.store.memory import MemoryStore

            return MemoryStore(name, size_bytes)
        case FileOptions(path, size_bytes):
            from vllm_kvpool.store.files import FileStore

            return FileStore(path, size_bytes)
        case MooncakeOptions() as options:
            from vllm_kvpool.store.mooncake import MooncakeStore

            return MooncakeStore(options, segment=segment)


def _parse_memory(
    parts: SplitResult, query: _Query, config: Mapping[str, object] | None
) -> MemoryOptions:
    if parts.path.strip("/"):
        raise ConfigError(f"{query.url}: a memory store has a name and no path: memory://name")
    return MemoryOptions(
        name=parts.netloc,
        size_bytes=query.size("size", DEFAULT_MEMORY_BYTES, least=MIN_STORE_BYTES),
    )


def _parse_file(
    parts: SplitResult, query: _Query, config: Mapping[str, object] | None
) -> FileOptions:
    path = unquote(parts.path)
    if parts.netloc:
        raise ConfigError(
            f"{query.url}: the path must be absolute, with three slashes: file:///{parts.netloc}..."
        )
    if not path.strip("/") or "\0" in path:
        raise ConfigError(f"{query.url}: name a directory, for example file:///var/cache/kvpool")
    return FileOptions(
        path="/" + os.path.normpath(path).lstrip("/"),
        size_bytes=query.size("size", DEFAULT_FILE_BYTES, least=MIN_STORE_BYTES),
    )


def _parse_mooncake(
    parts: SplitResult, query: _Query, config: Mapping[str, object] | None
) -> MooncakeOptions:
    if parts.path.strip("/"):
        raise ConfigError(f"{query.url}: a mooncake store has no path: mooncake://host:port")
    fallback = _MooncakeFallback(query.url, {} if parts.netloc else config)
    host, port = _host_and_port(query.url, parts.netloc or fallback.text("master_server_address"))
    protocol = query.text("protocol", fallback.text("protocol", "tcp"))
    if protocol not in PROTOCOLS:
        hint = nearest(protocol, PROTOCOLS)
        raise ConfigError(f"{query.url}: unknown protocol {protocol}; {hint}")
    segment = fallback.text("global_segment_size", str(DEFAULT_SEGMENT_BYTES))
    local_buffer = fallback.text("local_buffer_size", str(DEFAULT_LOCAL_BUFFER_BYTES))
    return MooncakeOptions(
        master_host=host,
        master_port=port,
        protocol=protocol,
        device=query.text("device", fallback.text("device_name")),
        metadata=query.text("metadata", fallback.text("metadata_server", "P2PHANDSHAKE")),
        segment_bytes=query.size("segment", segment, least=MIN_SEGMENT_BYTES, or_zero=True),
        local_buffer_bytes=query.size("local_buffer", local_buffer, least=MIN_STORE_BYTES),
        local_hostname=query.text("local_hostname", fallback.text("local_hostname")),
    )


class _MooncakeFallback:
    """Values for what a `mooncake://` url leaves out; the file may hold keys for others."""

    def __init__(self, url: str, config: Mapping[str, object] | None) -> None:
        if config is None:
            raise ConfigError(
                f"{url}: name the master (mooncake://host:port), or set {MOONCAKE_CONFIG_ENV} to a "
                f"JSON file with master_server_address"
            )
        self._config = config

    def text(self, name: str, default: str = "") -> str:
        value = self._config.get(name, default)
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise ConfigError(f"{MOONCAKE_CONFIG_ENV}: {name} must be a string or a whole number")
        return str(value)


def _host_and_port(url: str, address: str) -> tuple[str, int]:
    """Split `host:port` or `[v6]:port`."""
    host, colon, port = address.rpartition(":")
    if not host or not colon or host.startswith("[") != host.endswith("]"):
        raise ConfigError(f"{url}: the master needs a host and a port, not {address!r}: host:50051")
    if not port.isdecimal() or not 0 < int(port) <= MAX_PORT:
        raise ConfigError(f"{url}: {port!r} is not a port (1 to {MAX_PORT})")
    return host.strip("[]"), int(port)


_PARSERS: dict[
    str,
    Callable[
        [SplitResult, _Query, Mapping[str, object] | None],
        MemoryOptions | FileOptions | MooncakeOptions,
    ],
] = {"memory": _parse_memory, "file": _parse_file, "mooncake": _parse_mooncake}
