"""Two hosts on one machine, and between them a link of so many bits a second.

Each is a network namespace; the link is a pair of virtual interfaces, and the kernel's token bucket
bounds what either end sends. So bytes move as over a network, by TCP, but the processor is not what
they wait for.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from tests.support.namespaces import ip, require_namespaces, run_tool

NEAR_ADDRESS, FAR_ADDRESS, BITS = "10.213.78.1", "10.213.78.2", 30
BURST = "1mb"  # what a bucket holds: a packet of the largest size, sixteen times
LATENCY = "50ms"  # how much may wait; TCP keeps it full and loses nothing


class Hosts(NamedTuple):
    """The namespaces, by name."""

    near: str
    far: str


@contextmanager
def shaped_link(gbits: float) -> Iterator[Hosts]:
    """See the module docstring. NoNamespaces without root."""
    require_namespaces()
    hosts = Hosts(*(f"kvpool-{os.getpid()}-{host}" for host in Hosts._fields))
    with ExitStack() as undo:
        for name in hosts:
            ip("netns", "add", name)
            undo.callback(ip, "netns", "delete", name)
        peer = ("type", "veth", "peer", "eth0", "netns", hosts.far)
        ip("link", "add", "eth0", "netns", hosts.near, *peer)
        for host, address in zip(hosts, (NEAR_ADDRESS, FAR_ADDRESS), strict=True):
            _set_up(host, address, gbits)
        yield hosts


def _set_up(host: str, address: str, gbits: float) -> None:
    ip("-n", host, "address", "add", f"{address}/{BITS}", "dev", "eth0")
    for interface in ("lo", "eth0"):
        ip("-n", host, "link", "set", interface, "up")
    bucket = ("rate", f"{gbits * 1000:.0f}mbit", "burst", BURST, "latency", LATENCY)
    run_tool("tc", "-n", host, "qdisc", "add", "dev", "eth0", "root", "tbf", *bucket)
