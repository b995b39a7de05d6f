"""Byte sizes as users write them."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvpool.errors import ConfigError
from vllm_kvpool.sizes import parse_size


@pytest.mark.parametrize(
    ("value", "nbytes"),
    [
        (1, 1),
        (4096, 4096),
        (2**53 + 1, 2**53 + 1),
        ("4096", 4096),
        ("4096B", 4096),
        ("1KB", 1000),
        ("1KiB", 1024),
        ("1kib", 1024),
        ("512MB", 512 * 10**6),
        ("512MiB", 512 << 20),
        ("50GiB", 50 << 30),
        ("3TB", 3 * 10**12),
        ("3TiB", 3 << 40),
        (" 2 GiB ", 2 << 30),
        ("1.5GiB", 3 << 29),
        ("0.5KiB", 512),
    ],
)
def test_sizes_as_they_are_meant(value: str | int, nbytes: int) -> None:
    assert parse_size(value) == nbytes


@pytest.mark.parametrize(
    "value",
    [
        *("", " ", "GiB", "1G", "1 GiB B", "1PB", "-1", "-1KB", "+1", "1e9", "0x10", "1,5GB", "1."),
        *(".5GB", "1_000", "nan", "inf", True, False, None, 1.5, [1], b"1"),
    ],
)
def test_what_is_no_size_is_refused_by_the_options_name(value: object) -> None:
    with pytest.raises(ConfigError, match=r"staging_bytes: .* is not a size.*512MiB"):
        parse_size(value, "staging_bytes")


@pytest.mark.parametrize("value", [0, -1, "0", "0.1", "0KiB", "0.0001KB"])
def test_a_size_is_at_least_a_byte(value: str | int) -> None:
    with pytest.raises(ConfigError, match=r"x: .* at least one byte"):
        parse_size(value, "x")


@pytest.mark.parametrize("value", ["9" * 400, 10**400], ids=["text", "number"])
def test_a_size_beyond_all_bounds_is_a_size(value: str | int) -> None:
    assert parse_size(value) > 2**63


@given(st.text(max_size=30))
def test_any_text_is_a_size_or_a_config_error(text: str) -> None:
    with contextlib.suppress(ConfigError):
        assert parse_size(text) >= 1
