"""Store urls (pure): `parse_store_url` parses one to a `StoreSpec`, which backends.py opens.

It refuses what can be known to be wrong before a store is opened. Options of every scheme:
`required=1` (no start without this store), `get_lanes=` and `put_lanes=` (concurrent calls, instead
of the store's own choice). Sizes are bytes, or have a unit: KB/MB/GB/TB (decimal) or
KiB/MiB/GiB/TiB (binary).
"""

import ipaddress
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from vllm_kvpool.config import MAX_PORT
from vllm_kvpool.errors import ConfigError, nearest
from vllm_kvpool.sizes import parse_size
from vllm_kvpool.storage.eviction import DEFAULT_POLICY, POLICIES, Shares
from vllm_kvpool.storage.file.format import MAX_KEY_BYTES, file_bytes
from vllm_kvpool.storage.file.io import IO_CHOICES
from vllm_kvpool.storage.mooncake import DEVICE_PROTOCOLS, PROTOCOLS, MooncakeOptions
from vllm_kvpool.storage.mooncake import ENVIRONMENT as MOONCAKE_ENVIRONMENT
from vllm_kvpool.storage.mooncake_engine import environment_of

MOONCAKE_CONFIG_ENV = "MOONCAKE_CONFIG_PATH"  # Mooncake's own

MIN_STORE_BYTES = 1 << 20
MAX_STORE_BYTES = 1 << 50
DEFAULT_FILE_BYTES = 20 << 30
MIN_SEGMENT_BYTES = 16 << 20  # smaller ones are too small for Mooncake's allocator
DEFAULT_SEGMENT_BYTES = 4 << 30
DEFAULT_LOCAL_BUFFER_BYTES = 16 << 20  # cells do not pass through it
ASCEND_SEGMENT_BYTES = 1 << 30  # segments on an NPU's host are multiples of it
FABRIC_ENV = "ASCEND_ENABLE_USE_FABRIC_MEM"  # Mooncake's own, for Ascend A3
MAX_LANES = 16  # of a tier, for gets and for puts

MAX_URL_SHOWN = 500
MAX_PREFIX_CHARS = 512  # of an object's name, which may have 1024 bytes

S3_CREDENTIALS = (  # the sets of variables that the client reads
    ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"),
    ("AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_ROLE_ARN"),
    ("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",),
    ("AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"),
)
S3_REGION_ENV = ("AWS_REGION", "AWS_DEFAULT_REGION")
S3_ENDPOINT_ENV = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
DEFAULT_ENDPOINT_REGION = "us-east-1"  # servers other than AWS mostly ignore it

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")
_PREFIX = re.compile(r"(?:[A-Za-z0-9._=-]+(?:/[A-Za-z0-9._=-]+)*)?")
_SECRET = re.compile("key|secret|token|password|credential", re.IGNORECASE)
_FLAGS = {"1": True, "true": True, "0": False, "false": False}


@dataclass(frozen=True, slots=True)
class FileOptions:
    """Options of a `file://` url."""

    path: str
    size_bytes: int
    io: str = "auto"  # one of IO_CHOICES
    policy: str = DEFAULT_POLICY  # one of POLICIES
    shares: Shares = Shares.NONE


@dataclass(frozen=True, slots=True)
class S3Options:
    """A bucket and how it is reached; the client reads credentials from the environment."""

    bucket: str
    prefix: str  # "" or segments without "/" at either end
    region: str
    endpoint: str  # scheme, host and port; "" is AWS
    path_style: bool  # the bucket in the path, not in the host's name
    anonymous: bool  # requests are not signed


StoreOptions = FileOptions | MooncakeOptions | S3Options


@dataclass(frozen=True, slots=True)
class StoreSpec:
    """A parsed store url."""

    url: str
    """For messages: without the users of URLs among its options."""
    scheme: str
    required: bool
    options: StoreOptions
    get_lanes: int = 0  # concurrent calls of `get`; 0 for the store's own choice
    put_lanes: int = 0


def is_whole(text: str, least: int, most: int) -> bool:
    """Return True if a text is a decimal number in a range."""
    return text.isdecimal() and len(text) <= len(str(most)) and least <= int(text) <= most


class UrlOptions:
    """The options of one url; `finish` refuses those that were not asked for."""

    def __init__(self, url: str, query: str) -> None:
        self.url = url
        self._values: dict[str, str] = {}
        self._known: list[str] = []
        for name, value in parse_qsl(query, keep_blank_values=True):
            if name in self._values:
                raise ConfigError(f"{url}: option {name} is given twice")
            self._values[name] = value

    def text(self, name: str, default: str = "") -> str:
        """Return an option's text, or `default`, and accept the option in `finish`."""
        self._known.append(name)
        return self._values.get(name, default)

    def choice(self, name: str, choices: Iterable[str], default: str) -> str:
        """Return an option that is one of `choices`; ConfigError otherwise."""
        value = self.text(name, default)
        if value not in choices:
            raise ConfigError(f"{self.url}: {name}={value}; {nearest(value, choices)}")
        return value

    def shares(self) -> Shares:
        """Return the owners that share the room of a file store or host memory."""
        return Shares(self.choice("shares", [each.value for each in Shares], Shares.NONE.value))

    def flag(self, name: str, default: bool = False) -> bool:
        """Return an option that is 0 or 1 as a bool; ConfigError otherwise."""
        value = self.text(name, "1" if default else "0").lower()
        if value not in _FLAGS:
            raise ConfigError(f"{self.url}: {name}={value} must be 0 or 1")
        return _FLAGS[value]

    def size(self, name: str, default: str | int, *, least: int, or_zero: bool = False) -> int:
        """Return an option's bytes: at least `least`, or 0 with `or_zero`; else ConfigError."""
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

    def count(self, name: str, most: int) -> int:
        """Return a whole number from 1 to `most`, or 0 if the option is absent."""
        given = self.text(name, "0").strip()
        if given == "0" and name not in self._values:
            return 0
        if not is_whole(given, 1, most):
            raise ConfigError(f"{self.url}: {name}={given} must be a whole number from 1 to {most}")
        return int(given)

    def refuse_secrets(self) -> None:
        """Raise ConfigError for an option whose name suggests a credential."""
        for name in self._values:
            if _SECRET.search(name):
                raise ConfigError(
                    f"{self.url}: credentials do not belong in a url ({name}); set "
                    f"{' and '.join(S3_CREDENTIALS[0])}"
                )

    def finish(self) -> None:
        """Raise ConfigError for an unknown option."""
        for name in self._values:
            if name not in self._known:
                raise ConfigError(
                    f"{self.url}: unknown option {name}; {nearest(name, self._known)}"
                )


def parse_store_url(
    url: str,
    mooncake_config: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
) -> StoreSpec:
    """Parse a url; ConfigError says what to change.

    `mooncake_config` is the content of the file named by `MOONCAKE_CONFIG_ENV`, used where
    `mooncake://` names no master; the url's own options take precedence. `environ` is the
    environment: `s3://` checks it for credentials, which are not kept, and for what the url leaves
    out; Mooncake's `ascend` for the kind of memory.
    """
    shown = _shown(url)
    if not _DROPPED.isdisjoint(url):
        raise ConfigError(f"{shown!r}: write a tab as %09, and leave out ends of lines")
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise ConfigError(f"{shown}: {error}") from None
    if not parts.scheme or not url.lower().startswith(f"{parts.scheme}://"):
        example = (
            f"file://{shown}" if shown.startswith("/") else "for example file:///var/cache/kvpool"
        )
        raise ConfigError(f"not a store url: {shown!r}; write {example}")
    if parts.scheme not in PARSERS:
        hint = nearest(parts.scheme, PARSERS)
        raise ConfigError(f"{shown}: unknown store scheme {parts.scheme}://; {hint}")
    if parts.fragment or parts.username is not None:
        raise ConfigError(
            f"{shown}: a store url has no user and no #fragment; escape them (%23, %40)"
        )
    query = UrlOptions(shown, parts.query)
    required = query.flag("required")
    get_lanes, put_lanes = (query.count(name, MAX_LANES) for name in ("get_lanes", "put_lanes"))
    outside = {"mooncake": mooncake_config, "s3": environ}.get(parts.scheme)
    options = PARSERS[parts.scheme](parts, query, outside)
    query.finish()
    if isinstance(options, MooncakeOptions) and options.protocol == "ascend":
        options = _on_ascend(shown, options, environ or {})
    head, mark, options_text = url.partition("?")
    named = head + mark + _without_users(options_text)  # of metadata=
    return StoreSpec(named, parts.scheme, required, options, get_lanes, put_lanes)


_DROPPED = frozenset("\t\r\n")  # which `urlsplit` drops silently


def _shown(url: str) -> str:
    """Return the url for messages, without a user and without options that may hold a secret."""
    if not url.lower().startswith(("file:", "mooncake:")):
        url = url.partition("?")[0]
    head, mark, options = url.partition("?")
    shown = _USER.sub("//***@", head) + mark + _without_users(options)
    return shown if len(shown) <= MAX_URL_SHOWN else f"{shown[:MAX_URL_SHOWN]}..."


def _without_users(options: str) -> str:
    """Return a url's options without the users of URLs among them, escaped ones too."""
    parts = [unquote(each) if "@" in unquote(each) else each for each in options.split("&")]
    return "&".join(_USER.sub("//***@", each) for each in parts)


_USER = re.compile("//[^/?#]*@")


def names_no_master(url: str) -> bool:
    """Return True if a `mooncake://` url leaves the master to Mooncake's configuration."""
    return url.partition("?")[0].lower().rstrip("/") == "mooncake:"


def check_capacity(spec: StoreSpec, cell_bytes: int) -> None:
    """Raise ConfigError if the store cannot hold one cell."""
    match spec.options:
        case FileOptions(size_bytes=size_bytes):
            name, least_bytes = "size", file_bytes(cell_bytes, "x" * MAX_KEY_BYTES)
        case MooncakeOptions(segment_bytes=size_bytes):
            name, least_bytes = "segment", cell_bytes if size_bytes else 0
        case _:
            return  # a bucket has no size
    if size_bytes < least_bytes:
        raise ConfigError(
            f"{spec.url}: {name} is {size_bytes} bytes, but one cell needs {least_bytes}; "
            f"raise {name}= or lower layer_span or chunk_tokens"
        )


def uses_device(spec: StoreSpec) -> bool:
    """Return True if the store's client uses the device of the pages.

    Then its threads must enter the device, and memory must be known to the device's runtime.
    """
    return isinstance(spec.options, MooncakeOptions) and spec.options.protocol in DEVICE_PROTOCOLS


def environment_for(spec: StoreSpec) -> Mapping[str, str]:
    """Return the environment variables for the store's client, unless the user has set them."""
    match spec.options:
        case MooncakeOptions(protocol=protocol):
            return {**MOONCAKE_ENVIRONMENT, **environment_of(protocol)}
    return {}


def _parse_file(
    parts: SplitResult, query: UrlOptions, config: Mapping[str, object] | None
) -> FileOptions:
    path = unquote(parts.path)
    if parts.netloc:
        raise ConfigError(
            f"{query.url}: the path must be absolute, with three slashes: "
            f"file:///{parts.netloc}{parts.path}"
        )
    if not path.strip("/") or "\0" in path:
        raise ConfigError(f"{query.url}: name a directory, for example file:///var/cache/kvpool")
    return FileOptions(
        path="/" + os.path.normpath(path).lstrip("/"),
        size_bytes=query.size("size", DEFAULT_FILE_BYTES, least=MIN_STORE_BYTES),
        io=query.choice("io", IO_CHOICES, "auto"),
        policy=query.choice("policy", POLICIES, DEFAULT_POLICY),
        shares=query.shares(),
    )


def _parse_mooncake(
    parts: SplitResult, query: UrlOptions, config: Mapping[str, object] | None
) -> MooncakeOptions:
    if parts.path.strip("/"):
        raise ConfigError(f"{query.url}: a mooncake store has no path: mooncake://host:port")
    fallback = _MooncakeFallback(query.url, {} if parts.netloc else config)
    host, port = _host_and_port(query.url, parts.netloc or fallback.text("master_server_address"))
    protocol = query.choice("protocol", PROTOCOLS, fallback.text("protocol", "tcp"))
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


def _on_ascend(url: str, options: MooncakeOptions, env: Mapping[str, str]) -> MooncakeOptions:
    if options.segment_bytes % ASCEND_SEGMENT_BYTES:
        raise ConfigError(
            f"{url}: over ascend segment= must be a multiple of 1GiB, or 0; it is "
            f"{options.segment_bytes} bytes"
        )
    fabric = env.get(FABRIC_ENV)
    if fabric not in (None, "1"):
        raise ConfigError(
            f"{FABRIC_ENV}={fabric}: set it to 1 for fabric memory, or unset it; Mooncake takes "
            "any value for on"
        )
    return replace(options, fabric=fabric == "1")


class _MooncakeFallback:
    """Values of Mooncake's own configuration, for what a `mooncake://` url leaves out."""

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
    """Split `host:port` or `[IPv6]:port`."""
    host, colon, port = address.rpartition(":")
    if not host or not colon or host.startswith("[") != host.endswith("]"):
        raise ConfigError(f"{url}: the master needs a host and a port, not {address!r}: host:50051")
    if not is_whole(port, 1, MAX_PORT):
        raise ConfigError(f"{url}: {port!r} is not a port (1 to {MAX_PORT})")
    return host.strip("[]"), int(port)


def _parse_s3(
    parts: SplitResult, query: UrlOptions, environ: Mapping[str, object] | None
) -> S3Options:
    env = {name: str(value) for name, value in (environ or {}).items() if value}
    query.refuse_secrets()
    bucket, prefix = parts.netloc, parts.path.strip("/")
    if not _BUCKET.fullmatch(bucket):
        raise ConfigError(
            "s3://: the url needs a bucket of 2 to 255 letters, digits and . _ -, and no port; the "
            "server goes into endpoint=: s3://bucket/prefix?endpoint=http://host:9000"
        )
    if (
        not _PREFIX.fullmatch(prefix)
        or {".", ".."} & set(prefix.split("/"))
        or len(prefix) > MAX_PREFIX_CHARS
    ):
        raise ConfigError(
            f"s3://{bucket}: the prefix may have letters, digits and . _ = - between single "
            f"slashes, and {MAX_PREFIX_CHARS} of them in all"
        )
    endpoint = query.text("endpoint", _first_of(env, S3_ENDPOINT_ENV)).rstrip("/")
    _check_endpoint(query.url, endpoint, query.flag("allow_http"))
    region = query.text("region", _first_of(env, S3_REGION_ENV))
    if not region and not endpoint:
        raise ConfigError(f"{query.url}: name the bucket's region: region=, or {S3_REGION_ENV[0]}")
    anonymous = query.flag("anonymous")
    if not query.flag("instance_role") and not anonymous:
        _check_credentials(query.url, env)
    return S3Options(
        bucket=bucket,
        prefix=prefix,
        region=region or DEFAULT_ENDPOINT_REGION,
        endpoint=endpoint,
        # AWS's certificates do not cover names with dots.
        path_style=query.flag("path_style", bool(endpoint) or "." in bucket),
        anonymous=anonymous,
    )


def _first_of(env: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next((env[name] for name in names if name in env), "")


def _check_endpoint(url: str, endpoint: str, allow_http: bool) -> None:
    """Raise ConfigError unless "" or http(s)://host:port; not quoted, as it may hold a secret."""
    if not endpoint:
        return
    try:
        parts = urlsplit(endpoint)
        valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # the port is not a number
        valid = False
    if not valid or "@" in endpoint or parts.query or parts.fragment:
        raise ConfigError(
            f"{url}: endpoint= must be like https://host:9000, without a query or user"
        )
    if parts.scheme == "http" and not allow_http and not _is_loopback(parts.hostname or ""):
        raise ConfigError(
            f"{url}: over http others can read and change cells in transit; use an https endpoint, "
            "or allow_http=1 in a trusted network"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check_credentials(url: str, env: Mapping[str, str]) -> None:
    """Raise ConfigError if there are none: the client would ask an instance's metadata service."""
    pair = S3_CREDENTIALS[0]
    missing = [name for name in pair if name not in env]
    if len(missing) == 1:
        raise ConfigError(f"{url}: {missing[0]} is not set; set both {' and '.join(pair)}")
    if not any(all(name in env for name in names) for names in S3_CREDENTIALS):
        raise ConfigError(
            f"{url}: no credentials; set {' and '.join(pair)} (profiles and shared files are not "
            "read), or write instance_role=1 on a machine with a role, or anonymous=1"
        )


PARSERS: dict[
    str, Callable[[SplitResult, UrlOptions, Mapping[str, object] | None], StoreOptions]
] = {"file": _parse_file, "mooncake": _parse_mooncake, "s3": _parse_s3}
