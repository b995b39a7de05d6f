"""Options from the engine's configuration, the environment and requests: a value or ConfigError.

Whatever is said, nothing else is raised, no error grows with what it complains of, and it does not
take long.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.fuzz.json_trees import HOSTILE, nested, texts, trees
from tests.support.waiting import own_s
from vllm_kvpool.config import (
    MAX_STAGING_BYTES,
    KVPoolConfig,
    RequestOptions,
    json_named_by,
    read_config,
    read_request_options,
)
from vllm_kvpool.errors import ConfigError

CALL_LIMIT_S = 2.0  # by the clock `own_s`: a busy machine does not count
MAX_MESSAGE_CHARS = 1000
OPTIONS = sorted(f.name for f in fields(KVPoolConfig))
LONG_TEXTS = [value for value in HOSTILE if isinstance(value, str)]
REQUEST_OPTIONS = sorted(f.name for f in fields(RequestOptions))

fast = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@contextmanager
def refused_or_fine() -> Iterator[None]:
    start = own_s()
    message = ""
    try:
        yield
    except ConfigError as error:
        message = str(error)
    assert len(message) < MAX_MESSAGE_CHARS
    assert own_s() - start < CALL_LIMIT_S


def is_sound(config: KVPoolConfig) -> None:
    assert isinstance(config.store_urls, tuple)
    assert 16 <= config.chunk_tokens <= 16_384
    assert 0 < config.staging_nbytes <= MAX_STAGING_BYTES
    assert 0 < config.load_timeout_s < float("inf")
    for name in (config.stats_file, config.trace_file):
        with suppress(OSError):
            Path(name).exists()  # no ValueError


@fast
@given(st.dictionaries(st.sampled_from(OPTIONS) | texts, trees, max_size=4))
def test_any_engine_configuration(extra: dict[str, Any]) -> None:
    with refused_or_fine():
        is_sound(read_config(extra, env={}))


@pytest.mark.parametrize("name", OPTIONS)
def test_hostile_values_of_every_option(name: str) -> None:
    for value in HOSTILE:
        if name != "staging_bytes" or not isinstance(value, str):  # sizes.py repeats those
            with refused_or_fine():
                is_sound(read_config({name: value}, env={}))


@fast
@given(st.sampled_from(OPTIONS), texts | st.sampled_from(LONG_TEXTS))
@example("store", "[\ud800")
@example("store", "[" * 20_000)
@example("store", '["\ud800"]')
@example("chunk_tokens", "9" * 5000)
@example("load_timeout_s", "nan")
@example("prefetch", "\ud800")
def test_any_text_of_the_environment(name: str, text: str) -> None:
    if name == "staging_bytes":
        text = text[:100]
    with refused_or_fine():
        is_sound(read_config({}, env={f"KVPOOL_{name.upper()}": text}))


@fast
@given(st.dictionaries(st.sampled_from(REQUEST_OPTIONS) | texts, trees, max_size=4) | trees)
def test_any_options_of_a_request(params: object) -> None:
    with refused_or_fine():
        options = read_request_options({"kvpool": params})
        assert options.expect_tokens >= 0
        assert 0 <= options.expect_timeout_ms <= 600_000


@fast
@given(trees)
def test_any_parameters_of_a_request(params: Any) -> None:
    with refused_or_fine():
        read_request_options(params)


@pytest.mark.parametrize(
    "params",
    [
        nested(),
        {"save": nested()},
        {"save": "\ud800"},
        {"x" * 10_000_000: 1},
        {"expect_tokens": 10**5000},
        {"expect_timeout_ms": float("nan")},
        {1: 2},
        "x" * 10_000_000,
    ],
    ids=lambda params: type(params).__name__,
)
def test_hostile_parameters(params: object) -> None:
    """Any client may send such parameters, and the scheduler's thread reads them."""
    with refused_or_fine():
        read_request_options({"kvpool": params})


@fast
@given(trees | st.dictionaries(texts, trees))
def test_any_json_as_a_named_file(tmp_path: Path, tree: object) -> None:
    path = tmp_path / "mooncake.json"
    try:
        path.write_text(json.dumps(tree))
    except (ValueError, RecursionError):
        return  # too large for the writer
    with refused_or_fine():
        assert isinstance(json_named_by("NAME", {"NAME": str(path)}), Mapping)


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"\0", b"null", b"[]", b"\xff", b'{"a":"\xff"}', b'{"\xff":1}', b'{"a":1e999}'),
        *(b"[" * 20_000, b'{"a":' * 20_000, b'{"a":NaN}', b'{"a":' + b"9" * 5000 + b"}"),
        *(b'{"a":"\\ud800"}', b'{"a":1}' * 2, b"\xef\xbb\xbf{}", b'{"a":1,"a":2}'),
    ],
)
def test_hostile_bytes_as_a_named_file(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "mooncake.json"
    path.write_bytes(data)
    with refused_or_fine():
        json_named_by("NAME", {"NAME": str(path)})
    with pytest.raises(ConfigError, match=r"NAME=.*cannot be read"):
        json_named_by("NAME", {"NAME": f"{path}\0"})
