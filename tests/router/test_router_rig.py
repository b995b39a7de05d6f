"""The loop of the router's tests."""

import asyncio

import pytest

from tests.support.router_rig import run


async def leave_open() -> None:
    await asyncio.get_running_loop().create_server(asyncio.Protocol, "127.0.0.1", 0)


def test_run_with_open_handles_fails_and_names_them() -> None:
    """The end of the loop waited for them without end."""
    with pytest.raises(AssertionError, match="TCPServer closed=False"):
        run(leave_open)


def test_run_that_fails_with_open_handles_raises_its_own_error() -> None:
    async def fail() -> None:
        await leave_open()
        raise TimeoutError("late")

    with pytest.raises(TimeoutError, match="late"):
        run(fail)
