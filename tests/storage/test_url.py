"""Store urls: what they say, what is refused and with which words."""

import builtins
import json
import socket
import sys
import traceback
from pathlib import Path
from types import ModuleType
from urllib.parse import quote

import pytest

import tests.support.memory_store  # noqa: F401  (its scheme)
from vllm_kvpool.config import json_named_by
from vllm_kvpool.errors import ConfigError, StoreUnreachable
from vllm_kvpool.storage.backends import open_store
from vllm_kvpool.storage.mooncake import MooncakeOptions
from vllm_kvpool.storage.url import (
    DEFAULT_FILE_BYTES,
    DEFAULT_LOCAL_BUFFER_BYTES,
    DEFAULT_SEGMENT_BYTES,
    MAX_STORE_BYTES,
    MOONCAKE_CONFIG_ENV,
    S3_CREDENTIALS,
    FileOptions,
    S3Options,
    StoreSpec,
    check_capacity,
    names_no_master,
    parse_store_url,
)

GIB = 1 << 30


def configured(path: str) -> dict[str, object] | None:
    """Mooncake's own configuration, its variable naming `path`."""
    return json_named_by(MOONCAKE_CONFIG_ENV, {MOONCAKE_CONFIG_ENV: path})


def test_a_file_url() -> None:
    assert parse_store_url("file:///nvme/kv%20pool/?size=500GiB&required=1") == StoreSpec(
        url="file:///nvme/kv%20pool/?size=500GiB&required=1",
        scheme="file",
        required=True,
        options=FileOptions(path="/nvme/kv pool", size_bytes=500 << 30),
    )
    assert parse_store_url("file:///x").options == FileOptions("/x", DEFAULT_FILE_BYTES)


def test_a_mooncake_url() -> None:
    url = "mooncake://10.0.0.1:50051?protocol=rdma&segment=8GiB&device=mlx5_0,mlx5_1&local_buffer=64MiB"
    options = parse_store_url(url + "&metadata=http://m:8080/metadata&local_hostname=me").options
    assert options == MooncakeOptions(
        master_host="10.0.0.1",
        master_port=50051,
        protocol="rdma",
        device="mlx5_0,mlx5_1",
        metadata="http://m:8080/metadata",
        segment_bytes=8 * GIB,
        local_buffer_bytes=64 << 20,
        local_hostname="me",
    )
    options = parse_store_url("mooncake://[fe80::1]:50051?segment=0").options
    assert options == MooncakeOptions(
        "fe80::1", 50051, "tcp", "", "P2PHANDSHAKE", 0, DEFAULT_LOCAL_BUFFER_BYTES, ""
    )


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("", "not a store url"),
        ("/var/cache", "write file:///var/cache$"),
        ("var/cache", "write for example file:///"),
        ("file:/var/cache", "not a store url"),
        ("flie:///x", "unknown store scheme flie://; did you mean 'file'?"),
        ("redis://h:1", "known are: file, memory, mooncake, s3"),
        ("file:///x?sise=1GiB", "unknown option sise; did you mean 'size'?"),
        (
            "file:///x?segment=1GiB",
            "unknown option segment; known are: get_lanes, io, policy, put_lanes, required, shares",
        ),
        ("file:///x?size=1GiB&size=2GiB", "size is given twice"),
        ("file:///x?size=lots", "size: 'lots' is not a size"),
        ("file:///x?size=", "'' is not a size"),
        ("file:///x?size=1023KiB", "size=1023KiB must be from 1048576"),
        ("file:///x?size=0", "at least one byte"),
        ("file:///x?size=2000TiB", f"to {MAX_STORE_BYTES} bytes"),
        ("file:///x?required=maybe", "required=maybe must be 0 or 1"),
        ("file://relative/path", "absolute, with three slashes: file:///relative/path$"),
        ("file://", "name a directory"),
        ("file:///", "name a directory"),
        ("file:///a%00b", "name a directory"),
        ("file:///a#b", "no #fragment"),
        ("file:///a\tb", "write a tab as %09"),
        ("file:///a\n", "leave out ends of lines"),
        ("mooncake://host", "needs a host and a port, not 'host'"),
        ("mooncake://:50051", "needs a host and a port"),
        ("mooncake://host:port", "'port' is not a port"),
        ("mooncake://host:0", "'0' is not a port"),
        ("mooncake://host:65536", "'65536' is not a port"),
        ("mooncake://[::1:50051", "Invalid IPv6 URL"),
        ("mooncake://host:1/path", "no path"),
        ("mooncake://host:1?protocol=rmda", "protocol=rmda; did you mean 'rdma'?"),
        ("mooncake://host:1?segment=1MiB", "segment=1MiB must be from .* or 0"),
        ("mooncake://host:1?local_bufer=1GiB", "did you mean 'local_buffer'?"),
        ("mooncake://", "MOONCAKE_CONFIG_PATH"),
    ],
)
def test_what_is_refused_and_with_which_words(url: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace("?", r"\?")):
        parse_store_url(url)


def test_mooncake_without_a_host_is_configured_by_its_file(tmp_path: Path) -> None:
    path = tmp_path / "mooncake.json"
    config = {
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": "10.0.0.2:50052",
        "protocol": "rdma",
        "device_name": "mlx5_2",
        "global_segment_size": "4GB",
        "local_buffer_size": 1 << 30,
        "mode": "embedded",
    }
    path.write_text(json.dumps(config))
    config_file = configured(str(path))
    expected = MooncakeOptions(
        "10.0.0.2", 50052, "rdma", "mlx5_2", "P2PHANDSHAKE", 4 * 10**9, 1 << 30, ""
    )
    assert parse_store_url("mooncake://", config_file).options == expected
    tcp = parse_store_url("mooncake://?protocol=tcp&required=1", config_file)
    assert isinstance(tcp.options, MooncakeOptions)
    assert (tcp.required, tcp.options.protocol, tcp.options.device) == (True, "tcp", "mlx5_2")
    named = parse_store_url("mooncake://h:1", config_file).options
    assert named == MooncakeOptions(
        "h", 1, "tcp", "", "P2PHANDSHAKE", DEFAULT_SEGMENT_BYTES, DEFAULT_LOCAL_BUFFER_BYTES, ""
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "cannot be read"),
        ("[]", "cannot be read"),
        ("{}", "needs a host and a port"),
        ('{"master_server_address": "h:1", "global_segment_size": 1.5}', "whole number"),
        (
            '{"master_server_address": "h:1", "global_segment_size": "4XB"}',
            "segment: .* not a size",
        ),
    ],
)
def test_a_bad_mooncake_file_is_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "mooncake.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        parse_store_url(
            "mooncake://", json_named_by(MOONCAKE_CONFIG_ENV, {"MOONCAKE_CONFIG_PATH": str(path)})
        )


def test_a_mooncake_file_that_is_not_there(tmp_path: Path) -> None:
    environ = {"MOONCAKE_CONFIG_PATH": str(tmp_path / "absent.json")}
    with pytest.raises(ConfigError, match=r"absent\.json cannot be read"):
        json_named_by(MOONCAKE_CONFIG_ENV, environ)
    with pytest.raises(ConfigError, match="set MOONCAKE_CONFIG_PATH"):
        parse_store_url("mooncake://", json_named_by(MOONCAKE_CONFIG_ENV, {}))


@pytest.mark.parametrize(
    ("url", "cell_bytes", "fits"),
    [
        ("file:///x?size=1056768", 1 << 20, True),  # and a page with the footer
        ("file:///x?size=1052671", 1 << 20, False),
        ("mooncake://h:1?segment=16MiB", 17 << 20, False),
        ("mooncake://h:1?segment=0", 17 << 20, True),
    ],
)
def test_a_store_smaller_than_a_cell_is_refused(url: str, cell_bytes: int, fits: bool) -> None:
    spec = parse_store_url(url)
    if fits:
        check_capacity(spec, cell_bytes)
    else:
        with pytest.raises(ConfigError, match="one cell needs"):
            check_capacity(spec, cell_bytes)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ModuleNotFoundError("No module named 'mooncake'", name="mooncake"), "pip install"),
        (
            ImportError("libibverbs.so.1: cannot open shared object file: No such file"),
            "apt-get install libibverbs1$",
        ),
    ],
)
def test_a_missing_wheel_or_library_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, error: ImportError, words: str
) -> None:
    real_import = builtins.__import__

    def fail_for_mooncake(name: str, *args: object, **kwargs: object) -> ModuleType:
        if name.startswith("mooncake"):
            raise error
        return real_import(name, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", fail_for_mooncake)
    with socket.create_server(("127.0.0.1", 0)) as server:
        spec = parse_store_url(f"mooncake://127.0.0.1:{server.getsockname()[1]}")
        with pytest.raises(ConfigError, match=words):
            open_store(spec, segment=False)


def test_a_master_that_is_down_is_unreachable_by_name() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    with pytest.raises(StoreUnreachable, match=f"{address}.*mooncake_master"):
        open_store(parse_store_url(f"mooncake://{address}"), segment=False)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("mooncake://", True),
        ("mooncake:///?protocol=tcp", True),
        ("mooncake://h:1", False),
        ("file:///mooncake:", False),
    ],
)
def test_which_urls_leave_all_to_mooncakes_own_configuration(url: str, expected: bool) -> None:
    assert names_no_master(url) is expected


KEYS = {"AWS_ACCESS_KEY_ID": "the-id", "AWS_SECRET_ACCESS_KEY": "the-secret"}


def test_an_s3_url() -> None:
    url = "s3://Bucket.a-b_c/team=x/kv.1/?region=eu-west-1&required=1"
    assert parse_store_url(url, environ=KEYS) == StoreSpec(
        url,
        "s3",
        True,
        S3Options("Bucket.a-b_c", "team=x/kv.1", "eu-west-1", "", path_style=True, anonymous=False),
    )
    check_capacity(parse_store_url(url, environ=KEYS), 1 << 60)


def s3_options(url: str, **environ: str) -> S3Options:
    options = parse_store_url(url, environ=KEYS | environ).options
    assert isinstance(options, S3Options)
    return options


def test_what_an_s3_url_leaves_out() -> None:
    aws = s3_options("s3://bucket", AWS_DEFAULT_REGION="eu-north-1")
    assert aws == S3Options("bucket", "", "eu-north-1", "", path_style=False, anonymous=False)
    own = s3_options("s3://bucket?endpoint=https://host:9000/")
    assert own == S3Options(
        "bucket", "", "us-east-1", "https://host:9000", path_style=True, anonymous=False
    )
    inherited = s3_options("s3://b-1", AWS_ENDPOINT_URL="https://host", AWS_REGION="auto")
    assert (inherited.endpoint, inherited.region) == ("https://host", "auto")
    assert s3_options(
        "s3://b-1?endpoint=https://mine", AWS_ENDPOINT_URL="https://host"
    ).endpoint == ("https://mine")
    assert s3_options("s3://b-1?endpoint=https://host&path_style=0").path_style is False
    assert s3_options("s3://b-1?region=r&path_style=1").path_style is True


def test_plain_http_is_for_loopback_or_said() -> None:
    for host in ("127.0.0.1:9000", "127.1.2.3", "localhost:9000", "[::1]:9000"):
        assert s3_options(f"s3://b-1?endpoint=http://{host}").endpoint == f"http://{host}"
    for host in ("10.0.0.1:9000", "minio.local", "localhost.evil.org"):
        with pytest.raises(ConfigError, match="allow_http=1"):
            s3_options(f"s3://b-1?endpoint=http://{host}")
        url = f"s3://b-1?endpoint=http://{host}&allow_http=1"
        assert s3_options(url).endpoint == f"http://{host}"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("s3://?region=r", "needs a bucket"),
        ("s3:///bucket?region=r", "needs a bucket"),
        ("s3://host:9000/bucket?region=r", "the server goes into endpoint="),
        ("s3://-b?region=r", "needs a bucket"),
        ("s3://bucket/a//b?region=r", "between single slashes"),
        ("s3://bucket/a/../b?region=r", "between single slashes"),
        ("s3://bucket/a%20b?region=r", "the prefix may have letters"),
        (f"s3://bucket/{'k' * 513}?region=r", "512 of them"),
        ("s3://bucket", "s3://bucket: name the bucket's region: region=, or AWS_REGION"),
        ("s3://bucket?regoin=r&endpoint=https://h", "unknown option regoin; did you mean 'region'"),
        ("s3://bucket?region=r&path_style=maybe", "path_style=maybe must be 0 or 1"),
        ("s3://bucket?secret_access_key=x", "do not belong in a url .secret_access_key.; set AWS_"),
        ("s3://bucket?endpoint=host:9000", "must be like https://host:9000"),
        ("s3://bucket?endpoint=ftp://host", "must be like https://host:9000"),
        ("s3://bucket?endpoint=https://", "must be like https://host:9000"),
        ("s3://bucket?endpoint=https://host:port", "must be like https://host:9000"),
        ("s3://bucket?endpoint=https://host:99999", "must be like https://host:9000"),
        ("s3://bucket?endpoint=https://h%3Fx=1", "without a query or user"),
        ("s3a://bucket", "unknown store scheme s3a://; did you mean 's3'?"),
    ],
)
def test_which_s3_urls_are_refused(url: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace("?", r"\?")):
        parse_store_url(url, environ=KEYS)


@pytest.mark.parametrize(
    "url",
    [
        "s3://AKIA:HIDDEN@bucket",
        "s3://AKIA:HIDD/EN@bucket?region=r",
        "s3a://AKIA:HIDDEN@bucket?region=r",
        "s3://bucket?region=r&secret_access_key=HIDDEN",
        "s3://bucket?region=r&aws_session_token=HIDDEN",
        "s3://bucket?region=r&acces_kee=HIDDEN",
        "s3://bucket?endpoint=https://AKIA:HIDDEN@host",
        "s3://[AKIA:HIDDEN@bucket",
    ],
)
def test_credentials_in_a_url_are_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_store_url(url, environ=KEYS)
    shown = "".join(traceback.format_exception(refused.value))
    assert "HIDD" not in shown
    assert "AKIA" not in shown


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({}, "no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
        ({"AWS_PROFILE": "me"}, "profiles and shared files are not read"),
        (
            {"AWS_ACCESS_KEY_ID": "i", "AWS_SECRET_ACCESS_KEY": ""},
            "AWS_SECRET_ACCESS_KEY is not set",
        ),
        ({"AWS_SECRET_ACCESS_KEY": "s"}, "AWS_ACCESS_KEY_ID is not set"),
        ({"AWS_ROLE_ARN": "a"}, "no credentials"),
    ],
)
def test_without_credentials_nothing_is_opened(environ: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_store_url("s3://bucket?region=r", environ=environ)
    for flag in ("anonymous", "instance_role"):
        if "AWS_ACCESS_KEY_ID" not in environ:
            options = parse_store_url(f"s3://bucket?region=r&{flag}=1", environ=environ).options
            assert isinstance(options, S3Options)
            assert options.anonymous is (flag == "anonymous")


@pytest.mark.parametrize("names", S3_CREDENTIALS)
def test_any_way_of_the_clients_to_find_credentials_will_do(names: tuple[str, ...]) -> None:
    environ = dict.fromkeys(names, "x")
    assert parse_store_url("s3://bucket?region=r", environ=environ).scheme == "s3"


def test_a_missing_client_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.delitem(sys.modules, "vllm_kvpool.storage.s3", raising=False)
    monkeypatch.delattr("vllm_kvpool.storage.s3", raising=False)
    spec = parse_store_url("s3://bucket?endpoint=http://127.0.0.1:1", environ=KEYS)
    with pytest.raises(ConfigError, match=r"pip install 'vllm-kvpool\[s3\]'"):
        open_store(spec, segment=False)


def test_an_s3_server_that_is_down_is_unreachable_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    spec = parse_store_url("s3://bucket?endpoint=http://127.0.0.1:1", environ=KEYS)
    with pytest.raises(StoreUnreachable, match=r"bucket at http://127\.0\.0\.1:1.* refused"):
        open_store(spec, segment=False)


def test_the_lanes_of_a_tier_are_the_stores_choice_or_the_urls() -> None:
    assert parse_store_url("file:///x").get_lanes == parse_store_url("file:///x").put_lanes == 0
    spec = parse_store_url("file:///x?get_lanes=4&put_lanes=16")
    assert (spec.get_lanes, spec.put_lanes) == (4, 16)


@pytest.mark.parametrize("option", ["get_lanes=0", "put_lanes=17", "get_lanes=two", "put_lanes="])
def test_a_senseless_number_of_lanes_is_refused_by_name(option: str) -> None:
    with pytest.raises(ConfigError, match=rf"{option.partition('=')[0]}=.*from 1 to 16"):
        parse_store_url(f"file:///x?{option}")


def test_a_parsed_url_has_no_user_of_its_metadata_server() -> None:
    """Commands, logs and `kvpool serve` show it."""
    given = "http://me:secret@host/x"
    for written in (given, quote(given), given.replace("@", "%40")):
        spec = parse_store_url(f"mooncake://m:1?metadata={written}&segment=0")
        assert spec.url == "mooncake://m:1?metadata=http://***@host/x&segment=0"
        assert isinstance(spec.options, MooncakeOptions)
        assert spec.options.metadata == given
    plain = "mooncake://m:1?metadata=redis://h&local_hostname=a@b"
    assert parse_store_url(plain).url == plain
    assert parse_store_url("file:///data@host/x?size=1GiB").url == "file:///data@host/x?size=1GiB"
