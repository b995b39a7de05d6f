"""Two hosts on one machine: network namespaces, and a link between them that can be made bad.

    near -- veth -- wire (a process, see wire.py) -- veth -- far

Each host has one private address, inside its namespace only; nothing leads out of the three
namespaces. Their names carry our process id. All of it goes away with the `with`.
"""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Self, TypeVar

from tests.soak.child import enter
from tests.soak.crew import context
from tests.soak.wire import Weather, run
from vllm_kvpool.testing.mooncake_master import MooncakeMaster
from vllm_kvpool.testing.object_server import ObjectServer
from vllm_kvpool.testing.server_process import ServerProcess, free_port

T = TypeVar("T")

COMMAND_LIMIT_S = 10.0
WIRE_LIMIT_S = 40.0
NEAR_ADDRESS, FAR_ADDRESS, BITS = "10.213.77.1", "10.213.77.2", 30
ANY_ADDRESS = "0.0.0.0"  # of a namespace that has only its link and its loopback
NOT_HERE = (  # what `ip` says where a kernel or a container does not allow it
    "Operation not permitted",
    "Permission denied",
    "Operation not supported",
    "Unknown device type",
    "Read-only file system",
)


class NoNamespaces(Exception):
    """This machine does not let us make network namespaces; says why."""


def ip(*arguments: str) -> None:
    """Run `ip`; NoNamespaces if it is this machine that does not allow it."""
    command = ["ip", *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=COMMAND_LIMIT_S, check=False
    )
    if done.returncode:
        error = f"{' '.join(command)}: {done.stderr.strip()}"
        if any(reason in done.stderr for reason in NOT_HERE):
            raise NoNamespaces(error)
        raise RuntimeError(error)


class Link:
    """See the module docstring. `near` and `far` name the namespaces of the two hosts."""

    def __init__(self, seed: int) -> None:
        self.near, self.far, self._middle = (
            f"kvpool-{os.getpid()}-{host}" for host in ("near", "far", "wire")
        )
        self._seed = seed
        self._undo = ExitStack()

    def __enter__(self) -> Self:
        if os.geteuid():
            raise NoNamespaces("network namespaces need root")
        if shutil.which("ip") is None:
            raise NoNamespaces("there is no program `ip` (iproute2)")
        with ExitStack() as undo:
            for name in (self.near, self.far, self._middle):
                ip("netns", "add", name)
                undo.callback(ip, "netns", "delete", name)
            self._join(self.near, NEAR_ADDRESS, "to-near")
            self._join(self.far, FAR_ADDRESS, "to-far")
            self._start_wire(undo)
            self._undo = undo.pop_all()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._undo.close()

    def set(self, weather: Weather) -> None:
        """How it is from now on."""
        self._orders.send(weather)

    def down(self) -> None:
        """Take the far host's interface down: its kernel knows that nothing leads anywhere."""
        ip("-n", self.far, "link", "set", "eth0", "down")

    def up(self) -> None:
        """Undo `down`."""
        ip("-n", self.far, "link", "set", "eth0", "up")

    def _join(self, host: str, address: str, wire_end: str) -> None:
        peer = ["type", "veth", "peer", "name", wire_end, "netns", self._middle]
        ip("link", "add", "eth0", "netns", host, *peer)
        ip("-n", host, "address", "add", f"{address}/{BITS}", "dev", "eth0")
        ip("-n", host, "link", "set", "lo", "up")
        ip("-n", host, "link", "set", "eth0", "up")
        ip("-n", self._middle, "link", "set", wire_end, "up")

    def _start_wire(self, undo: ExitStack) -> None:
        self._orders, theirs = context.Pipe()
        arguments = (self._middle, ("to-near", "to-far"), theirs, self._seed)
        process = context.Process(target=run, args=arguments, name="wire", daemon=True)
        process.start()
        undo.callback(process.join, COMMAND_LIMIT_S)
        undo.callback(process.kill)
        undo.callback(self._orders.close)
        theirs.close()
        if not self._orders.poll(WIRE_LIMIT_S):
            raise RuntimeError("the wire does not start")
        self._orders.recv()


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


class NearMaster(MooncakeMaster):
    """A master at every address of the near host; to be entered by its `Inside`."""

    @property
    def address(self) -> str:
        return f"{NEAR_ADDRESS}:{self.port}"

    def arguments(self) -> list[str]:
        return [
            f"--rpc_port={self.port}",
            f"--rpc_address={ANY_ADDRESS}",
            f"--metrics_port={free_port()}",
            f"--metrics_host={ANY_ADDRESS}",
        ]


class NearObjects(ObjectServer):
    """An object server at every address of the near host; to be entered by its `Inside`."""

    @property
    def endpoint(self) -> str:
        return f"http://{NEAR_ADDRESS}:{self.port}"

    def arguments(self) -> list[str]:
        return ["-H", ANY_ADDRESS, "-p", str(self.port)]
