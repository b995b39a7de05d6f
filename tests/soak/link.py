"""Two hosts on one machine: network namespaces, and a link between them that can be made bad.

    near -- veth -- wire (a process, see wire.py) -- veth -- far

Each host has one private address, inside its namespace only; nothing leads out of the three
namespaces. Their names carry our process id. All of it goes away with the `with`.
"""

import os
from contextlib import ExitStack
from typing import Self

from tests.soak.crew import context
from tests.soak.wire import Weather, run
from tests.support.namespaces import ANY_ADDRESS, COMMAND_LIMIT_S, ip, require_namespaces, set_up
from tests.support.object_server import ObjectServer

WIRE_LIMIT_S = 40.0
NEAR_ADDRESS, FAR_ADDRESS, BITS = "10.213.77.1", "10.213.77.2", 30


class Link:
    """See the module docstring. `near` and `far` name the namespaces of the two hosts."""

    def __init__(self, seed: int) -> None:
        self.near, self.far, self._middle = (
            f"kvpool-{os.getpid()}-{host}" for host in ("near", "far", "wire")
        )
        self._seed = seed
        self._undo = ExitStack()

    def __enter__(self) -> Self:
        require_namespaces()
        with ExitStack() as undo:
            for name in (self.near, self.far, self._middle):
                ip("netns", "add", name)
                undo.callback(ip, "netns", "delete", name)
            self._join(self.near, NEAR_ADDRESS, "to-near")
            self._join(self.far, FAR_ADDRESS, "to-far")
            self._start_wire(undo)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._undo.close()

    def set(self, weather: Weather) -> None:
        """Set the link's weather from now on."""
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
        set_up(host, address, BITS)
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


class NearObjects(ObjectServer):
    """An object server at every address of the near host; to be entered by its `Inside`."""

    @property
    def endpoint(self) -> str:
        return f"http://{NEAR_ADDRESS}:{self.port}"

    def arguments(self) -> list[str]:
        return ["-H", ANY_ADDRESS, "-p", str(self.port)]
