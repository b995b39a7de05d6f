"""Two hosts on one machine, and between them a link of so many bits a second.

Each is a network namespace; the link is a pair of virtual interfaces, and the kernel's token bucket
bounds what either end sends. So bytes move as over a network, by TCP, but the processor is not what
they wait for.
"""

import os
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from vllm_kvpool.testing.namespaces import ip, require_namespaces, run_tool

NEAR_ADDRESS, FAR_ADDRESS, BITS = "10.213.78.1", "10.213.78.2", 30
BURST = "1mb"  # what a bucket holds: a packet of the largest size, sixteen times
LATENCY = "50ms"  # how much may wait; TCP keeps it full and loses nothing


class ShapedLink:
    """See the module docstring. `near` and `far` name the namespaces. NoNamespaces without root."""

    def __init__(self, gbits: float) -> None:
        self.near, self.far = (f"kvpool-{os.getpid()}-{host}" for host in ("near", "far"))
        self._rate = f"{gbits * 1000:.0f}mbit"
        self._undo = ExitStack()

    def __enter__(self) -> Self:
        require_namespaces()
        with ExitStack() as undo:
            for name in (self.near, self.far):
                ip("netns", "add", name)
                undo.callback(ip, "netns", "delete", name)
            ip("link", "add", "eth0", "netns", self.near, "type", "veth", "peer", "eth0",
               "netns", self.far)  # fmt: skip
            for host, address in ((self.near, NEAR_ADDRESS), (self.far, FAR_ADDRESS)):
                self._set_up(host, address)
            self._undo = undo.pop_all()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._undo.close()

    def _set_up(self, host: str, address: str) -> None:
        ip("-n", host, "address", "add", f"{address}/{BITS}", "dev", "eth0")
        for interface in ("lo", "eth0"):
            ip("-n", host, "link", "set", interface, "up")
        bucket = ("rate", self._rate, "burst", BURST, "latency", LATENCY)
        run_tool("tc", "-n", host, "qdisc", "add", "dev", "eth0", "root", "tbf", *bucket)
