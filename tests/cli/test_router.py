"""The command `kvpool`."""

import socket
from pathlib import Path

import pytest
from click.testing import CliRunner

from vllm_kvpool.cli import main
from vllm_kvpool.router.config import read_config
from vllm_kvpool.router.run import admin_token

ENGINE = '[[replicas]]\nurl = "http://127.0.0.1:9"\nrole = "decode"\n'


def invoke(path: Path, text: str, *options: str) -> tuple[int, str]:
    path.write_text(text)
    result = CliRunner().invoke(main, ["router", "--config", str(path), *options])
    return result.exit_code, result.output


def test_a_file_is_checked_and_nothing_is_started(tmp_path: Path) -> None:
    path = tmp_path / "router.toml"
    assert invoke(path, ENGINE, "--check") == (0, f"{path} is valid\n")


@pytest.mark.parametrize("options", [(), ("--check",)])
@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "no engines"),
        ("[frunt]\n" + ENGINE, "did you mean 'front'"),
        (
            '[admin]\nlisten = "127.0.0.1:0"\ntoken_file = "/dev/null"\n' + ENGINE,
            "token_file /dev/null: it is no regular file",
        ),
    ],
)
def test_a_mistake_is_said_in_one_line(
    tmp_path: Path, text: str, word: str, options: tuple[str, ...]
) -> None:
    code, said = invoke(tmp_path / "router.toml", text, *options)
    assert code == 1
    assert word in said
    assert said.startswith("Error: ")
    assert said.count("\n") == 1


def test_empty_token_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "token").touch(0o600)
    admin = '[admin]\nlisten = "127.0.0.1:0"\ntoken_file = "token"\n'
    code, said = invoke(tmp_path / "router.toml", admin + ENGINE)
    assert code == 1
    assert f"token_file {tmp_path}/token is empty; write a token into it" in said


def test_a_token_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    admin = '[admin]\nlisten = "127.0.0.1:0"\ntoken_file = "none/token"\n'
    code, said = invoke(tmp_path / "router.toml", admin + ENGINE)
    assert code == 1
    assert f"token_file {tmp_path}/none/token cannot be written: No such file" in said


def test_a_token_file_is_written_for_its_owner_alone(tmp_path: Path) -> None:
    config = read_config(
        {
            "admin": {"token_file": str(tmp_path / "token")},
            "replicas": [{"url": "http://a:1", "role": "both"}],
        }
    )
    token = admin_token(config)
    assert len(token) >= 32
    assert admin_token(config) == token == (tmp_path / "token").read_text()
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600


def test_no_file(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["router", "--config", str(tmp_path / "none"), "--check"])
    assert result.exit_code == 1
    assert "cannot be read" in result.output


def test_an_address_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        text = f'[front]\nlisten = "127.0.0.1:{port}"\n[admin]\nlisten = "127.0.0.1:0"\n'
        code, said = invoke(tmp_path / "router.toml", text + ENGINE)
    assert code == 1
    assert "cannot listen" in said
    assert str(port) in said
