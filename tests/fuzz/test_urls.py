"""Store urls and what they draw on: a spec or ConfigError, and no secret in an error."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.json_trees import texts, trees
from tests.support.waiting import own_s
from vllm_kvpool.errors import ConfigError
from vllm_kvpool.storage.tiers import parse_tiers
from vllm_kvpool.storage.url import FileOptions, S3Options

CALL_LIMIT_S = 1.0  # by the clock `own_s`: a busy machine does not count
SECRET = "hunter2"
FILE_KEYS = ("protocol", "global_segment_size", "local_buffer_size", "device_name")
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": SECRET}

schemes = st.sampled_from(["file", "mooncake", "s3", "host", "FILE", "http", "", "fil"])
places = st.sampled_from(["", "/", "//", "bucket", "host:1", "[::1]:5", "[", "a@b", "..", "%00"])
names = st.sampled_from(
    ["size", "io", "policy", "required", "segment", "endpoint", "region", "get_lanes", "protocol"]
)
parts = texts | st.text("%/.:@?#&=[]~0123456789abGiB\0\n", max_size=20)
options = st.lists(st.tuples(names | texts, parts), max_size=4)


@st.composite
def urls(draw: st.DrawFn) -> str:
    """Urls that get past the first checks, and strings that do not."""
    if draw(st.integers(0, 9)) == 0:
        return draw(parts)
    query = "&".join(f"{name}={value}" for name, value in draw(options))
    return f"{draw(schemes)}://{draw(places)}/{draw(parts)}" + (f"?{query}" if query else "")


def spec_or_message(several: list[str], mooncake: dict[str, Any]) -> tuple[object, str]:
    """Options of the first store, or what is said of the urls; nothing else is raised."""
    try:
        stores = parse_tiers(several, mooncake, CREDENTIALS).stores
    except ConfigError as error:
        return None, str(error)
    return (stores[0].options if stores else None), ""


@given(urls(), st.dictionaries(texts, trees, max_size=3))
def test_any_url(url: str, mooncake: dict[str, Any]) -> None:
    start = own_s()
    options, message = spec_or_message([url], mooncake)
    assert SECRET not in message
    if isinstance(options, FileOptions):
        assert options.path.startswith("/")
        assert not {".", ".."} & set(options.path.split("/"))
        assert "\0" not in options.path
    if isinstance(options, S3Options):
        assert not options.prefix or not {"", ".", ".."} & set(options.prefix.split("/"))
    assert own_s() - start < CALL_LIMIT_S


@given(st.lists(urls(), max_size=4))
def test_any_list_of_tiers(several: list[str]) -> None:
    assert SECRET not in spec_or_message(several, {})[1]


@given(
    st.fixed_dictionaries(
        {"master_server_address": trees | st.just("host:50051")},
        optional=dict.fromkeys(FILE_KEYS, trees),
    )
)
def test_any_mooncake_configuration(config: dict[str, Any]) -> None:
    spec_or_message(["mooncake://"], config)


@pytest.mark.parametrize(
    "url",
    [
        f"s3://user:{SECRET}@bucket/prefix",
        f"s3://bucket/prefix?secret_access_key={SECRET}&region=x",
        f"s3://bucket?endpoint=https://user:{SECRET}@host",
        f"s3://bucket?endpoint=https://host/?token={SECRET}",
        f"s3://bucket?region=r&unknown={SECRET}",
        f"s4://user:{SECRET}@bucket?key={SECRET}",
        f"https://user:{SECRET}@host/path",
        f"S3://user:{SECRET}@bucket?key={SECRET}",
    ],
)
def test_a_secret_in_a_url_is_not_repeated(url: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_tiers([url], None, CREDENTIALS)
    assert SECRET not in str(raised.value)
