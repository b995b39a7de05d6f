"""The limit of open files, tried in processes of its own."""

import subprocess
import sys

TRY = """
import resource, sys
from vllm_kvpool.router.run import allow_connections
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))
print(allow_connections(1000), resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def attempt(soft: int, hard: int) -> tuple[str, str]:
    command = [sys.executable, "-c", TRY, str(soft), str(hard)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    return done.stdout.strip(), done.stderr


def test_it_is_raised_as_far_as_it_may() -> None:
    assert attempt(100, 4000) == ("2512 (2512, 4000)", "")


def test_what_is_enough_stays() -> None:
    assert attempt(3000, 4000) == ("3000 (3000, 4000)", "")


def test_too_little_is_said() -> None:
    said, warning = attempt(100, 2000)
    assert said == "2000 (2000, 2000)"
    assert "ulimit" in warning
