"""Servers of the test environment, and what is left of one that does not start."""

import pytest

from tests.support.server_process import ServerProcess


class Absent(ServerProcess):
    program = "kvpool-no-such-program"
    start_timeout_s = 5.0

    def arguments(self) -> list[str]:
        return []


def test_one_that_does_not_start_leaves_nothing_open() -> None:
    """Its log would fail the test in which garbage is collected next."""
    server = Absent()
    with pytest.raises((RuntimeError, FileNotFoundError)), server:
        raise AssertionError("it has started")
    assert server._log.closed
