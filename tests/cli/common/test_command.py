"""Logs and stderr of all commands. Their errors: `test_stores.py`."""

import os
import subprocess
import sys

import pytest

from tests.support.mooncake_master import MooncakeMaster

NATIVE = (
    "import logging, os, sys; from vllm_kvpool.cli.common.command import hide_native_logs\n"
    "hide_native_logs()\n"
    "hide_native_logs()\n"
    "logging.basicConfig(format='%(message)s')\n"
    "os.write(2, b'native\\n')\n"
    "logging.warning('logged')\n"
    "print('own', file=sys.stderr)\n"
)


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != "MC_LOG_LEVEL"}
    return subprocess.run(
        [sys.executable, *command],
        env={**env, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_native_logs_are_hidden_and_own_lines_are_not() -> None:
    assert run("-c", NATIVE).stderr == "logged\nown\n"
    assert run("-c", NATIVE, MC_LOG_LEVEL="INFO").stderr == "native\nlogged\nown\n"


def test_a_closed_stderr_is_left_alone() -> None:
    done = subprocess.run(
        ["sh", "-c", f"'{sys.executable}' -m vllm_kvpool doctor --store host://1GiB 2>&-"],
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.mooncake
def test_a_command_on_mooncake_prints_none_of_its_log() -> None:
    with MooncakeMaster() as master:
        url = f"mooncake://{master.address}?protocol=tcp"
        quiet = run("-m", "vllm_kvpool", "doctor", "--store", url)
        loud = run("-m", "vllm_kvpool", "doctor", "--store", url, MC_LOG_LEVEL="INFO")
    assert (quiet.returncode, quiet.stderr) == (1, "")  # no engine has given memory
    assert "no engine has given memory to it yet" in quiet.stdout
    assert "client_service.cpp" in loud.stderr
