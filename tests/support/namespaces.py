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
ANY_ADDRESS = "0.0.0.0"  # of a namespace that has only its link and its loopback
NOT_HERE = (  # what `ip` and `tc` say where a kernel or a container does not allow it
    "Operation not permitted",
    "Permission denied",
    "Operation not supported",
    "Unknown device type",
    "qdisc kind is unknown",
    "Read-only file system",
)

_libc = ctypes.CDLL(None, use_errno=True)


class NoNamespaces(Exception):
    """This machine does not let us make network namespaces; says why."""


def require_namespaces() -> None:
    """NoNamespaces where it is known beforehand that there are none."""
    if os.geteuid():
        raise NoNamespaces("network namespaces need root")
    if shutil.which("ip") is None:
        raise NoNamespaces("there is no program `ip` (iproute2)")


def ip(*arguments: str) -> None:
    """Run `ip`; NoNamespaces if it is this machine that does not allow it."""
    run_tool("ip", *arguments)


def run_tool(*command: str) -> None:
    """Run a tool of iproute2; as `ip`."""
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=COMMAND_LIMIT_S, check=False
    )
    if done.returncode:
        error = f"{' '.join(command)}: {done.stderr.strip()}"
        if any(reason in done.stderr for reason in NOT_HERE):
            raise NoNamespaces(error)
        raise RuntimeError(error)


def enter(namespace: str) -> None:
    """Make this thread, and those it starts, live in a network namespace. Raises OSError."""
    with Path("/run/netns", namespace).open() as place:
        if _libc.setns(place.fileno(), CLONE_NEWNET):
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error), namespace)


@contextmanager
def joined_hosts(first: str, second: str, bits: int) -> Iterator[tuple[str, str]]:
    """Two hosts with these addresses and a cable between them; yields their namespaces' names.

    NoNamespaces where this machine does not allow it.
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
    """Give a host's `eth0` its address, and take it and the loopback up."""
    ip("-n", name, "address", "add", f"{address}/{bits}", "dev", "eth0")
    ip("-n", name, "link", "set", "lo", "up")
    ip("-n", name, "link", "set", "eth0", "up")


@contextmanager
def entered_or_skipped(hosts: AbstractContextManager[T]) -> Iterator[T]:
    """Enter hosts; skip the test, with the reason, only where the machine allows no namespaces."""
    with ExitStack() as stack:
        try:
            entered = stack.enter_context(hosts)
        except NoNamespaces as reason:
            pytest.skip(f"no network namespaces here: {reason}")
        yield entered


class Inside:
    """A thread that lives in a namespace, and so do the processes and sockets it makes.

    It lives as long as the `with`: what it has started may be bound to its life.
    """

    def __init__(self, namespace: str) -> None:
        self._thread = ThreadPoolExecutor(1, initializer=enter, initargs=(namespace,))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._thread.shutdown()

    def call(self, function: Callable[[], T]) -> T:
        """Run it in the namespace."""
        return self._thread.submit(function).result()

    @contextmanager
    def running(self, server: ServerProcess) -> Iterator[None]:
        """Have a server there."""
        self.call(server.__enter__)
        try:
            yield
        finally:
            self.call(lambda: server.__exit__(None, None, None))


class HostMaster(MooncakeMaster):
    """A master at every address of a host; to be entered by its `Inside`."""

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
