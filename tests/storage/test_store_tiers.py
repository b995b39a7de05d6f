"""A list of tiers: what it says, what is refused and with which words."""

import pytest

import tests.support.memory_store  # noqa: F401  (its scheme)
from vllm_kvpool.errors import ConfigError
from vllm_kvpool.storage.eviction import Shares
from vllm_kvpool.storage.tiers import MAX_TIERS, HostTier, parse_tiers
from vllm_kvpool.storage.url import MAX_STORE_BYTES, MIN_STORE_BYTES

GIB = 1 << 30
S3 = "s3://bucket/pool?region=eu-west-1&anonymous=1"
MOONCAKE = "mooncake://master:50051"

FILES = [f"file:///x{number}" for number in range(MAX_TIERS)]
# urls -> host memory, kinds of the stores behind it
GOOD: list[tuple[list[str], HostTier, list[str]]] = [
    (["file:///x"], HostTier(0), ["file"]),
    (["host://8GiB"], HostTier(8 * GIB), []),
    (["host://8GiB/"], HostTier(8 * GIB), []),
    (["HOST://8gib"], HostTier(8 * GIB), []),
    (["host://1.5GiB?policy=lru", "file:///x"], HostTier(3 * GIB // 2, "lru"), ["file"]),
    (["host://1000000000"], HostTier(10**9), []),
    (["host://1GiB?policy=lrfu", S3], HostTier(GIB), ["s3"]),
    (["host://1GiB?shares=tenant"], HostTier(GIB, shares=Shares.TENANT), []),
    ([f"host://{MIN_STORE_BYTES}"], HostTier(MIN_STORE_BYTES), []),
    ([f"host://{MAX_STORE_BYTES}"], HostTier(MAX_STORE_BYTES), []),
    (
        ["host://1GiB", "file:///x", "file:///y", MOONCAKE, S3],
        HostTier(GIB),
        ["file", "file", "mooncake", "s3"],
    ),
    # A shared file system may be nearer than another's memory, or further away.
    ([MOONCAKE, "file:///x"], HostTier(0), ["mooncake", "file"]),
    (["file:///x", MOONCAKE], HostTier(0), ["file", "mooncake"]),
    (["file:///fast", "file:///slow"], HostTier(0), ["file", "file"]),
    ([S3, "s3://bucket/other?region=eu-west-1&anonymous=1"], HostTier(0), ["s3", "s3"]),
    (FILES, HostTier(0), ["file"] * MAX_TIERS),
    (["host://1GiB", *FILES], HostTier(GIB), ["file"] * MAX_TIERS),
]

# urls -> what the error says; each says which url, and what to do
BAD: list[tuple[list[str], str]] = [
    ([], "store lists no tier; leave it out for the default, or name a store url"),
    (["file:///x", "host://1GiB"], "host://1GiB: host memory is the nearest tier; put it first"),
    (["host://1GiB", "host://2GiB"], "host://2GiB: host memory is the nearest tier; put it first"),
    ([S3, "file:///x"], f"{S3} stands before file:///x, which is nearer"),
    ([S3, MOONCAKE], "host, file or mooncake, s3"),
    (["file:///a", S3, "file:///x"], f"{S3} stands before file:///x"),
    (["file:///x", "file:///x"], "file:///x is listed twice; a tier may stand in store once"),
    (["file:///x", "file:///x/"], "file:///x/ is listed twice"),
    (["file:///x", "file:///x?size=1GiB"], "file:///x?size=1GiB is listed twice"),
    (["file:///x?policy=lru", "file:///x?io=auto"], "file:///x?io=auto is listed twice"),
    (["file:///x", MOONCAKE, "file:///x"], "file:///x is listed twice"),
    ([MOONCAKE, f"{MOONCAKE}?segment=0"], f"{MOONCAKE}?segment=0 is listed twice"),
    ([S3, S3.replace("eu-west-1", "us-east-1")], "is listed twice"),
    ([*FILES, "file:///more"], f"lists {MAX_TIERS + 1} tiers behind host memory; at most"),
    (["host://"], "host://: write the size of host memory as host://8GiB"),
    (["host:8GiB"], "host:8GiB: write the size of host memory as host://8GiB"),
    (["host:///8GiB"], "write the size of host memory as host://8GiB"),
    (["host://8GiB/pool"], "write the size of host memory as host://8GiB"),
    (["host://["], "host://[: "),
    (["host://lots"], "host://lots: size: 'lots' is not a size; write a number of bytes or"),
    (["host://0"], "host://0: size: '0' must be at least one byte"),
    (["host://-5"], "'-5' is not a size"),
    ([f"host://{MIN_STORE_BYTES - 1}"], f"must be from {MIN_STORE_BYTES} to {MAX_STORE_BYTES}"),
    ([f"host://{MAX_STORE_BYTES + 1}"], f"must be from {MIN_STORE_BYTES} to {MAX_STORE_BYTES}"),
    (["host://8GiB?policy=lfu"], "host://8GiB?policy=lfu: policy=lfu; "),
    (["host://8GiB?shares=tenants"], "shares=tenants; did you mean 'tenant'?"),
    (["host://8GiB?shares=namespace"], "host memory has one namespace"),
    (["file:///x?shares=salt"], "shares=salt; known are: namespace, none, tenant"),
    (["host://8GiB?policy=lrff"], "did you mean 'lrfu'?"),
    (["host://8GiB?policy="], "policy=; known are: lrfu, lru"),
    (["host://8GiB?polcy=lru"], "unknown option polcy; did you mean 'policy'?"),
    (["host://8GiB?size=1GiB"], "unknown option size; known are: policy"),
    (["host://8GiB?required=1"], "unknown option required; "),
    (["host://8GiB?policy=lru&policy=lrfu"], "option policy is given twice"),
    (["memroy://"], "did you mean 'memory'?"),
    (["/var/cache"], "not a store url: '/var/cache'"),
    (["host"], "not a store url: 'host'"),
    ([""], "not a store url: ''"),
]


@pytest.mark.parametrize(("urls", "host", "kinds"), GOOD, ids=lambda value: str(value)[:60])
def test_a_list_is_host_memory_and_stores_nearest_first(
    urls: list[str], host: HostTier, kinds: list[str]
) -> None:
    specs = parse_tiers(urls)
    assert specs.host == host
    assert [spec.scheme for spec in specs.stores] == kinds
    assert [spec.url for spec in specs.stores] == urls[len(urls) - len(kinds) :]


@pytest.mark.parametrize(("urls", "message"), BAD, ids=lambda value: str(value)[:60])
def test_what_cannot_work_is_refused_and_says_what_to_do(urls: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_tiers(urls)
    assert message in str(caught.value)


def test_a_store_keeps_its_own_options() -> None:
    [spec] = parse_tiers(["file:///x?size=5GiB&required=1"]).stores
    assert spec.required
    assert spec.options.size_bytes == 5 * GIB


def test_mooncakes_own_configuration_stands_in_for_a_master() -> None:
    with pytest.raises(ConfigError, match="name the master"):
        parse_tiers(["mooncake://"])
    config = {"master_server_address": "m:1"}
    [spec] = parse_tiers(["mooncake://"], config).stores
    assert (spec.options.master_host, spec.options.master_port) == ("m", 1)
    with pytest.raises(ConfigError, match="is listed twice"):
        parse_tiers(["mooncake://m:1", "mooncake://"], config)


def test_credentials_are_looked_for_in_the_environment() -> None:
    url = "s3://bucket?region=eu-west-1"
    with pytest.raises(ConfigError, match="no credentials"):
        parse_tiers([url])
    environ = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    assert len(parse_tiers([url], None, environ).stores) == 1
