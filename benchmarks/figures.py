"""The tables of README.md and of three documents in docs/, from the kept results.

    python benchmarks/figures.py

A row names what it compares and takes each number from a kept row. `run_all.py` writes the tables
anew; `tests/test_figures.py` fails where a document has other ones.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.scale import RESULTS, ROOT, filled, number, table

README = ROOT / "README.md"
PERFORMANCE = ROOT / "docs" / "performance.md"
COMPARISON = ROOT / "docs" / "comparison.md"
DECISIONS = ROOT / "docs" / "decisions.md"
WANTED_CPU = 1.5
"""Of plain buffers, at most."""
WANTED_ROUND_TRIP_US = 100.0
GQA = "nothing reused, SmolLM2-135M-Instruct (GQA), 22.5 KiB a token"
MHA = "nothing reused, random weights (MHA), 32 KiB a token"
IN_TREE = "vLLM's MooncakeStore"


class Figure(NamedTuple):
    """A row of docs/performance.md."""

    what: str
    ours: str
    beside: str = ""
    ratio: str = ""

    def row(self) -> dict[str, Any]:
        return {
            "what": self.what,
            "ours": self.ours,
            "beside it": self.beside,
            "ratio": self.ratio,
        }


class Kept:
    """The row of a kept result in which these columns have these values, and that has `column`."""

    def __init__(self, folder: Path = RESULTS) -> None:
        self.folder = folder
        self._rows: dict[str, list[dict[str, Any]]] = {}

    def rows(self, name: str) -> list[dict[str, Any]]:
        """Return all rows of a kept result."""
        if name not in self._rows:
            self._rows[name] = json.loads((self.folder / f"{name}.json").read_text())["rows"]
        return self._rows[name]

    def __call__(self, name: str, column: str = "", /, **columns: object) -> dict[str, Any]:
        wanted = columns.items()
        found = [
            row
            for row in self.rows(name)
            if wanted <= row.items() and (not column or column in row)
        ]
        if len(found) != 1:
            raise LookupError(f"results/{name}.json has {len(found)} rows with {columns}")
        return found[0]

    def judged(self, name: str, what: str) -> float:
        """The value of a kept target, as the benchmark judged it."""
        targets = json.loads((self.folder / f"{name}.json").read_text())["targets"]
        [value] = [target["value"] for target in targets if target["what"] == what]
        return float(value)


def each(*values: float) -> str:
    return ", ".join(map(number, values))


def times(*ratios: float, at_least: float = 1.0) -> str:
    """Ratios in our favour; bold is one below what it should be."""
    texts = [(f"{ratio:.2g}" if ratio < 10 else number(round(ratio)), ratio) for ratio in ratios]
    return ", ".join(f"**{text}**" if ratio < at_least else text for text, ratio in texts)


def at_most(wanted: float, *ratios: float) -> str:
    """Costs; bold is one above what is wanted."""
    return ", ".join(f"**{r:.3g}**" if r > wanted else f"{r:.3g}" for r in ratios)


def headline(kept: Kept) -> list[dict[str, Any]]:
    """Return the rows of README's table: one value on each side, and the ratio of both."""
    ours, theirs = (kept("ttft", model="Llama", side=side) for side in ("kvpool", "in-tree"))
    real, real_theirs = (
        kept("real_weights", part="conversations", side=side, **{"turns/s": 1.0})["TTFT mean ms"]
        for side in ("kvpool, Mooncake", IN_TREE)
    )
    chat = {
        tiers: kept("chat", tiers=tiers)["turn 3 ms"]
        for tiers in ("host + SSD + Mooncake", "no pool")
    }
    moved, moved_theirs = (
        kept("mooncake_transfer", block=16, side=side) for side in ("kvpool", "in-tree, 64 keys")
    )
    hooks, hooks_theirs = (
        all_hooks(kept, side, "scheduler", save_decode=False) for side in ("kvpool", "in-tree")
    )
    over = {side: overloaded(kept, side)["first token p99 s"] for side in ("ours", "vllm-router")}
    (handed, handed_theirs), (still, still_theirs) = (
        [
            kept("handover", way=way, decode=decode, tokens=2048, **{"at a time": 1})
            for way in ("kvpool, Mooncake", "NixlConnector, a poll each 1 ms")
        ]
        for decode in ("blocks of 128", "blocks of 128, no spinning")
    )
    peer = "MooncakeStoreConnector"
    rows: list[tuple[str, str, str, float]] = [
        (
            "First token after a full hit of 2,048 tokens over Mooncake; random weights",
            f"{number(ours['warm ms'])} ms",
            f"{peer} {number(theirs['warm ms'])} ms",
            theirs["warm ms"] / ours["warm ms"],
        ),
        (
            "First token in conversations over Mooncake, mean; real weights (SmolLM2-135M)",
            f"{number(real)} ms",
            f"{peer} {number(real_theirs)} ms",
            real_theirs / real,
        ),
        (
            "Hand-over of 2,048 tokens over Mooncake, answer of prefill to first token, mean",
            f"{number(handed['gap mean ms'])} ms",
            f"NixlConnector {number(handed_theirs['gap mean ms'])} ms",
            handed_theirs["gap mean ms"] / handed["gap mean ms"],
        ),
        (
            "Processor time of that hand-over, both engines",
            f"{number(handed['CPU s'])} s",
            f"NixlConnector {number(handed_theirs['CPU s'])} s",
            handed_theirs["CPU s"] / handed["CPU s"],
        ),
        (
            "The same, vLLM's workers poll for 10 ms after a step, not for a second",
            f"{number(still['CPU s'])} s",
            f"NixlConnector {number(still_theirs['CPU s'])} s",
            still_theirs["CPU s"] / still["CPU s"],
        ),
        (
            "First token of a chat's third turn; tiers of 96 MiB, 256 MiB and 1 GiB",
            f"{number(chat['host + SSD + Mooncake'])} ms",
            f"no pool {number(chat['no pool'])} ms",
            chat["no pool"] / chat["host + SSD + Mooncake"],
        ),
        *(
            (
                f"{what} over Mooncake TCP, block 16",
                f"{moved[name]:.3g} GB/s",
                f"{peer} {moved_theirs[name]:.3g} GB/s",
                moved[name] / moved_theirs[name],
            )
            for what, name in (("Save", "save_gbs"), ("Load", "load_gbs"))
        ),
        *(
            (
                f"Scheduler's thread in a step of 64 requests, {what}",
                f"{number(hooks[name])} µs",
                f"{peer} {number(hooks_theirs[name])} µs",
                hooks_theirs[name] / hooks[name],
            )
            for what, name in (("mean", "mean us"), ("median", "p50 us"))
        ),
        (
            "First token at twice the sustainable load, p99 of the served requests",
            f"{over['ours']:.2g} s",
            f"vllm-router {over['vllm-router']:.2g} s",
            over["vllm-router"] / over["ours"],
        ),
    ]
    names = ("figure", "vllm-kvpool", "compared with", "times better")
    return [dict(zip(names, (*texts, times(ratio)), strict=True)) for *texts, ratio in rows]


def all_hooks(kept: Kept, side: str, thread: str, *, save_decode: bool) -> dict[str, Any]:
    return kept("hooks", side=side, thread=thread, save_decode=save_decode, what="all hooks")


def overloaded(kept: Kept, side: str, kind: str = "whole") -> dict[str, Any]:
    """The row of `side` at twice the sustained load, whose rate differs from run to run."""
    return kept("router", "sustained/s", side=f"{side}, {kind}")


def first_tokens(kept: Kept) -> list[Figure]:
    """And real traffic."""
    chat = [
        kept("chat", tiers=tiers)["turn 3 ms"]
        for tiers in ("host + SSD + Mooncake", "no pool", "host")
    ]
    rows = [
        Figure(
            "First token of turn 3, all tiers",
            f"{number(chat[0])} ms",
            f"no pool {number(chat[1])} ms, host memory alone {number(chat[2])} ms",
            times(chat[1] / chat[0]),
        )
    ]
    for model, what in (
        ("Llama", "First token of a full hit, 2,048 tokens, Mooncake (sides in turns)"),
        ("LFM2", "The same of an LFM2, with recurrent states"),
        ("Qwen3-Next", "The same of a Qwen3-Next in bfloat16, with recurrent states"),
    ):
        ours, theirs = (kept("ttft", model=model, side=side) for side in ("kvpool", "in-tree"))
        beside = (
            f"vLLM's connector {number(theirs['warm ms'])} ms, cold {number(ours['cold ms'])} ms"
        )
        ratio = times(theirs["warm ms"] / ours["warm ms"])
        rows.append(Figure(what, f"{number(ours['warm ms'])} ms", beside, ratio))
    files = [
        kept("ttft", model=model, side="kvpool, files") for model in ("Llama", "LFM2", "Qwen3-Next")
    ]
    rows.append(
        Figure(
            "First token of a full hit, files: Llama, LFM2, Qwen3-Next",
            f"{each(*(row['warm ms'] for row in files))} ms",
            f"cold {each(*(row['cold ms'] for row in files))} ms",
            times(*(row["cold ms"] / row["warm ms"] for row in files)),
        )
    )
    return rows + ends(kept) + real_weights(kept) + away(kept) + traffic(kept)


def ends(kept: Kept) -> list[Figure]:
    """Hits that end inside a chunk."""
    rows = []
    for known in ("511 of 511", "500 of 540"):
        ours = kept("ends", side="chunks of 256, aliases of 64", known=known)
        others = [kept("ends", side=f"chunks of {size}", known=known) for size in (256, 64, 32)]
        for column, unit, what in (
            ("first token ms", " ms", "First token where so many tokens of a prompt are stored, "),
            ("keys", "", "Keys of the stored prompt, "),
        ):
            beside = each(*(other[column] for other in others))
            rows.append(
                Figure(
                    f"{what}{known}: chunks of 256 with aliases of 64 (`bench_ends.py`)",
                    f"{number(ours[column])}{unit}",
                    f"chunks of 256, 64, 32: {beside}{unit}",
                    times(*(other[column] / ours[column] for other in others)),
                )
            )
    return rows


def real_weights(kept: Kept) -> list[Figure]:
    def turns(side: str) -> dict[str, Any]:
        return kept("real_weights", part="conversations", side=side, **{"turns/s": 1.0})

    def shown(row: dict[str, Any]) -> str:
        seconds = each(row["TTFT mean ms"] / 1e3, row["TTFT p99 ms"] / 1e3)
        return f"{seconds} s; {number(row['tokens/s'])}; {number(row['CPU s / turn'])}"

    nothing, own, files, mooncake, theirs = map(
        turns,
        (
            "nothing cached",
            "the engines' own caches",
            "kvpool, files",
            "kvpool, Mooncake",
            IN_TREE,
        ),
    )
    first = "TTFT mean ms"
    rows = [
        Figure(
            "SmolLM2-135M (real weights), two servers on a core each, conversations of three turns "
            "about long documents (`bench_real_weights.py`), 1 turn/s: time to the "
            "first token, mean and p99; tokens/s; CPU seconds a turn; over files",
            shown(files),
            f"nothing cached {shown(nothing)}; the engines' own caches alone {shown(own)}",
            times(nothing[first] / files[first], own[first] / files[first]),
        ),
        Figure(
            f"The same over Mooncake ({mooncake['turns']} turns a side)",
            shown(mooncake),
            f"vLLM's MooncakeStoreConnector {shown(theirs)}",
            f"TTFT mean {times(theirs[first] / mooncake[first])}; "
            f"CPU {times(theirs['CPU s / turn'] / mooncake['CPU s / turn'])}",
        ),
    ]
    for part, what in (
        (
            GQA,
            "The same model, nothing is ever reused and all is saved: CPU over no pool; files, "
            "host memory, Mooncake",
        ),
        (MHA, "The same with an MHA model of 18 million weights and 32 KiB of KV a token"),
    ):
        sides = ("kvpool, files", "kvpool, host memory", "kvpool, Mooncake", IN_TREE)
        costs = [kept("real_weights", part=part, side=side)["CPU over no pool"] for side in sides]
        beside = f"vLLM's MooncakeStoreConnector {number(costs[3])}"
        rows.append(Figure(what, each(*costs[:3]), beside))
    return rows


def away(kept: Kept) -> list[Figure]:
    speeds = [
        kept("away", store=store)["speed"] for store in ("refuses", "never answers", "5 s a call")
    ]
    what = "Engine over a store that refuses every call, never answers, or takes 5 s a call: speed"
    return [Figure(what, each(*speeds), "the same engine without a pool", times(*speeds))]


def traffic(kept: Kept) -> list[Figure]:
    """A replayed trace, and simulated policies."""
    cost = "CPU s / GB computed or loaded"

    def replayed(side: str, mib: int) -> dict[str, Any]:
        return kept("trace", side=side, **{"store MiB": mib})

    ours, theirs = replayed("kvpool, Mooncake", 2048), replayed(IN_TREE, 2048)
    files, memory = (
        [replayed(side, mib) for mib in (512, 2048)] for side in ("kvpool, files", IN_TREE)
    )
    three, three_theirs = (
        replayed(f"three engines: {side}", 2048) for side in ("kvpool, Mooncake", IN_TREE)
    )
    host = replayed("kvpool, host memory", 2048)
    offloading = replayed("vLLM's OffloadingConnector", 2048)
    unbounded = kept("trace", side="unbounded, simulated")["found"]
    rows = [
        Figure(
            "A production chat replayed through real connectors, first 1,000 requests, stores of "
            "2 GiB (`bench_trace.py`): prompt tokens found, over Mooncake; CPU seconds a GB "
            "computed or loaded; a step's hooks, mean",
            f"{ours['found']:.3f}; {ours[cost]:.2f}; {ours['held mean us'] / 1e3:.1f} ms",
            f"vLLM's MooncakeStoreConnector {theirs['found']:.3f}; {theirs[cost]:.2f}; "
            f"{theirs['held mean us'] / 1e3:.1f} ms (unbounded {unbounded:.3f})",
            times(
                ours["found"] / theirs["found"],
                theirs[cost] / ours[cost],
                theirs["held mean us"] / ours["held mean us"],
            ),
        ),
        Figure(
            "The same, files of 512 MiB and 2 GiB: found",
            each(*(row["found"] for row in files)),
            f"vLLM's MooncakeStoreConnector, as much memory: "
            f"{each(*(row['found'] for row in memory))}; its OffloadingConnector, 2 GiB: "
            f"{offloading['found']:.3f}",
            times(*(a["found"] / b["found"] for a, b in zip(files, memory, strict=True))),
        ),
        Figure(
            "The same, three engines at once with pages of 16, 32 and 64 tokens over one Mooncake: "
            "found; CPU seconds a GB",
            f"{three['found']:.3f}; {three[cost]:.2f}",
            f"vLLM's MooncakeStoreConnector {three_theirs['found']:.3f}; {three_theirs[cost]:.2f}",
            times(three["found"] / three_theirs["found"], three_theirs[cost] / three[cost]),
        ),
        Figure(
            "The same, host memory of 2 GiB: CPU seconds a GB; a step's hooks, mean",
            f"{host[cost]:.2f}; {host['held mean us'] / 1e3:.1f} ms",
            f"vLLM's OffloadingConnector, a thread in place of its device's copies: "
            f"{offloading[cost]:.2f}; {offloading['held mean us'] / 1e3:.1f} ms",
            times(offloading[cost] / host[cost], offloading["held mean us"] / host["held mean us"]),
        ),
    ]
    return rows


def handover(kept: Kept) -> list[Figure]:
    ours = ("kvpool, Mooncake", "kvpool, files")
    theirs = ("NixlConnector, a poll each 1 ms", "MooncakeConnector")
    gap = "gap mean ms"

    def of(
        way: str, tokens: int, at_once: int = 1, decode: str = "blocks of 128"
    ) -> dict[str, Any]:
        columns = {"decode": decode, "tokens": tokens, "at a time": at_once}
        return kept("handover", way=way, **columns)

    def gaps(row: dict[str, Any]) -> str:
        return each(row[gap], row["gap p99 ms"]) if gap in row else "no end"

    def beside(rows: list[dict[str, Any]]) -> str:
        return "; ".join(gaps(row) for row in rows)

    def ratio(mine: dict[str, Any], others: list[dict[str, Any]]) -> str:
        if mine[gap] <= 0:  # decode's token comes before prefill's answer
            return "it comes first"
        return times(*(other[gap] / mine[gap] for other in others if gap in other))

    rows = []
    for tokens, at_once, what in (
        (
            512,
            1,
            "From prefill's answer to decode's first token, two servers on a core each "
            "(`bench_handover.py`), prompts of 512 tokens and a tail, mean and p99: over Mooncake; "
            "over files. The pool's decode is asked with prefill, as by its router, the peers' "
            "after prefill's answer",
        ),
        (2048, 1, "The same, 2,048 tokens"),
        (6144, 1, "The same, 6,144 tokens"),
        (2048, 8, "The same, 2,048 tokens, eight at a time"),
    ):
        mine, others = ([of(way, tokens, at_once) for way in some] for some in (ours, theirs))
        rows.append(
            Figure(
                what,
                f"{beside(mine)} ms",
                f"NixlConnector, MooncakeConnector: {beside(others)} ms",
                "; ".join(ratio(row, others) for row in mine if gap in row),
            )
        )
    for what, decode in (
        ("Processor time of both servers, prompts of 2,048 tokens, a request", "blocks of 128"),
        (
            "The same, vLLM's workers poll for 10 ms after a step, not for a second",
            "blocks of 128, no spinning",
        ),
    ):
        own: list[float] = [of(way, 2048, decode=decode)["CPU s"] for way in ours]
        peers: list[float] = [of(way, 2048, decode=decode)["CPU s"] for way in theirs]
        beside_s = f"NixlConnector, MooncakeConnector: {each(*peers)} s"
        ratios = "; ".join(times(*(other / mine_s for other in peers)) for mine_s in own)
        rows.append(Figure(what, f"{each(*own)} s", beside_s, ratios))
    killed = [
        kept("handover", way=way, prefill="killed after its answer")["first token s"]
        for way in (*ours, *theirs)
    ]
    shown = [f"{number(came)} s" if isinstance(came, float) else came for came in killed]
    rows.append(
        Figure(
            "Prefill killed right after its answer: decode's first token, over Mooncake; files",
            "; ".join(shown[:2]),
            f"NixlConnector, MooncakeConnector: {'; '.join(shown[2:])}",
        )
    )
    later = {"decode asks": "once all is stored"}
    for tokens in (512, 2048, 6144):
        hops = [
            [
                kept("handover", store=store, tokens=tokens, hop=hop, **later)
                for hop in ("gathered", "stored", "known", "loaded")
            ]
            for store in ("Mooncake", "files")
        ]
        means = "; ".join(each(*(hop["mean ms"] for hop in of_store)) for of_store in hops)
        what = (
            "Without models, from prefill's last step: all gathered, stored, known to decode, "
            f"loaded, {number(tokens)} tokens, over Mooncake; over files"
        )
        rows.append(Figure(what, f"{means} ms"))
    return rows


def transfer(kept: Kept) -> list[Figure]:
    """And staging."""
    rows = []
    few, many = (
        [kept("scheduler", case=case, size=size)["op us"] for size in sizes]
        for case, sizes in (
            ("S1 graphs in flight", (1, 2048)),
            ("S2 ops in one graph", (64, 65_536)),
        )
    )
    rows += [
        Figure("Completion of an op, 1 graph in flight, 2,048 graphs", f"{each(*few)} µs"),
        Figure("The same in one graph of 64 ops, of 65,536 ops", f"{each(*many)} µs"),
    ]
    trip = kept("engine", graph="one op")["p50 us"]
    lane = kept("engine", graph="1000 saves, lane killed")["seconds to the last"]
    wanted = f"wanted {number(WANTED_ROUND_TRIP_US)} µs"
    ratio = times(WANTED_ROUND_TRIP_US / trip)
    rows += [
        Figure(
            "Round trip of one op through engine and lane, p50", f"{number(trip)} µs", wanted, ratio
        ),
        Figure(
            "A lane killed among 1,000 saves: all reported after",
            f"{number(lane)} s",
            "FlexKV: never",
        ),
    ]
    for layout, block, what in (
        ("LBNHC", 16, "Gather and scatter, token-major, block 16"),
        ("LBHNC", 128, "Gather and scatter, head-major, block 128"),
    ):
        row = kept("gather", layout=layout, block=block, moved_mib=192)
        speeds = [row["gather_gbs"], row["scatter_gbs"]]
        ratio = times(*(speed / row["memcpy_gbs"] for speed in speeds))
        beside = f"memcpy {number(row['memcpy_gbs'])} GB/s"
        rows.append(Figure(what, f"{each(*speeds)} GB/s", beside, ratio))
    states, chunk = (
        kept("states", store="file", what=what)
        for what in ("states at a boundary", "cells of a chunk")
    )

    def moved(row: dict[str, Any]) -> str:
        ms, rates = ([row[f"{way} {unit}"] for way in ("save", "load")] for unit in ("ms", "GB/s"))
        return f"{each(*ms)} ms; {each(*rates)} GB/s"

    rows.append(
        Figure(
            "The recurrent states at one boundary, of Qwen3-Next's sizes (64 cells, 38 MiB), over "
            "files: save and load (`bench_states.py`)",
            moved(states),
            f"the attention cells of a chunk (8 cells, 6 MiB), same run: {moved(chunk)}",
            f"GB/s {times(*(states[way] / chunk[way] for way in ('save GB/s', 'load GB/s')))}",
        )
    )
    return rows


def files(kept: Kept) -> list[Figure]:
    rows = []
    for cell, side, what in (
        (
            "1024 KiB",
            "store, 32 MiB",
            "SSD, cells of 1 MiB, write and read (recycled files over fio's new ones)",
        ),
        ("256 KiB", "store, 32 MiB", "SSD, cells of 256 KiB, write and read"),
        (
            "256 KiB",
            "store, 32 MiB x 2 lanes",
            "The same from two lanes at a time; the default is one",
        ),
    ):
        ours, fio = kept("ssd", cell=cell, side=side), kept("ssd", cell=cell, side="fio")
        ours_gbs, fio_gbs = (
            each(row["write_mb_s"] / 1e3, row["read_mb_s"] / 1e3) for row in (ours, fio)
        )
        ratio = times(ours["write_ratio"], ours["read_ratio"])
        rows.append(Figure(what, f"{ours_gbs} GB/s", f"fio, io_uring: {fio_gbs} GB/s", ratio))
    small = kept("ssd", cell="256 KiB", side="store, 32 MiB")
    waits = kept("ssd", cell="2000000 stored", side="wait for the index")
    lost = [
        kept("ssd", cell="200000 sparse files", side=f"index lost: {what}")["s"]
        for what in ("rebuilt, CPU", "first hit")
    ]
    rows += [
        Figure(
            "Processor time of a put and a get of a 256 KiB cell",
            f"{each(small['write_cpu_us'], small['read_cpu_us'])} µs",
        ),
        Figure(
            "Index of two million cells, four processes and a `kill -9`: another process's wait "
            "for it, mean, p99, longest",
            f"{each(waits['mean_ms'], waits['p99_ms'], waits['max_ms'])} ms",
            "wanted 20 ms",
        ),
        Figure(
            "A lost index of 200,000 cells: processor time of rebuilding it, a cell; first hit",
            f"{number(lost[0] / 200_000 * 1e6)} µs; {number(1e3 * lost[1])} ms",
        ),
    ]
    return rows


def mooncake(kept: Kept) -> list[Figure]:
    ways = ("save", "load")
    rows = []

    def of(block: int, side: str) -> dict[str, Any]:
        return kept("mooncake_transfer", block=block, side=side)

    def cpu(row: dict[str, Any]) -> list[float]:
        return [row[f"{way}_cpu_s_per_gb"] for way in ways]

    def rate(row: dict[str, Any]) -> list[float]:
        return [row[f"{way}_gbs"] for way in ways]

    for block in (16, 128):
        ours = cpu(of(block, "kvpool"))
        batches, one_call = (cpu(of(block, f"plain, {how}")) for how in ("32 keys", "one call"))
        plain = [min(costs) for costs in zip(batches, one_call, strict=True)]
        # Not ratios of these medians: rounds are compared one by one, with the cheaper side.
        judged = [
            kept.judged(
                "mooncake_transfer", f"block {block}, {way}: processor time over plain buffers"
            )
            for way in ways
        ]
        rows.append(
            Figure(
                f"Save and load 64 MB over Mooncake TCP, block {block}: CPU seconds a GB",
                each(*ours),
                f"one plain buffer per key, nothing gathered or verified: {each(*plain)}",
                f"{at_most(WANTED_CPU, *judged)} of plain, round by round (wanted {WANTED_CPU:g})",
            )
        )
    for block in (16, 128):
        links = [
            [
                kept("mooncake_link", gbits=gbits, block=block, side=side)
                for side in ("kvpool", "plain, 32 keys")
            ]
            for gbits in (2.5, 5.0, 10.0)
        ]
        for way in ways:
            costs, rates = (
                [[row[f"{way}_{unit}"] for row in pair] for pair in links]
                for unit in ("cpu_s_per_gb", "gbs")
            )
            rows.append(
                Figure(
                    f"Between two hosts and a link of 2.5, 5, 10 Gbit/s, block {block}, {way}: CPU "
                    "seconds a GB; GB/s",
                    "; ".join(each(*(pair[0] for pair in some)) for some in (costs, rates)),
                    "plain "
                    + "; ".join(each(*(pair[1] for pair in some)) for some in (costs, rates)),
                    f"{at_most(WANTED_CPU, *(a / b for a, b in costs))} of plain; "
                    f"{times(*(a / b for a, b in rates), at_least=0.8)}",
                )
            )
    for block in (16, 128):
        ours = rate(of(block, "kvpool"))
        for side, what, at_least in (
            ("in-tree, 64 keys", "vLLM's MooncakeStoreConnector, 64 keys a call", 1.0),
            ("plain, 32 keys", "plain", 0.0),
            ("copied and hashed, else plain", "plain, each buffer copied and hashed once", 0.0),
        ):
            theirs = rate(of(block, side))
            rows.append(
                Figure(
                    f"Over loopback, block {block}, save and load",
                    f"{each(*ours)} GB/s",
                    f"{what}: {each(*theirs)}",
                    times(*(a / b for a, b in zip(ours, theirs, strict=True)), at_least=at_least),
                )
            )
    rank = kept("storage_mode", store="mooncake", cells="per rank")
    ratios = [f"{what} {rank[f'{what} ms ratio']:.2g}" for what in (*ways, "lookup")]
    rows.append(
        Figure(
            "Cells per rank instead of per head, Mooncake",
            f"{rank['number']} keys",
            f"{kept('storage_mode', store='mooncake', cells='per head')['number']} keys",
            f"{', '.join(ratios)} of the time",
        )
    )
    return rows


def encryption(kept: Kept) -> list[Figure]:
    rows = []
    for what, kind, cell in (
        (
            "Encrypted cells of 1 MiB, save and load over a store in memory: CPU seconds a GB "
            "(`bench_encryption.py`, on a processor with VAES)",
            "with store",
            "1024 KiB",
        ),
        ("The same, cells of 256 KiB", "with store", "256 KiB"),
        ("Encrypting and decrypting 1 MiB alone", "alone", "1024 KiB"),
    ):
        secret, plain = (
            [
                kept("encryption", cell=cell, **{"cells are": form})[f"{way} {kind}, CPU s/GB"]
                for way in ("save", "load")
            ]
            for form in ("encrypted", "plain")
        )
        costs = each(*(a / b for a, b in zip(secret, plain, strict=True)))
        rows.append(
            Figure(
                what, each(*secret), f"plain, with checksum: {each(*plain)}", f"{costs} of plain"
            )
        )
    return rows


def lookups(kept: Kept) -> list[Figure]:
    """And hooks."""

    def asked(what: str) -> list[float]:
        stored = [kept("lookup", **{"stored chunks": n}) for n in (0, 1, 100, 317, 511, 512)]
        return [max(row[f"{what} {share}"] for row in stored) for share in ("mean", "p50", "p99")]

    whole = kept("lookup", **{"stored chunks": "one call: cells of the pool"})["asking p50"]
    states, without = (
        kept("lookup", **{"stored chunks": stored}) for stored in ("511, with states", 511)
    )
    near = kept("lookup", **{"stored chunks": "far tier of 1 s a call, all near"})
    shares = ("mean", "p50", "p99")
    rows = [
        Figure(
            "Lookup of 131,072 tokens, asking the store: mean, p50, p99, at most",
            f"{each(*asked('asking'))} ms",
            f"all keys in one call: p50 {number(whole)} ms",
            times(whole / asked("asking")[1]),
        ),
        Figure(
            "The same from arrival, hashing included",
            f"{each(*asked('answer'))} ms",
            "wanted 3 ms",
            times(3 / asked("answer")[1]),
        ),
        Figure(
            "Asking for a model with recurrent states whose last state is far before the end of "
            f"the stored prefix ({states['calls']} calls, {states['keys']} keys)",
            f"{each(*(states[f'asking {share}'] for share in shares))} ms",
            f"without states, same run ({without['calls']} calls, {without['keys']} keys): "
            f"{each(*(without[f'asking {share}'] for share in shares))}",
            f"p50 {times(without['asking p50'] / states['asking p50'])}",
        ),
        Figure(
            "An answer of the near tier beside a far one of 1 s a call: mean, p50, p99",
            f"{each(*(near[f'answer {share}'] for share in shares))} ms",
            "wanted 10 ms",
        ),
    ]
    for thread, why in (
        ("scheduler", ""),
        ("model", "; on CPU a step that saves waits for its gather, which is the mean and the p99"),
    ):
        for save_decode in (False, True):
            ours, theirs = (
                [all_hooks(kept, side, thread, save_decode=save_decode)[f"{s} us"] for s in shares]
                for side in ("kvpool", "in-tree")
            )
            how = ", `save_decode`" if save_decode else ""
            rows.append(
                Figure(
                    f"Hooks a step, 64 requests, {thread}'s thread{how}: mean, p50, p99{why}",
                    f"{each(*ours)} µs",
                    f"vLLM's connector {each(*theirs)}",
                    times(*(b / a for a, b in zip(ours, theirs, strict=True))),
                )
            )
    return rows


def embeds(kept: Kept) -> list[Figure]:
    def of(what: str, transport: str, side: str, **more: object) -> dict[str, Any]:
        return kept("embeds", what=what, transport=transport, side=side, **more)

    rows = []
    for transport, what in (
        (
            "mooncake",
            "Embeddings of 64 and 256 MiB, Mooncake TCP, through a window of 1/8: CPU seconds a GB",
        ),
        ("local", "The same, memory shared on one host"),
    ):
        eighth, whole = (
            [of("window", transport, side, mib=mib)["cpu_s_gb"] for mib in (64, 256)]
            for side in ("an eighth", "one grant")
        )
        ratio = at_most(WANTED_CPU, *(a / b for a, b in zip(eighth, whole, strict=True)))
        rows.append(
            Figure(
                what, each(*eighth), f"a window that holds all: {each(*whole)}", f"{ratio} of it"
            )
        )
    rounds = [of("rounds", t, "two in flight")["ms_a_round"] for t in ("mooncake", "local")]
    rows.append(
        Figure(
            "One more round, two in flight: Mooncake TCP, shared memory",
            f"{each(*rounds)} ms",
            "wanted 1 ms",
        )
    )
    for row_bytes, what in (
        (
            8192,
            "1,000 embeddings of 256 rows of 8 KiB from 4 encoders: CPU seconds a GB, Mooncake "
            "TCP; shared memory",
        ),
        (2048, "The same, rows of 2 KiB"),
    ):
        many, one = (
            [of("many", t, side, row_bytes=row_bytes)["cpu_s_gb"] for t in ("mooncake", "local")]
            for side in ("many", "single stream")
        )
        ratio = at_most(WANTED_CPU, *(a / b for a, b in zip(many, one, strict=True)))
        rows.append(Figure(what, each(*many), f"one stream: {each(*one)}", f"{ratio} of it"))
    for items, sizes, what in (
        (1, (1, 16, 64), "One embedding of 1, 16, 64 MiB, ready for use"),
        (200, (1,), "200 embeddings of 1 MiB"),
    ):
        ours, theirs, again = (
            [of("in-tree", "mooncake", side, items=items, mib=mib)["ms"] for mib in sizes]
            for side in ("kvpool", "in-tree", "in-tree, connections kept")
        )
        rows.append(
            Figure(
                what,
                f"{each(*ours)} ms",
                f"vLLM's ECMooncakeConnector, which verifies nothing: {each(*theirs)} ms, with "
                f"connections kept {each(*again)}",
                times(*(b / a for a, b in zip(ours, theirs, strict=True))),
            )
        )
    return rows


def router(kept: Kept) -> list[Figure]:
    short = {
        side: kept("router", what="short requests", side=f"{side}, whole")
        for side in ("ours", "vllm-router")
    }
    names = ("added p50 ms", "added p99 ms", "requests/s")

    def added(row: dict[str, Any]) -> str:
        return f"{each(*(row[name] for name in names[:2]))} ms; {number(row[names[2]])}"

    ours, theirs = short.values()
    rows = [
        Figure(
            "Router, added to a short request, p50 and p99; requests/s passed on",
            added(ours),
            f"vllm-router (Rust): {added(theirs)}",
            times(
                *(theirs[name] / ours[name] for name in names[:2]),
                ours[names[2]] / theirs[names[2]],
            ),
        )
    ]
    sides = ("us a short request", "us a streamed token")
    whole, alone, aiohttp, rust = (
        kept("router_cpu", side=side)
        for side in (
            "ours",
            "ours, data plane alone",
            "aiohttp pass-through",
            "vllm-router",
        )
    )

    def cost(row: dict[str, Any]) -> str:
        return " and ".join(number(row[side]) for side in sides)

    rows += [
        Figure(
            "Router, CPU of a short request and of a streamed token (`bench_router_cpu.py`)",
            f"{cost(whole)} µs; without its controller {cost(alone)}",
            f"aiohttp pass-through {cost(aiohttp)} µs; vllm-router (Rust) {cost(rust)}",
            f"{times(*(rust[side] / whole[side] for side in sides))} of vllm-router",
        ),
    ]
    for kind, what in (
        (
            "whole",
            "Twice the sustainable load for 12 s, 4 engines: p99 to first token of those "
            "served; served/s",
        ),
        ("PD", "The same, 2 prefill and 2 decode"),
    ):
        ours, theirs = (overloaded(kept, side, kind) for side in ("ours", "vllm-router"))
        p99, served = "first token p99 s", "served/s in time"
        rows.append(
            Figure(
                what,
                f"{number(ours[p99])} s; {number(ours[served])}",
                f"vllm-router {number(theirs[p99])} s; {number(theirs[served])}",
                times(theirs[p99] / ours[p99], ours[served] / theirs[served]),
            )
        )
    given, queued, waited = (
        kept("router_burst", requests=requests)["first token p99 s"]
        for requests in (
            "given to it, stolen by others",
            "given to nobody that loads",
            "given to it, wait until it is loaded",
        )
    )
    rows.append(
        Figure(
            "Burst while two prefill replicas load, over the router's process, scripted engines "
            "and HTTP: p99 to first token",
            f"{number(given)} s",
            f"each request waits for its own replica {number(waited)} s; common queue "
            f"{number(queued)} s",
            times(waited / given, queued / given),
        )
    )
    return rows


def beside_others(kept: Kept) -> list[dict[str, Any]]:
    """docs/comparison.md's."""

    def moved(block: int, side: str) -> str:
        row = kept("mooncake_transfer", block=block, side=side)
        ratios = row["save_ratio"], row["load_ratio"]
        return " and ".join(
            str(rate) if isinstance(rate, str) else f"{times(ratio)} x"
            for rate, ratio in zip((row["save_gbs"], row["load_gbs"]), ratios, strict=True)
        )

    def gained(thread: str, share: str) -> str:
        ours, theirs = (
            all_hooks(kept, side, thread, save_decode=False)[f"{share} us"]
            for side in ("kvpool", "in-tree")
        )
        return f"{times(theirs / ours)} x"

    first = [kept("ttft", model="Llama", side=side)["warm ms"] for side in ("kvpool", "in-tree")]
    large, small = (
        kept("ssd", cell=cell, side="store, 32 MiB") for cell in ("1024 KiB", "256 KiB")
    )
    taken = {
        items: [
            kept("embeds", what="in-tree", items=items, mib=mib, side="in-tree")["ms"]
            / kept("embeds", what="in-tree", items=items, mib=mib, side="kvpool")["ms"]
            for mib in sizes
        ]
        for items, sizes in ((1, (1, 16, 64)), (200, (1,)))
    }
    rows = [
        (
            "MooncakeStoreConnector, block 16, 64 keys a call: saving and loading",
            f"{moved(16, 'in-tree, 64 keys')} its rate; its own single call: "
            f"{moved(16, 'in-tree, whole')}",
        ),
        (
            "the same, block 128",
            f"{moved(128, 'in-tree, 64 keys')}; its own single call: "
            f"{moved(128, 'in-tree, whole')}",
        ),
        (
            "MooncakeStoreConnector, first token of a full hit",
            f"{number(first[0])} ms, it {number(first[1])} ms",
        ),
        (
            "MooncakeStoreConnector, hooks a step",
            f"scheduler's thread {gained('scheduler', 'p50')} as fast at the median, "
            f"{gained('scheduler', 'mean')} in the mean; model's thread {gained('model', 'p50')} "
            f"at the median, {gained('model', 'mean')} in the mean, as on CPUs a step waits for "
            "its gather",
        ),
        (
            "MooncakeStoreConnector with `store_tp_size=2`",
            "TP 1 wrote, TP 2 read 896 of 900 tokens: it works on CPUs too",
        ),
        (
            "fio with io_uring, cells of 1 MiB; of 256 KiB",
            "; ".join(
                f"{times(row['write_ratio'])} x in writing, {times(row['read_ratio'])} x in reading"
                for row in (large, small)
            ),
        ),
        (
            "ECMooncakeConnector, one item of 1, 16, 64 MiB; 200 items of 1 MiB",
            f"{times(*taken[1])} x; {times(*taken[200])} x",
        ),
        (
            "MooncakeStoreConnector in embedded mode",
            "what it stored is gone when the writing process exits",
        ),
    ]
    return [dict(zip(("beside", "result for vllm-kvpool"), row, strict=True)) for row in rows]


def superseding(kept: Kept) -> list[dict[str, Any]]:
    """Return docs/decisions.md's rows of the simulation of sessions."""
    names = ("traffic", "capacity, blocks", "as now", "turns supersede", "gain")
    return [{name: row[name] for name in names} for row in kept.rows("turns")]


def missed(folder: Path) -> str:
    """What misses its target, a line each."""
    return "\n".join(
        f"- {path.stem}: {target['text'].removeprefix('MISS  ')}"
        for path in sorted(folder.glob("*.json"))
        for target in json.loads(path.read_text()).get("targets", [])
        if not target["reached"]
    )


SECTIONS: dict[str, Callable[[Kept], list[Figure]]] = {
    "first tokens": first_tokens,
    "handover": handover,
    "transfer": transfer,
    "files": files,
    "mooncake": mooncake,
    "encryption": encryption,
    "lookups": lookups,
    "embeddings": embeds,
    "router": router,
}


def documents(kept: Kept) -> dict[Path, dict[str, str]]:
    """The tables of each document by name."""
    return {
        COMPARISON: {"beside others": table(beside_others(kept)), "missed": missed(kept.folder)},
        README: {"headline": table(headline(kept))},
        DECISIONS: {"turns": table(superseding(kept))},
        PERFORMANCE: {
            name: table([figure.row() for figure in made(kept)]) for name, made in SECTIONS.items()
        },
    }


def main() -> None:
    for document, tables in documents(Kept()).items():
        document.write_text(filled(document.read_text(), tables))


if __name__ == "__main__":
    main()
