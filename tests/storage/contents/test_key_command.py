"""Keys from a command: what it prints, and every way in which it can fail."""

import base64
import os
import shlex
import sys
import time
from pathlib import Path

import pytest

from vllm_kvpool.config import KVPoolConfig, read_config
from vllm_kvpool.errors import ConfigError
from vllm_kvpool.storage.contents import key_command
from vllm_kvpool.storage.contents.encryption import CellCipher, given_keys

OLD, NEW = (bytes([i]) * 32 for i in range(2))
OLD_LINE, NEW_LINE = (base64.b64encode(key).decode() for key in (OLD, NEW))
SECRET = "s3cr3t-token"
LIMIT_S = 20


def by_python(code: str) -> KVPoolConfig:
    """A configuration whose command is a program in Python with a secret argument."""
    command = shlex.join([sys.executable, "-c", code, SECRET])
    return read_config({"encryption_key_command": command}, {})


def test_a_command_prints_what_a_file_has() -> None:
    config = by_python(f"print('# of the cluster\\n{NEW_LINE}\\n{OLD_LINE}  # until June')")
    assert config.encrypts_cells
    assert given_keys(config) == [NEW, OLD]


def test_a_command_is_split_into_words_and_not_given_to_a_shell(tmp_path: Path) -> None:
    path = tmp_path / "two words"
    path.write_text(NEW_LINE)
    config = read_config({"encryption_key_command": f"cat '{path}'"}, {})
    assert given_keys(config) == [NEW]
    piped = read_config({"encryption_key_command": f"cat '{path}' | cat; $HOME"}, {})
    with pytest.raises(ConfigError, match=r"cat ended with exit status 1: cat: '?\|'?: No such"):
        given_keys(piped)


def test_rotation_is_that_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    config = read_config({"encryption_key_command": f"cat {shlex.quote(str(path))}"}, {})
    ids = []
    for content in (OLD_LINE, f"{OLD_LINE}\n{NEW_LINE}", f"{NEW_LINE}\n{OLD_LINE}", NEW_LINE):
        path.write_text(content)
        ids.append(CellCipher(given_keys(config)).key_ids)
    [old], [new] = ids[0], ids[3]
    assert ids == [[old], [old, new], [new, old], [new]]


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (
            "import sys; sys.exit('access denied\\nrequest 7')",
            "ended with exit status 1: access denied$",
        ),
        ("import sys; sys.exit(3)", "ended with exit status 3: nothing on standard error$"),
        ("import os; os.kill(os.getpid(), 15)", "ended with signal 15"),
        ("", "prints has no key"),
        (f"print('{OLD_LINE[:-4]}')", "prints, line 1: expected 32 bytes in base64"),
        (f"print('\\n{SECRET}')", "prints, line 2: expected 32 bytes in base64"),
        ("import sys; sys.stdout.buffer.write(bytes([200]))", "prints is not ASCII text"),
        ("while True: print('x' * 4096)", "prints more than 65536 bytes"),
        ("import sys\nwhile True: sys.stderr.write('x' * 4096)", "prints more than 65536 bytes"),
    ],
)
def test_a_command_that_fails_is_named_without_its_arguments_and_its_output(
    code: str, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        given_keys(by_python(code))
    said = str(caught.value)
    assert f"encryption_key_command {sys.executable} " in said
    assert SECRET not in said
    assert OLD_LINE[:8] not in said
    assert caught.value.__cause__ is None


def test_a_program_that_is_not_there_is_named() -> None:
    config = read_config({"encryption_key_command": "/none/kms --key 7"}, {})
    with pytest.raises(ConfigError, match="/none/kms cannot be run: No such file or directory"):
        given_keys(config)


@pytest.mark.parametrize("closes", [False, True])
def test_a_command_that_hangs_is_killed_with_what_it_has_started(
    closes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_command, "TIMEOUT_S", 1.0)
    path = tmp_path / "pid"
    closing = "os.close(1); os.close(2)" if closes else ""
    code = (
        "import os, pathlib, subprocess, time\n"
        "child = subprocess.Popen(['sleep', '1000'])\n"
        f"pathlib.Path({str(path)!r}).write_text(str(child.pid))\n"
        f"{closing}\n"
        "time.sleep(1000)\n"
    )
    began = time.monotonic()
    with pytest.raises(ConfigError, match="has not ended after 1 s and was killed"):
        given_keys(by_python(code))
    assert time.monotonic() - began < LIMIT_S
    child = Path("/proc", path.read_text(), "stat")
    deadline = time.monotonic() + LIMIT_S
    while child.exists() and child.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline, "the child still runs"
        os.sched_yield()


def test_a_file_and_a_command_exclude_each_other() -> None:
    with pytest.raises(
        ConfigError, match="encryption_key_file or encryption_key_command, not both"
    ):
        read_config({"encryption_key_file": "/k", "encryption_key_command": "kms"}, {})
