"""Save and load of one prompt over Mooncake's TCP, between two hosts and a link that is bounded.

    python benchmarks/bench_mooncake_link.py --json link.json

As `bench_mooncake_transfer.py`, whose two processes share two cores with all that TCP costs: there
a copy and a hash of each byte take processor time from the bytes on their way. Here the link is
what bytes wait for, as between the hosts of a cluster, so what counts is whether copies and hashes
go on meanwhile. Both hosts are network namespaces of one machine (`shaped_link.py`); needs root.
"""

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
from benchmarks.shaped_link import FAR_ADDRESS, NEAR_ADDRESS, Hosts, shaped_link
from benchmarks.sides import Geometry, Holder, OurSide
from tests.support.namespaces import HostMaster, Inside
from vllm_kvpool.sides import BATCH_BYTES

GEOMETRIES = (Geometry(block=16), Geometry(block=128))
GBITS = (2.5, 5.0, 10.0)
LINK_BOUND_GBITS = 5.0  # beyond it two cores are full, and processor time is what counts
MIN_PLAIN_RATIO = 0.8
REPEATS, QUICK_REPEATS = 6, 1


def measure_geometry(
    geometry: Geometry, gbits: float, link: Hosts, repeats: int, result: Result
) -> None:
    meter = Meter()
    num_keys, key_bytes = geometry.cells()
    batch = -(-BATCH_BYTES // key_bytes)
    master = HostMaster(NEAR_ADDRESS)
    with Inside(link.near) as near, Inside(link.far) as far, near.running(master):
        address = master.address
        holder = near.call(lambda: Child(Holder, address, SEGMENT_BYTES, NEAR_ADDRESS))

        def plain(batch: int) -> Child:
            arguments = (address, num_keys, key_bytes, batch, FAR_ADDRESS)
            return far.call(lambda: Child(PlainSide, *arguments))

        sides = {
            "kvpool": far.call(lambda: Child(OurSide, f"mooncake://{address}?segment=0", geometry)),
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
