"""Save and load of one prompt over Mooncake's TCP, between two hosts and a link of 10 Gbit/s.

    python benchmarks/bench_mooncake_link.py --json link.json

As `bench_mooncake_transfer.py`, whose two processes share two cores with all that TCP costs: there
a copy and a hash of each byte take processor time from the bytes on their way. Here the link is
what bytes wait for, as between the hosts of a cluster, so what counts is whether copies and hashes
go on meanwhile. Both hosts are network namespaces of one machine (`shaped_link.py`); needs root.
"""

from statistics import median

from benchmarks.bench_mooncake_transfer import MIN_PLAIN_RATIO, SEGMENT_BYTES, measure_sides
from benchmarks.common import Child, Result, Target, children, run_script
from benchmarks.plain_sides import PlainSide
from benchmarks.shaped_link import FAR_ADDRESS, NEAR_ADDRESS, ShapedLink
from benchmarks.sides import Geometry, Holder, OurSide
from vllm_kvpool.pool.sides import BATCH_BYTES
from vllm_kvpool.testing.namespaces import HostMaster, Inside

GEOMETRIES = (Geometry(block=16), Geometry(block=128))
GBITS = 10.0
REPEATS, QUICK_REPEATS = 7, 1


def measure_geometry(geometry: Geometry, link: ShapedLink, repeats: int, result: Result) -> None:
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
            times = measure_sides(sides, holder, repeats)
    seconds = {name: [median(way) for way in ways] for name, ways in times.items()}
    ours = seconds["kvpool"]
    for name, ways in seconds.items():
        row: dict[str, object] = {"block": geometry.block, "side": name}
        for i, way in enumerate(("save", "load")):
            row[f"{way}_gbs"] = geometry.total_bytes / ways[i] / 1e9
            row[f"{way}_ratio"] = ways[i] / ours[i]
        result.rows.append(row)
    for i, way in enumerate(("save", "load")):
        best = min(ways[i] for name, ways in seconds.items() if name != "kvpool")
        what = f"block {geometry.block}, {way} over plain buffers, the faster way"
        result.targets.append(Target(what, best / ours[i], MIN_PLAIN_RATIO, True))


def measure(quick: bool) -> Result:
    result = Result()
    with ShapedLink(GBITS) as link:
        for geometry in GEOMETRIES[:1] if quick else GEOMETRIES:
            measure_geometry(geometry, link, QUICK_REPEATS if quick else REPEATS, result)
    result.notes.append(
        f"{GEOMETRIES[0].total_bytes >> 20} MiB prompt, ratios are rates of kvpool over the side's"
    )
    return result


if __name__ == "__main__":
    run_script(__doc__, measure)
