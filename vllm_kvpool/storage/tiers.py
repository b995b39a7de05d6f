"""The list of tiers that a configuration names, nearest first.

`host://8GiB?policy=lrfu` is the worker's own memory, a tier without a store; every other url is a
store's (url.py). A slower tier before a faster one, a tier named twice and host memory that is not
first are refused. `tier_specs` reads the environment and Mooncake's own file; the rest is pure.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from urllib.parse import urlsplit

from vllm_kvpool.config import KVPoolConfig, default_store_url, environment, json_named_by
from vllm_kvpool.errors import ConfigError
from vllm_kvpool.sizes import parse_size
from vllm_kvpool.storage.eviction import DEFAULT_POLICY, POLICIES, Shares
from vllm_kvpool.storage.mooncake import MooncakeOptions
from vllm_kvpool.storage.url import (
    MAX_STORE_BYTES,
    MIN_STORE_BYTES,
    MOONCAKE_CONFIG_ENV,
    StoreSpec,
    UrlOptions,
    names_no_master,
    parse_store_url,
)

MAX_TIERS = 4  # behind host memory

# A tier with a larger distance may not stand before one with a smaller. Files may be on a local or
# a shared disk, so they may stand before or behind Mooncake.
DISTANCE = {"file": 0, "mooncake": 0, "s3": 1}


@dataclass(frozen=True, slots=True)
class HostTier:
    """Cells kept in each worker's own memory; 0 bytes for none."""

    nbytes: int = 0
    policy: str = DEFAULT_POLICY
    shares: Shares = Shares.NONE


@dataclass(frozen=True, slots=True)
class TierSpecs:
    """Every tier of an engine; `stores` may be empty only with a host tier."""

    host: HostTier
    stores: tuple[StoreSpec, ...]

    @property
    def client_bytes(self) -> dict[str, int]:
        """The memory that clients of the stores take in each worker, by option."""
        found = {}
        for spec in self.stores:
            if isinstance(spec.options, MooncakeOptions) and not spec.options.fabric:
                found[f"segment= of {spec.url}"] = spec.options.segment_bytes
                found[f"local_buffer= of {spec.url}"] = spec.options.local_buffer_bytes
        return found


def parse_tiers(
    urls: Sequence[str],
    mooncake_config: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
) -> TierSpecs:
    """Parse a list of urls, nearest first; ConfigError says what to change.

    `mooncake_config` and `environ` as in `parse_store_url`.
    """
    if not urls:
        raise ConfigError("store lists no tier; leave it out for the default, or name a store url")
    host = HostTier()
    specs: list[StoreSpec] = []
    for place, url in enumerate(urls):
        if url.lower().startswith("host:"):
            if place:
                raise ConfigError(f"{url}: host memory is the nearest tier; put it first in store")
            host = _parse_host(url)
        else:
            specs.append(parse_store_url(url, mooncake_config, environ))
    if len(specs) > MAX_TIERS:
        raise ConfigError(f"store lists {len(specs)} tiers behind host memory; at most {MAX_TIERS}")
    for nearer, further in pairwise(specs):
        if DISTANCE[further.scheme] < DISTANCE[nearer.scheme]:
            raise ConfigError(
                f"{nearer.url} stands before {further.url}, which is nearer; store lists tiers "
                "nearest first: host, file or mooncake, s3"
            )
    places = [(spec.scheme, spec.options) for spec in specs]
    for number, (spec, place_of) in enumerate(zip(specs, places, strict=True)):
        if any(_same_place(place_of, other) for other in places[:number]):
            raise ConfigError(f"{spec.url} is listed twice; a tier may stand in store once")
    return TierSpecs(host, tuple(specs))


def tier_specs(config: KVPoolConfig) -> TierSpecs:
    """Return the tiers that the configuration names, or the default one."""
    urls = tuple(url or default_store_url() for url in config.store_urls)
    nameless = any(names_no_master(url) for url in urls)
    mooncake_config = json_named_by(MOONCAKE_CONFIG_ENV) if nameless else None
    return parse_tiers(urls, mooncake_config, environment())


def _same_place(one: tuple[str, object], other: tuple[str, object]) -> bool:
    """Return True if two specs name the same store, whatever their sizes."""
    if one[0] != other[0]:
        return False
    names = ("path", "master_host", "master_port", "bucket", "prefix", "endpoint")
    return all(getattr(one[1], n, None) == getattr(other[1], n, None) for n in names)


def _parse_host(url: str) -> HostTier:
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise ConfigError(f"{url}: {error}") from None
    if not parts.netloc or parts.path.strip("/") or not url.lower().startswith("host://"):
        raise ConfigError(f"{url}: write the size of host memory as host://8GiB")
    query = UrlOptions(url, parts.query)
    policy = query.choice("policy", POLICIES, DEFAULT_POLICY)
    shares = query.shares()
    if shares is Shares.NAMESPACE:
        raise ConfigError(f"{url}: host memory has one namespace; choose shares=tenant or none")
    query.finish()
    nbytes = parse_size(parts.netloc, f"{url}: size")
    if not MIN_STORE_BYTES <= nbytes <= MAX_STORE_BYTES:
        raise ConfigError(
            f"{url}: the size must be from {MIN_STORE_BYTES} to {MAX_STORE_BYTES} bytes"
        )
    return HostTier(nbytes, policy, shares)
