"""Every option that names a file with secrets, or a file written under a guessable name.

Needs root where another user may have planted the file.
"""

import base64
import contextlib
import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import zmq.auth

from vllm_kvpool.config import EmbedsConfig, KVPoolConfig
from vllm_kvpool.errors import ConfigError
from vllm_kvpool.metrics import write_stats
from vllm_kvpool.network.transport_zmq import KEY_NAME, read_keys
from vllm_kvpool.private_files import read_secret
from vllm_kvpool.router.config import (
    AdminConfig,
    DiscoveryConfig,
    FrontConfig,
    RouterConfig,
    read_salt,
    read_tenants,
)
from vllm_kvpool.router.run import admin_token
from vllm_kvpool.storage.contents import encryption
from vllm_kvpool.transfer.trace import TraceFile

OTHER = 12_345
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be several users")
KEY = "k" * 32


def token_of(path: Path) -> str:
    return admin_token(RouterConfig(admin=AdminConfig(token_file=str(path))))


def trace(path: Path) -> None:
    trace = TraceFile(path, "engine", 1)
    trace.close(30.0)


# An option, and the function that reads its secret from a path.
SECRETS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "encryption_key_file": (base64.b64encode(bytes(32)).decode(), encryption.read_keys),
    "keys_file": (f'[[tenants]]\nname = "a"\nkey = "{KEY}"\n', read_tenants),
    "token_file": ("token", token_of),
    "salt_file": ("s" * 44, read_salt),
    "curve_dir": ("", lambda path: read_keys(str(path.parent))),
}
# An option, and the function that writes to a path.
WRITTEN: dict[str, Callable[[Path], object]] = {
    "stats_file": lambda path: write_stats(path, {"kvpool_hit_tokens": 1}),
    "trace_file": trace,
    "token_file": token_of,
}
NOT_JUDGED = {
    "file": "discovery: no secret, and read alone",
}


def test_every_option_that_names_a_file_is_in_a_table() -> None:
    pool = [each.name for kind in (KVPoolConfig, EmbedsConfig) for each in dataclasses.fields(kind)]
    router = [
        each.name
        for kind in (FrontConfig, AdminConfig, DiscoveryConfig)
        for each in msgspec.structs.fields(kind)
    ]
    endings = ("file", "_dir")
    named = {each for each in (*pool, *router) if each.endswith(endings)}
    assert named == SECRETS.keys() | WRITTEN.keys() | NOT_JUDGED.keys()


def secret(option: str, directory: Path) -> tuple[Path, Callable[[Path], object]]:
    """Return a file that is fit for the option's secret, and its reader."""
    text, read = SECRETS[option]
    path = directory / f"{KEY_NAME}.key_secret"
    if option == "curve_dir":
        zmq.auth.create_certificates(directory, KEY_NAME)
    else:
        path.write_text(text)
    path.chmod(0o600)
    return path, read


@pytest.mark.parametrize("option", SECRETS)
def test_secret_of_our_own_file_is_read(option: str, tmp_path: Path) -> None:
    path, read = secret(option, tmp_path)
    assert read(path)


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o620, 0o602, 0o644])
@pytest.mark.parametrize("option", SECRETS)
def test_secret_that_others_can_read_or_write_is_refused(
    option: str, mode: int, tmp_path: Path
) -> None:
    path, read = secret(option, tmp_path)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=r"others can (read|write) it.*chmod"):
        read(path)


@AS_ROOT
@pytest.mark.parametrize("option", SECRETS)
def test_secret_of_another_user_is_refused(option: str, tmp_path: Path) -> None:
    path, read = secret(option, tmp_path)
    os.chown(path, OTHER, -1)
    with pytest.raises(ConfigError, match=f"belongs to uid {OTHER}"):
        read(path)


@AS_ROOT
@pytest.mark.parametrize("option", SECRETS)
def test_secret_behind_another_users_link_is_refused(option: str, tmp_path: Path) -> None:
    """Otherwise, another user could choose which of our files counts.

    Links of our own are followed.
    """
    path, read = secret(option, tmp_path)
    path.rename(tmp_path / "moved")
    path.symlink_to(tmp_path / "moved")
    assert read(path)
    os.chown(path, OTHER, -1, follow_symlinks=False)
    with pytest.raises(ConfigError, match=f"belongs to uid {OTHER}"):
        read(path)


@pytest.mark.parametrize("option", [each for each in SECRETS if each != "curve_dir"])
def test_fifo_in_the_place_of_a_secret_is_refused_at_once(option: str, tmp_path: Path) -> None:
    path, read = secret(option, tmp_path)
    path.unlink()
    os.mkfifo(path, 0o600)
    with pytest.raises(ConfigError, match="no regular file"):
        read(path)


def test_error_of_a_secret_does_not_show_it(tmp_path: Path) -> None:
    for option in SECRETS:
        path, read = secret(option, tmp_path)
        path.chmod(0o644)
        with pytest.raises(ConfigError) as caught:
            read(path)
        assert KEY not in str(caught.value)


def test_secret_of_any_size_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_kvpool.private_files.MAX_SECRET_BYTES", 8)
    path = tmp_path / "secret"
    path.write_text("123456789")
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="more than 8 bytes"):
        read_secret(path, "option")


def plant_link(path: Path, victim: Path) -> None:
    path.symlink_to(victim)


def plant_link_to_nothing(path: Path, victim: Path) -> None:
    path.symlink_to(victim.with_name("elsewhere"))


def plant_hard_link(path: Path, victim: Path) -> None:
    path.hardlink_to(victim)


def plant_fifo(path: Path, victim: Path) -> None:
    os.mkfifo(path)


PLANTS = (plant_link, plant_link_to_nothing, plant_hard_link, plant_fifo)


@pytest.mark.parametrize("plant", PLANTS)
@pytest.mark.parametrize("option", WRITTEN)
def test_nothing_is_written_through_what_others_have_put_there(
    option: str, plant: Callable[[Path, Path], None], tmp_path: Path
) -> None:
    directory = tmp_path / "ours"
    directory.mkdir(mode=0o700)
    victim = tmp_path / "victim"
    victim.write_text("precious")
    victim.chmod(0o600)
    names = {"engines.json", "engines.json.tmp", "engines.json.new"}
    for name in names:
        plant(directory / name, victim)
    with contextlib.suppress(ConfigError):  # refused is as good
        WRITTEN[option](directory / "engines.json")
    assert victim.read_text() == "precious"
    assert not (tmp_path / "elsewhere").exists()
    left = {each.name for each in directory.iterdir()}
    assert left <= names | {"engines.json.lock", "engines.json.unreadable"}


@AS_ROOT
def test_trace_does_not_go_over_another_users_file(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text("precious")
    os.chown(path, OTHER, -1)
    trace(path)
    assert path.read_text() == "precious"
