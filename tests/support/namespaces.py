"""Network namespaces: hosts of their own on one machine. Needs root, and `ip` of iproute2."""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Self, TypeVar

import pytest

from tests.support.mooncake_master import MooncakeMaster
from tests.support.server_process import ServerProcess, free_port

T = TypeVar("T")

COMMAND_LIMIT_S = 10.0
CLONE_NEWNET = 0x40000000
ANY_ADDRESS = "0.0.0.0"  # safe in a namespace with only a link and a loopback
NOT_HERE = (  # errors of `ip` and `tc` where the kernel or container forbids namespaces
    "Operation not permitted",
    "Permission denied",
    "Operation not supported",
    "Unknown device type",
    "qdisc kind is unknown",
    "Read-only file system",
)

_libc = ctypes.CDLL(None, use_errno=True)


class NoNamespaces(Exception):
    """Network namespaces cannot be made on this machine; the text says why."""


def require_namespaces() -> None:
    """Raise NoNamespaces if this machine is known to allow no network namespaces."""
    if os.geteuid():
        raise NoNamespaces("network namespaces need root")
    if shutil.which("ip") is None:
        raise NoNamespaces("there is no program `ip` (iproute2)")


def ip(*arguments: str) -> None:
    """Run `ip`. Raise NoNamespaces if this machine does not allow the command."""
    run_tool("ip", *arguments)


def run_tool(*command: str) -> None:
    """Run a tool of iproute2. Raise NoNamespaces if this machine does not allow the command."""
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=COMMAND_LIMIT_S, check=False
    )
    if done.returncode:
        error = f"{' '.join(command)}: {done.stderr.strip()}"
        if any(reason in done.stderr for reason in NOT_HERE):
            raise NoNamespaces(error)
        raise RuntimeError(error)


def enter(namespace: str) -> None:
    """Move this thread, and threads that it starts later, into a namespace. Raises OSError."""
    with Path("/run/netns", namespace).open() as place:
        if _libc.setns(place.fileno(), CLONE_NEWNET):
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error), namespace)


@contextmanager
def joined_hosts(first: str, second: str, bits: int) -> Iterator[tuple[str, str]]:
    """Make two hosts with these addresses, joined by a cable; yield their namespaces' names.

    Raises:
        NoNamespaces: This machine allows no network namespaces.
    """
    require_namespaces()
    names = f"kvpool-{os.getpid()}-first", f"kvpool-{os.getpid()}-second"
    with ExitStack() as undo:
        for name in names:
            ip("netns", "add", name)
            undo.callback(ip, "netns", "delete", name)
        cable = ["link", "add", "eth0", "netns", names[0], "type", "veth"]
        ip(*cable, "peer", "name", "eth0", "netns", names[1])
        for name, address in zip(names, (first, second), strict=True):
            set_up(name, address, bits)
        yield names


def set_up(name: str, address: str, bits: int) -> None:
    """Give a host's `eth0` its address, and bring up `eth0` and the loopback."""
    ip("-n", name, "address", "add", f"{address}/{bits}", "dev", "eth0")
    ip("-n", name, "link", "set", "lo", "up")
    ip("-n", name, "link", "set", "eth0", "up")


@contextmanager
def entered_or_skipped(hosts: AbstractContextManager[T]) -> Iterator[T]:
    """Enter hosts. Skip the test, with the reason, if the machine allows no namespaces."""
    with ExitStack() as stack:
        try:
            entered = stack.enter_context(hosts)
        except NoNamespaces as reason:
            pytest.skip(f"no network namespaces here: {reason}")
        yield entered


class Inside:
    """A thread in a namespace. Processes and sockets that it makes live in the namespace too.

    The thread lives until the end of the `with`: processes that it starts may end with it.
    """

    def __init__(self, namespace: str) -> None:
        self._thread = ThreadPoolExecutor(1, initializer=enter, initargs=(namespace,))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._thread.shutdown()

    def call(self, function: Callable[[], T]) -> T:
        """Call a function in the namespace and return its result."""
        return self._thread.submit(function).result()

    @contextmanager
    def running(self, server: ServerProcess) -> Iterator[None]:
        """Run a server in the namespace."""
        self.call(server.__enter__)
        try:
            yield
        finally:
            self.call(lambda: server.__exit__(None, None, None))


class HostMaster(MooncakeMaster):
    """A Mooncake master that listens at every address of a host; `Inside` must start it."""

    def __init__(self, host: str) -> None:
        super().__init__()
        self._host = host

    @property
    def address(self) -> str:
        return f"{self._host}:{self.port}"

    def arguments(self) -> list[str]:
        return [
            f"--rpc_port={self.port}",
            f"--rpc_address={ANY_ADDRESS}",
            f"--metrics_port={free_port()}",
            f"--metrics_host={ANY_ADDRESS}",
        ]
