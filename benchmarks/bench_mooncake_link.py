"""Save and load of one prompt over Mooncake's TCP, between two hosts and a link that is bounded.

    python benchmarks/bench_mooncake_link.py --json link.json

As `bench_mooncake_transfer.py`, whose two processes share two cores with all that TCP costs: there
a copy and a hash of each byte take processor time from the bytes on their way. Here the link is
what bytes wait for, as between the hosts of a cluster, so what counts is whether copies and hashes
go on meanwhile. Both hosts are network namespaces of one machine with a pair of virtual interfaces
between them, whose ends the kernel's token bucket bounds; needs root.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from benchmarks.bench_mooncake_transfer import (
    SEGMENT_BYTES,
    WAYS,
    add_cpu_target,
    cpu_seconds,
    is_plain,
    measure_sides,
    wall_seconds,
)
from benchmarks.common import LIMITED_BY, Child, Result, Target, children, run_script
from benchmarks.limits import Meter
from benchmarks.plain_sides import PlainSide
from benchmarks.sides import Geometry, Holder, OurSide
from tests.support.namespaces import HostMaster, Inside, ip, require_namespaces, run_tool
from vllm_kvpool.worker.lane_limits import BATCH_BYTES

GEOMETRIES = (Geometry(block=16), Geometry(block=128))
GBITS = (2.5, 5.0, 10.0)
LINK_BOUND_GBITS = 5.0  # beyond it two cores are full, and processor time is what counts
MIN_PLAIN_RATIO = 0.8
REPEATS, QUICK_REPEATS = 4, 2
NEAR_ADDRESS, FAR_ADDRESS, BITS = "10.213.78.1", "10.213.78.2", 30
BURST = "1mb"  # what a bucket holds: a packet of the largest size, sixteen times
LATENCY = "50ms"  # how much may wait; TCP keeps it full and loses nothing


class Hosts(NamedTuple):
    """The namespaces, by name."""

    near: str
    far: str


@contextmanager
def shaped_link(gbits: float) -> Iterator[Hosts]:
    """Two hosts and the link between them. NoNamespaces without root."""
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


def measure_geometry(
    geometry: Geometry, gbits: float, link: Hosts, repeats: int, result: Result
) -> None:
    meter = Meter()
    num_keys, key_bytes = geometry.cells()
    batch = -(-BATCH_BYTES // key_bytes)
    master = HostMaster(NEAR_ADDRESS)
    with Inside(link.near) as near, near.running(master):
        address = master.address
        holder = Child(Holder, address, SEGMENT_BYTES, NEAR_ADDRESS, namespace=link.near)

        def plain(batch: int) -> Child:
            arguments = (address, num_keys, key_bytes, batch, FAR_ADDRESS)
            return Child(PlainSide, *arguments, namespace=link.far)

        url = f"mooncake://{address}?segment=0"
        sides = {
            "kvpool": Child(OurSide, url, geometry, namespace=link.far),
            "plain, one call": plain(num_keys),
            f"plain, {batch} keys": plain(batch),
        }
        with children(holder, *sides.values()):
            rounds = measure_sides(sides, holder, repeats, meter)
    ours = {way: wall_seconds(rounds["kvpool"], way) for way in WAYS}
    for name, own in rounds.items():
        row: dict[str, object] = {"gbits": gbits, "block": geometry.block, "side": name}
        for way in WAYS:
            took = wall_seconds(own, way)
            row[f"{way}_gbs"] = geometry.total_bytes / took / 1e9
            row[f"{way}_ratio"] = took / ours[way]
            row[f"{way}_cpu_s_per_gb"] = cpu_seconds(own, way) / geometry.total_bytes * 1e9
        seconds = sum(wall_seconds(own, way) for way in WAYS)
        share = len(WAYS) * geometry.total_bytes / seconds / (gbits * 1e9 / 8)
        row[LIMITED_BY] = meter.limited_by(name, {"link": share})
        result.rows.append(row)
    for way in WAYS:
        label = f"{gbits:g} Gbit/s, block {geometry.block}, {way}"
        add_cpu_target(label, way, rounds, result)
        best = min(wall_seconds(own, way) for name, own in rounds.items() if is_plain(name))
        if gbits <= LINK_BOUND_GBITS:
            what = f"{label} over plain buffers, the faster way"
            result.targets.append(Target(what, best / ours[way], MIN_PLAIN_RATIO, True))


def measure(quick: bool) -> Result:
    result = Result()
    for gbits in GBITS[1:2] if quick else GBITS:
        with shaped_link(gbits) as link:
            for geometry in GEOMETRIES[:1] if quick else GEOMETRIES:
                measure_geometry(geometry, gbits, link, QUICK_REPEATS if quick else REPEATS, result)
    result.notes.append(
        f"{GEOMETRIES[0].total_bytes >> 20} MiB prompt, ratios are rates of kvpool over the side's"
    )
    return result


if __name__ == "__main__":
    run_script(__doc__, measure)
