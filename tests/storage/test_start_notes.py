"""Notes that an engine logs at its start: the settings in use, and options without effect."""

from pathlib import Path
from typing import Any

import pytest

from vllm_kvpool.config import KVRole, read_config
from vllm_kvpool.storage.start_notes import (
    StoreState,
    host_in_words,
    store_in_words,
    without_effect,
    work_in_words,
)
from vllm_kvpool.storage.tiers import tier_specs
from vllm_kvpool.storage.url import parse_store_url

FILE = "file:///nvme/kvpool?size=1GiB"


def notes(**options: Any) -> list[str]:
    config = read_config({"store": [FILE], **options})
    return list(without_effect(config, tier_specs(config)))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, ""),
        ({"write_policy": "back", "store": ["host://1GiB", FILE]}, ""),
        ({"write_policy": "back"}, "without host://"),
        (
            {"write_policy": "back", "store": [FILE, "file:///mnt/pool?size=1GiB"]},
            "without host://",
        ),
        ({"write_policy": "back", "store": ["host://1GiB"]}, "no store behind host://"),
        ({"verify": "length"}, ""),
        ({"verify": "length", "encryption_key_file": "/keys"}, "encrypted cells"),
        ({"save_decode": True}, ""),
    ],
)
def test_an_option_without_effect_is_named(options: dict[str, Any], words: str) -> None:
    found = notes(**options)
    assert len(found) == bool(words)
    assert words in "".join(found)


def test_a_store_says_its_transport_and_what_keeps_it_from_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, far = parse_store_url(FILE), parse_store_url("mooncake://m:1?protocol=rdma")
    assert store_in_words("file", file, StoreState.OPEN) == "file"
    assert store_in_words("file", file, StoreState.READ_ONLY).startswith("file (read-only")
    monkeypatch.setenv("MC_FORCE_TCP", "1")
    words = store_in_words("mooncake", far, StoreState.AWAY)
    assert words == "mooncake (tcp, not as its URL says: rdma; away: it is tried again)"
    near = parse_store_url("mooncake://m:1")
    assert store_in_words("mooncake", near, StoreState.OPEN) == "mooncake (tcp)"
    assert host_in_words(8 << 30) == "host (8192 MiB for each worker)"


@pytest.mark.parametrize(
    ("options", "role", "loads", "words"),
    [
        ({}, KVRole.BOTH, True, "loads hits, saves prompts"),
        ({}, KVRole.CONSUMER, True, "saves nothing (kv_consumer without save_decode)"),
        ({"save_decode": True}, KVRole.CONSUMER, True, "saves prompts and generated tokens"),
        ({"verify": "length"}, KVRole.BOTH, True, "lengths alone are checked (verify=length)"),
        ({}, KVRole.BOTH, False, "loads nothing"),
    ],
)
def test_an_engine_says_what_it_loads_and_saves(
    options: dict[str, Any], role: KVRole, loads: bool, words: str
) -> None:
    assert words in work_in_words(read_config(options), role, loads=loads)
