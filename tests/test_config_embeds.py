"""The embedding connector's options: read from both places, checked by name."""

import dataclasses
from typing import Any

import pytest

from vllm_kvpool.config import ENV_PREFIX, EmbedsConfig, Transport, read_embeds_config
from vllm_kvpool.errors import ConfigError

# option -> (as JSON, as an environment variable, as read)
GOOD: dict[str, list[tuple[object, str, object]]] = {
    "listen": [("tcp://0.0.0.0:5000", "tcp://0.0.0.0:5000", "tcp://0.0.0.0:5000"), ("", "", "")],
    "advertise": [("10.0.0.1", "10.0.0.1", "10.0.0.1")],
    "peers": [
        (["tcp://a:1"], '["tcp://a:1"]', ("tcp://a:1",)),
        (
            ["tcp://a:1", "tcp://[::1]:2"],
            "tcp://a:1, tcp://[::1]:2",
            ("tcp://a:1", "tcp://[::1]:2"),
        ),
        ([], "", ()),
    ],
    "allowed_peers": [
        (["10.42.0.0/16", "a:1"], "10.42.0.0/16, a:1", ("10.42.0.0/16", "a:1")),
        ([], "", ()),
    ],
    "transport": [("local", "local", Transport.LOCAL)],
    "protocol": [("rdma", "rdma", "rdma")],
    "device": [("mlx5_0,mlx5_1", "mlx5_0,mlx5_1", "mlx5_0,mlx5_1")],
    "arena_bytes": [("1GiB", "1GiB", "1GiB"), ("300", "300", "300")],
    "default_allocate_tokens": [(1, "1", 1)],
    "max_item_bytes": [("1GiB", "1GiB", "1GiB")],
    "max_landing_bytes": [("1GiB", "1GiB", "1GiB")],
    "retain_bytes": [("1GiB", "1GiB", "1GiB")],
    "writer_threads": [(1, "1", 1)],
    "queue_shards": [(2, "2", 2)],
    "heartbeat_s": [(0.5, "0.5", 0.5)],
    "heartbeat_max_failures": [(1, "1", 1)],
    "bootstrap_timeout_s": [(1.5, "1.5", 1.5)],
    "waiting_timeout_s": [(1.5, "1.5", 1.5)],
    "weights_id": [("v1", "v1", "v1")],
    "namespace": [("a", "a", "a")],
    "curve_dir": [("/etc/keys", "/etc/keys", "/etc/keys")],
    "stats_file": [("/tmp/stats", "/tmp/stats", "/tmp/stats")],
}
# option -> values that are refused, as JSON and, where there is one, as an environment variable
BAD: dict[str, list[tuple[object, str | None]]] = {
    "listen": [("0.0.0.0:5000", "0.0.0.0:5000"), ("ipc:///x", "ipc:///x"), (1, None)],
    "advertise": [(1, None)],
    "peers": [("tcp://a:1", None), (["a:1"], "a:1"), ([1], "[1]"), (None, "[")],
    "allowed_peers": [("10.0.0.0/8", None), ([1], "[1]"), (None, "[")],
    "transport": [("nixl", "nixl"), (1, None)],
    "protocol": [(1, None)],
    "device": [(1, None)],
    "arena_bytes": [(0, "0"), ("lots", "lots"), (1 << 60, str(1 << 60)), (1.5, None)],
    "default_allocate_tokens": [(0, "0"), (-1, "-1"), ("many", "many")],
    "max_item_bytes": [(0, "0"), ("lots", "lots")],
    "max_landing_bytes": [(0, "0"), ("lots", "lots")],
    "retain_bytes": [(0, "0"), ("lots", "lots")],
    "writer_threads": [(0, "0"), (257, "257"), (1.5, None)],
    "queue_shards": [(0, "0"), (257, "257")],
    "heartbeat_s": [
        *((0, "0"), (-1, "-1"), (float("nan"), "nan"), (float("inf"), "inf")),
        (86_401, "86401"),  # peers refuse it
    ],
    "heartbeat_max_failures": [(0, "0"), (True, None)],
    "bootstrap_timeout_s": [(0, "0"), (float("nan"), "nan")],
    "waiting_timeout_s": [(0, "0"), (float("inf"), "inf")],
    "weights_id": [(1, None)],
    "namespace": [(1, None)],
    "curve_dir": [(1, None), ("a\0b", None)],
    "stats_file": [(1, None), ("a\0b", None)],
}
OPTIONS = [field.name for field in dataclasses.fields(EmbedsConfig)]


def cases(table: dict[str, list[Any]]) -> list[tuple[Any, ...]]:
    return [(name, *case) for name, rows in table.items() for case in rows]


def test_every_option_stands_in_both_tables() -> None:
    assert list(GOOD) == OPTIONS
    assert list(BAD) == OPTIONS


@pytest.mark.parametrize(("name", "value", "text", "read"), cases(GOOD))
def test_an_option_is_read_from_both_places(
    name: str, value: object, text: str, read: object
) -> None:
    expected = dataclasses.replace(EmbedsConfig(), **{name: read})  # type: ignore[arg-type]
    assert read_embeds_config({name: value}, {}) == expected
    assert read_embeds_config({}, {ENV_PREFIX + name.upper(): text}) == expected


@pytest.mark.parametrize(("name", "value", "text"), cases(BAD))
def test_a_bad_value_is_refused_by_name(name: str, value: object, text: str | None) -> None:
    with pytest.raises(ConfigError, match=f"(?i){name}"):
        read_embeds_config({name: value}, {})
    if text is not None:
        with pytest.raises(ConfigError, match=f"(?i){name}"):
            read_embeds_config({}, {ENV_PREFIX + name.upper(): text})


def test_an_unknown_option_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="arena_bytes"):
        read_embeds_config({"arena_byte": 1}, {})
