"""Options: each one good, bad and from the environment; errors name what to change."""

import dataclasses
import os
import re
from pathlib import Path
from typing import Any

import pytest

from vllm_kvpool.config import (
    ENV_PREFIX,
    MAX_EXPECT_TIMEOUT_MS,
    Drafts,
    KVPoolConfig,
    LoadFailure,
    LoadPolicy,
    RequestOptions,
    Verify,
    WritePolicy,
    default_store_url,
    json_named_by,
    read_config,
    read_engine_config,
    read_request_options,
)
from vllm_kvpool.errors import ConfigError, nearest
from vllm_kvpool.storage.url import FileOptions, parse_store_url

# option -> (as JSON, as an environment variable, as read)
GOOD: dict[str, list[tuple[object, str, object]]] = {
    "store": [
        ("file:///a", "file:///a", "file:///a"),
        (["file:///x"], '["file:///x"]', ("file:///x",)),
        (["host://1GiB", "s3://b/p"], '["host://1GiB", "s3://b/p"]', ("host://1GiB", "s3://b/p")),
        ("", "", ""),
    ],
    "chunk_tokens": [(16, "16", 16), (16_384, "16384", 16_384)],
    "layer_span": [(0, "0", 0), (7, "7", 7)],
    "per_head_storage": [(False, "false", False), (True, "1", True), (False, "0", False)],
    "namespace": [("team a/@", "team a/@", "team a/@"), ("12", "12", "12")],
    "weights_id": [("v1", "v1", "v1"), ("true", "true", "true")],
    "staging_bytes": [("1GiB", "1GiB", "1GiB"), ("4096", "4096", "4096")],
    "write_policy": [
        ("through", "through", WritePolicy.THROUGH),
        ("back", "back", WritePolicy.BACK),
    ],
    "prefetch": [(False, "false", False), (True, "1", True)],
    "layerwise": [(False, "false", False), (True, "true", True)],
    "load_policy": [("auto", "auto", LoadPolicy.AUTO), ("always", "always", LoadPolicy.ALWAYS)],
    "load_failure": [("fail", "fail", LoadFailure.FAIL)],
    "lookup_timeout_ms": [(1, "1", 1)],
    "load_timeout_s": [(0.5, "0.5", 0.5), (3, "3", 3.0)],
    "call_timeout_s": [(0.5, "0.5", 0.5), (3, "3", 3.0)],
    "save_decode": [(True, "true", True)],
    "alias_tokens": [(0, "0", 0), (64, "64", 64)],
    "drafts": [("require", "require", Drafts.REQUIRE), ("off", "off", Drafts.OFF)],
    "verify": [("length", "length", Verify.LENGTH)],
    "encryption_key_file": [("/etc/k", "/etc/k", "/etc/k"), ("", "", "")],
    "notice_listen": [
        ("", "", ""),
        ("off", "off", "off"),
        ("tcp://*:7000", "tcp://*:7000", "tcp://*:7000"),
        ("tcp://[fd00::1]:7000", "tcp://[fd00::1]:7000", "tcp://[fd00::1]:7000"),
    ],
    "allowed_peers": [
        (["10.0.0.0/8"], "10.0.0.0/8", ("10.0.0.0/8",)),
        (["a", "b"], "a, b", ("a", "b")),
        ([], "", ()),
    ],
    "shutdown_timeout_s": [(1.5, "1.5", 1.5)],
    "log_requests": [(True, "true", True)],
    "stats_file": [("/tmp/stats", "/tmp/stats", "/tmp/stats")],
    "trace_file": [("/tmp/trace", "/tmp/trace", "/tmp/trace"), ("", "", "")],
}
# option -> values that are refused, as JSON and, where there is one, as an environment variable
BAD: dict[str, list[tuple[object, str | None]]] = {
    "store": [(1, None), ([], "[]"), (["a", 1], '["a", null]'), ([1], "[1]"), (None, "[")],
    "chunk_tokens": [(15, "15"), (16_385, "16385"), ("256", "x"), (2.5, "2.5"), (True, None)],
    "layer_span": [(-1, "-1"), ("all", "all"), (None, "")],
    "per_head_storage": [(1, "2"), ("no", "no")],
    "namespace": [(1, None), (None, None)],
    "weights_id": [(1, None)],
    "staging_bytes": [("", ""), (0, "0"), (-5, "-5"), ("lots", "lots"), (1.5, None)],
    "write_policy": [("never", "never"), ("THROUGH", "THROUGH"), (True, None)],
    "prefetch": [(1, "2"), ("yes", "yes"), ([], None)],
    "layerwise": [(1, "2"), ("yes", "yes")],
    "load_policy": [("never", "never"), (True, None)],
    "load_failure": [("ignore", "ignore")],
    "lookup_timeout_ms": [(0, "0"), (-1, "-1"), (MAX_EXPECT_TIMEOUT_MS + 1, "600001"), (0.5, "a")],
    "load_timeout_s": [(0, "0"), (-0.1, "-0.1"), (float("nan"), "nan"), (float("inf"), "inf")],
    "call_timeout_s": [(0, "0"), (-1.0, "-1"), (float("nan"), "nan"), (float("inf"), "inf")],
    "save_decode": [("true", "maybe"), (0, "")],
    "alias_tokens": [(-1, "-1"), (1.5, "1.5"), (True, None)],
    "drafts": [("always", "always"), (True, None)],
    "verify": [("none", "none"), (False, None)],
    "encryption_key_file": [(1, None), ("\0", None)],
    "notice_listen": [
        ("on", "on"),
        ("10.0.0.1:7000", "10.0.0.1:7000"),
        ("tcp://10.0.0.1", "tcp://10.0.0.1"),
        ("ipc:///tmp/x", "ipc:///tmp/x"),
        ("tcp://10.0.0.1:65536", "tcp://10.0.0.1:65536"),
        ("tcp://10.0.0.1:0", "tcp://10.0.0.1:0"),
        (7000, None),
    ],
    "allowed_peers": [("10.0.0.0/8", None), ([1], "[1]"), (None, None)],
    "shutdown_timeout_s": [(0, "0"), ("4", "four")],
    "log_requests": [("yes", "yes"), (0, "")],
    "stats_file": [(1, None), (["a"], None)],
    "trace_file": [(1, None), (["a"], None), (None, None)],
}
OPTIONS = [field.name for field in dataclasses.fields(KVPoolConfig)]


def cases(table: dict[str, list[Any]]) -> list[tuple[Any, ...]]:
    return [(name, *case) for name, rows in table.items() for case in rows]


def test_every_option_stands_in_both_tables() -> None:
    assert list(GOOD) == OPTIONS
    assert list(BAD) == OPTIONS


def test_nothing_set_is_the_default() -> None:
    assert read_config({}, {}) == KVPoolConfig()


@pytest.mark.parametrize(("name", "value", "text", "read"), cases(GOOD))
def test_an_option_is_read_from_both_places(
    name: str, value: object, text: str, read: object
) -> None:
    expected = dataclasses.replace(KVPoolConfig(), **{name: read})
    assert read_config({name: value}, {}) == expected
    assert read_config({}, {ENV_PREFIX + name.upper(): text}) == expected
    assert type(getattr(read_config({name: value}, {}), name)) is type(read)


@pytest.mark.parametrize(("name", "value", "text"), cases(BAD))
def test_a_bad_value_is_refused_by_name(name: str, value: object, text: str | None) -> None:
    with pytest.raises(ConfigError, match=f"(?i){name}"):
        read_config({name: value}, {})
    if text is not None:
        with pytest.raises(ConfigError, match=f"(?i){name}"):
            read_config({}, {ENV_PREFIX + name.upper(): text})


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("write_policy", "Back", "KVPOOL_WRITE_POLICY='Back'; did you mean 'back'?"),
        ("verify", "", "KVPOOL_VERIFY=''; known are: checksum, length"),
        ("load_failure", "null", "KVPOOL_LOAD_FAILURE='null'; known are: fail, recompute"),
        ("prefetch", "yes", "KVPOOL_PREFETCH='yes': write true or false, or unset it"),
        ("layer_span", "", "KVPOOL_LAYER_SPAN='': write a whole number, or unset it"),
        ("load_timeout_s", "5 s", "KVPOOL_LOAD_TIMEOUT_S='5 s': write a number, or unset it"),
    ],
)
def test_a_bad_variable_is_named_with_what_to_write(name: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        read_config({}, {ENV_PREFIX + name.upper(): text})


def test_a_choice_that_is_none_is_refused_with_those_there_are() -> None:
    message = "kv_connector_extra_config: load_failure='fial'; did you mean 'fail'?"
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        read_config({"load_failure": "fial"}, {})
    assert read_config({"load_failure": None}, {}).load_failure is None


def test_blanks_around_a_variable_are_none_of_it() -> None:
    """Variables read from a file, such as secrets, end with a newline."""
    env = {"KVPOOL_STORE": "file:///a\n", "KVPOOL_CHUNK_TOKENS": " 32\n"}
    config = read_config({}, env)
    assert (config.store, config.chunk_tokens) == ("file:///a", 32)


def test_the_engines_configuration_wins() -> None:
    env = {"KVPOOL_CHUNK_TOKENS": "not read", "KVPOOL_NAMESPACE": "env"}
    config = read_config({"chunk_tokens": 32}, env)
    assert (config.chunk_tokens, config.namespace) == (32, "env")


def test_variables_of_others_are_left_alone() -> None:
    env = {"KVPOOL_SERVICE_HOST": "10.0.0.1", "KVPOOL_PORT": "tcp://1", "chunk_tokens": "1"}
    assert read_config({}, env) == KVPoolConfig()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("chunk_token", "did you mean 'chunk_tokens'"),
        ("Store", "did you mean 'store'"),
        ("lookup_timeout_s", "did you mean 'lookup_timeout_ms'"),
        ("zzz", "known are: alias_tokens, allowed_peers"),
        ("", "known are: "),
    ],
)
def test_an_unknown_option_names_the_nearest(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_config({name: 1}, {})


def test_nearest_lists_all_where_none_is_near() -> None:
    assert nearest("sav", ["load", "save"]) == "did you mean 'save'?"
    assert nearest("xyz", ["load", "save"]) == "known are: load, save"


def test_sizes_and_stores_have_one_form() -> None:
    assert KVPoolConfig().staging_nbytes == 256 << 20
    assert read_config({"staging_bytes": 4096}, {}).staging_nbytes == 4096
    assert KVPoolConfig().store_urls == ("",)
    assert read_config({"store": ["a://b"]}, {}).store_urls == ("a://b",)
    assert read_config({"store": ["a://b", "c://d"]}, {}).store_urls == ("a://b", "c://d")


def test_an_empty_list_of_stores_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match="store is an empty list; leave it out, or name the"):
        read_config({"store": []}, {})


def test_the_default_store_lies_in_the_users_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    url = default_store_url({"XDG_CACHE_HOME": "/cache"})
    assert url == "file:///cache/vllm-kvpool?size=20GiB"
    monkeypatch.setenv("HOME", "/home/me")
    for env in ({}, {"XDG_CACHE_HOME": ""}):
        assert default_store_url(env) == "file:///home/me/.cache/vllm-kvpool?size=20GiB"


@pytest.mark.parametrize("base", ["/a b", "/a%41", "/a?b", "/a#b", "/a\tb", "/\xe4", "/a\udcff"])
def test_a_cache_directory_may_have_any_name(base: str) -> None:
    options = parse_store_url(default_store_url({"XDG_CACHE_HOME": base})).options
    assert isinstance(options, FileOptions)
    assert options.path == f"{base}/vllm-kvpool"


def test_without_a_home_a_store_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(ConfigError, match=r"name a store.*or set HOME"):
        default_store_url({})
    assert default_store_url({"XDG_CACHE_HOME": "/c"}) == "file:///c/vllm-kvpool?size=20GiB"


def test_the_file_a_variable_names_is_read(tmp_path: Path) -> None:
    path = tmp_path / "mooncake.json"
    assert json_named_by("PLACE", {}) is None
    assert json_named_by("PLACE", {"PLACE": "", "OTHER": str(path)}) is None
    path.write_text('{"protocol": "tcp"}')
    assert json_named_by("PLACE", {"PLACE": str(path)}) == {"protocol": "tcp"}


@pytest.mark.parametrize("content", [None, "", "[1]", "{", b"\xff"])
def test_a_named_file_that_cannot_be_read_is_refused(
    tmp_path: Path, content: str | bytes | None
) -> None:
    path = tmp_path / "mooncake.json"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=r"PLACE=.*mooncake\.json cannot be read"):
        json_named_by("PLACE", {"PLACE": str(path)})


# One request's options


@pytest.mark.parametrize("params", [None, {}, {"other": 1}, {"kvpool": None}, {"kvpool": {}}])
def test_a_request_that_says_nothing_gets_the_default(params: dict[str, Any] | None) -> None:
    assert read_request_options(params) == RequestOptions()


@pytest.mark.parametrize(
    ("ours", "options"),
    [
        ({"save": False}, RequestOptions(save=False)),
        ({"load": False}, RequestOptions(load=False)),
        ({"pin_s": 60, "ttl_s": 60.5}, RequestOptions(pin_s=60.0, ttl_s=60.5)),
        ({"tenant": "team-a.1"}, RequestOptions(tenant="team-a.1")),
        ({"pin_s": 3600}, RequestOptions(pin_s=3600.0)),
        ({"expect_tokens": 0}, RequestOptions()),
        (
            {"expect_tokens": 512, "expect_timeout_ms": 0},
            RequestOptions(expect_tokens=512, expect_timeout_ms=0),
        ),
        # The answer of an earlier request, passed on.
        ({"tokens": 512}, RequestOptions(expect_tokens=512, expect_end=True)),
        ({"tokens": 0}, RequestOptions()),
        ({"tokens": None}, RequestOptions()),
        ({"tokens": 512, "expect_tokens": 256}, RequestOptions(expect_tokens=256)),
        ({"tokens": 512, "expect_tokens": 0}, RequestOptions()),
        (
            {"tokens": 512, "expect_timeout_ms": 5},
            RequestOptions(expect_tokens=512, expect_timeout_ms=5, expect_end=True),
        ),
        (
            {"tokens": 512, "save": False},
            RequestOptions(save=False, expect_tokens=512, expect_end=True),
        ),
        ({"expect_end": True}, RequestOptions(expect_end=True)),
        ({"expect_from": "[::1]:8000"}, RequestOptions(expect_from="[::1]:8000")),
        ({"hand_over": True}, RequestOptions(hand_over=True)),
        (
            {"tokens": 512, "notices": ["tcp://10.0.0.1:7000", "tcp://host:7001"]},
            RequestOptions(
                expect_tokens=512,
                expect_end=True,
                notices=("tcp://10.0.0.1:7000", "tcp://host:7001"),
            ),
        ),
        ({"notices": []}, RequestOptions()),
    ],
)
def test_a_requests_options_are_read(ours: dict[str, Any], options: RequestOptions) -> None:
    assert read_request_options({"kvpool": ours}) == options


def test_what_proxies_pass_on_beside_ours_does_not_matter() -> None:
    passed_on = {
        "do_remote_prefill": True,
        "remote_block_ids": [[1, 2]],
        "remote_host": "10.0.0.1",
        "kvpool": {"tokens": 512},
    }
    assert read_request_options(passed_on) == RequestOptions(expect_tokens=512, expect_end=True)


@pytest.mark.parametrize(
    ("params", "is_handed_over"),
    [
        ({"do_remote_decode": True, "do_remote_prefill": False}, True),
        ({"do_remote_decode": True, "kvpool": {"save": True}}, True),
        ({"do_remote_decode": True, "kvpool": {"hand_over": False}}, False),
        ({"do_remote_decode": False, "kvpool": {"hand_over": True}}, True),
        ({"do_remote_decode": "yes"}, False),
        ({"do_remote_decode": 1}, False),
        ({"do_remote_prefill": True}, False),
    ],
)
def test_proxies_of_other_connectors_ask_for_a_hand_over(
    params: dict[str, Any], is_handed_over: bool
) -> None:
    assert read_request_options(params).hand_over is is_handed_over


# A request's options that cannot be read, and what the error says of them.
NOT_READ: list[tuple[object, str]] = [
    ([], "expected an object"),
    ("save", "expected an object"),
    (False, "expected an object"),
    ({"sav": True}, "did you mean 'save'"),
    ({"save": 1}, r"\.save"),
    ({"save": "no"}, r"\.save"),
    ({"save": "false"}, r"\.save"),
    ({"save": None}, r"\.save"),
    ({"load": "no"}, r"\.load"),
    ({"expect_tokens": -1}, "expect_tokens"),
    ({"expect_tokens": "512"}, "expect_tokens"),
    ({"expect_tokens": 1.5}, "expect_tokens"),
    ({"expect_timeout_ms": -1}, "expect_timeout_ms"),
    ({"expect_from": "x" * 129}, "length <= 128 .*expect_from"),
    ({"pin_s": -1}, ">= 0.* at .*pin_s"),
    ({"ttl_s": float("nan")}, ">= 0.* at .*ttl_s"),
    ({"ttl_s": 5, "pin_s": 6}, "ttl_s must not be less than pin_s"),
    ({"tenant": "a b"}, r"matching .*\.tenant"),
    ({"tenant": "x" * 65}, r"matching .*\.tenant"),
    ({"tenant": "a\n"}, r"matching .*\.tenant"),
    ({"expect_timeout_ms": MAX_EXPECT_TIMEOUT_MS + 1}, "expect_timeout_ms"),
    ({"save": True, "expect_timeout_ms": "soon"}, "expect_timeout_ms"),
    ({"tokens": "all"}, r"\.tokens"),
    ({"tokens": -1}, "expect_tokens"),
    ({"hand_over": 1}, r"\.hand_over"),
    ({"notices": "tcp://10.0.0.1:7000"}, r"\.notices"),
    ({"notices": [7000]}, r"\.notices"),
    ({"notices": ["ipc:///tmp/x"]}, "notices: 'ipc:///tmp/x' is no endpoint"),
    ({"notices": ["tcp://10.0.0.1"]}, "notices: .* is no endpoint"),
    ({"notices": ["tcp://" + "x" * 300 + ":1"]}, "notices: .* is no endpoint"),
    ({"notices": ["tcp://10.0.0.1:7000"] * 65}, "length <= 64 .*notices"),
]


@pytest.mark.parametrize(("ours", "message"), NOT_READ)
def test_what_a_request_cannot_have_is_refused(ours: object, message: str) -> None:
    with pytest.raises(ConfigError, match=f"kv_transfer_params.kvpool.*{message}"):
        read_request_options({"kvpool": ours})


OURS = '{"kv_connector":"KVPoolConnector","kv_role":"kv_both"'


@pytest.mark.parametrize(
    ("given", "config"),
    [
        (OURS + "}", KVPoolConfig()),
        (
            OURS + ',"kv_connector_extra_config":{"store":"s3://x"}}',
            KVPoolConfig(store="s3://x"),
        ),
        (
            '{"kv_connector":"MultiConnector","kv_connector_extra_config":{"connectors":['
            '{"kv_connector":"NixlConnector"},' + OURS + ',"kv_connector_extra_config":'
            '{"chunk_tokens":64}}]}}',
            KVPoolConfig(chunk_tokens=64),
        ),
    ],
)
def test_the_pools_options_among_connectors(
    given: str, config: KVPoolConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [each for each in os.environ if each.startswith(ENV_PREFIX)]:
        monkeypatch.delenv(name)
    assert read_engine_config(given) == config


@pytest.mark.parametrize("given", ["{}", '{"kv_connector":"NixlConnector"}'])
def test_a_configuration_without_the_pool_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match="--kv-transfer-config names no KVPoolConnector"):
        read_engine_config(given)


@pytest.mark.parametrize(
    ("role", "says"),
    [
        ("", "kv_role=''; known are: kv_both, kv_consumer, kv_producer"),
        (',"kv_role":"kv_bth"', "kv_role='kv_bth'; did you mean 'kv_both'?"),
        (',"kv_role":null', "kv_role=''; known are"),
    ],
)
def test_a_configuration_that_vllm_refuses_for_its_role_is_refused(role: str, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"--kv-transfer-config: {says}")):
        read_engine_config(f'{{"kv_connector":"KVPoolConnector"{role}}}')


@pytest.mark.parametrize(
    "given",
    ["", "[]", "{", '{"kv_connector":3}', '{"kv_connector_extra_config":{"connectors":7}}'],
)
def test_what_is_no_configuration(given: str) -> None:
    with pytest.raises(ConfigError, match="no configuration of a connector"):
        read_engine_config(given)
