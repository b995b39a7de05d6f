"""The tables of README.md and of three documents in docs/, from the kept results.

    python benchmarks/figures.py

A row has one value of the pool, at most one of a peer, and the ratio of both. It takes each number
from a kept row. `run_all.py` writes the tables anew; `tests/test_figures.py` fails where a document
has other ones.
"""

import json
from collections.abc import Callable, Mapping
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
WANTED_WAIT_MS = 20.0
WANTED_ANSWER_MS = 3.0
WANTED_NEAR_MS = 10.0
WANTED_ROUND_MS = 1.0
GQA = "nothing reused, SmolLM2-135M-Instruct (GQA), 22.5 KiB a token"
MHA = "nothing reused, random weights (MHA), 32 KiB a token"
IN_TREE = "vLLM's MooncakeStore"
"""The side's name in kept rows."""
MOONCAKE_STORE = "MooncakeStoreConnector"
NIXL, NIXL_ROWS = "NixlConnector", "NixlConnector, a poll each 1 ms"
PAUSED_NIXL = f"{NIXL}, polling each 1 ms"
MOONCAKE_PEER = "MooncakeConnector"
WANTED = "wanted"
WAYS = ("save", "load")
SHARES = ("mean", "p50", "p99")
Value = float | str
"""A figure, or why there is none."""


class Figure(NamedTuple):
    """A row of a table: one value of the pool, and at most one of a peer."""

    what: str
    ours: str
    beside: str = ""
    ratio: str = ""

    def row(self) -> dict[str, Any]:
        """Return the cells by the names of their columns."""
        return dict(zip(COLUMNS, self, strict=True))


COLUMNS = ("figure", "vllm-kvpool", "compared with", "times better")


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


def times(ratio: float, *, at_least: float = 1.0) -> str:
    """Return a ratio in the pool's favour, bold below `at_least`."""
    text = f"{ratio:.2g}" if ratio < 10 else number(round(ratio))
    return f"**{text}**" if ratio < at_least else text


def shown(value: Value, unit: str) -> str:
    return value if isinstance(value, str) else f"{number(value)} {unit}".rstrip()


def compare(
    what: str,
    unit: str,
    ours: Value,
    peers: Mapping[str, Value] | None = None,
    *,
    more_is_better: bool = False,
    at_least: float = 1.0,
) -> list[Figure]:
    """Return a row for each peer, or one without a peer.

    A ratio below `at_least` is bold.
    """
    rows = []
    for name, theirs in (peers or {}).items():
        if isinstance(ours, str) or isinstance(theirs, str):
            ratio = ""
        elif ours <= 0:  # decode's token comes before prefill's answer
            ratio = "comes first"
        else:
            better = ours / theirs if more_is_better else theirs / ours
            ratio = times(better, at_least=at_least)
        rows.append(Figure(what, shown(ours, unit), f"{name}: {shown(theirs, unit)}", ratio))
    return rows or [Figure(what, shown(ours, unit))]


def headline(kept: Kept) -> list[Figure]:
    """Return the rows of README's table."""
    ours, theirs = (kept("ttft", model="Llama", side=side) for side in ("kvpool", "in-tree"))
    real, real_theirs = (
        conversation(kept, side)["TTFT mean ms"] for side in ("kvpool, Mooncake", IN_TREE)
    )
    chat, without = (
        kept("chat", tiers=tiers)["turn 3 ms"] for tiers in ("host + SSD + Mooncake", "no pool")
    )
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
            for way in ("kvpool, Mooncake", NIXL_ROWS)
        ]
        for decode in ("blocks of 128", "blocks of 128, no spinning")
    )
    return [
        *compare(
            "First token after a full hit of 2,048 tokens over Mooncake; random weights",
            "ms",
            ours["warm ms"],
            {MOONCAKE_STORE: theirs["warm ms"]},
        ),
        *compare(
            "First token in conversations over Mooncake, mean; real weights (SmolLM2-135M)",
            "ms",
            real,
            {MOONCAKE_STORE: real_theirs},
        ),
        *compare(
            "Hand-over of 2,048 tokens over Mooncake, answer of prefill to first token, mean",
            "ms",
            handed["gap mean ms"],
            {PAUSED_NIXL: handed_theirs["gap mean ms"]},
        ),
        *compare(
            "Processor time of that hand-over, both engines",
            "s",
            handed["CPU s"],
            {PAUSED_NIXL: handed_theirs["CPU s"]},
        ),
        *compare(
            "The same, all workers poll for 10 ms after a step",
            "s",
            still["CPU s"],
            {PAUSED_NIXL: still_theirs["CPU s"]},
        ),
        *compare(
            "First token of a chat's third turn; tiers of 96 MiB, 256 MiB and 1 GiB",
            "ms",
            chat,
            {"no pool": without},
        ),
        *(
            figure
            for way in WAYS
            for figure in compare(
                f"{way.title()} over Mooncake TCP, block 16",
                "GB/s",
                moved[f"{way}_gbs"],
                {MOONCAKE_STORE: moved_theirs[f"{way}_gbs"]},
                more_is_better=True,
            )
        ),
        *(
            figure
            for name, share in (("mean", "mean"), ("median", "p50"))
            for figure in compare(
                f"Scheduler's thread in a step of 64 requests, {name}",
                "µs",
                hooks[f"{share} us"],
                {MOONCAKE_STORE: hooks_theirs[f"{share} us"]},
            )
        ),
        *compare(
            "First token at twice the sustainable load, p99 of the served requests",
            "s",
            over["ours"],
            {"vllm-router": over["vllm-router"]},
        ),
    ]


def all_hooks(kept: Kept, side: str, thread: str, *, save_decode: bool) -> dict[str, Any]:
    return kept("hooks", side=side, thread=thread, save_decode=save_decode, what="all hooks")


def overloaded(kept: Kept, side: str, kind: str = "whole") -> dict[str, Any]:
    """The row of `side` at twice the sustained load, whose rate differs from run to run."""
    return kept("router", "sustained/s", side=f"{side}, {kind}")


def conversation(kept: Kept, side: str) -> dict[str, Any]:
    return kept("real_weights", part="conversations", side=side, **{"turns/s": 1.0})


def first_tokens(kept: Kept) -> list[Figure]:
    chat = {
        name: kept("chat", tiers=tiers)["turn 3 ms"]
        for name, tiers in (
            ("ours", "host + SSD + Mooncake"),
            ("no pool", "no pool"),
            ("host memory alone", "host"),
        )
    }
    rows = compare("Third turn of the chat, all tiers", "ms", chat.pop("ours"), chat)
    for model in ("Llama", "LFM2", "Qwen3-Next"):
        ours, theirs = (kept("ttft", model=model, side=side) for side in ("kvpool", "in-tree"))
        rows += compare(
            f"Full hit of 2,048 tokens over Mooncake, {model}",
            "ms",
            ours["warm ms"],
            {MOONCAKE_STORE: theirs["warm ms"], "nothing cached": ours["cold ms"]},
        )
    for model in ("Llama", "LFM2", "Qwen3-Next"):
        files = kept("ttft", model=model, side="kvpool, files")
        what = f"Full hit of 2,048 tokens over files, {model}"
        rows += compare(what, "ms", files["warm ms"], {"nothing cached": files["cold ms"]})
    return rows


def ends(kept: Kept) -> list[Figure]:
    """Hits that end inside a chunk."""
    rows = []
    for known in ("511 of 511", "500 of 540"):
        ours = kept("ends", side="chunks of 256, aliases of 64", known=known)
        others = {
            f"chunks of {size}": kept("ends", side=f"chunks of {size}", known=known)
            for size in (256, 64, 32)
        }
        for column, unit, what in (
            ("first token ms", "ms", "First token"),
            ("keys", "keys", "Keys of the stored prompt"),
        ):
            rows += compare(
                f"{what}, {known} tokens stored",
                unit,
                ours[column],
                {name: other[column] for name, other in others.items()},
            )
    return rows


def real_weights(kept: Kept) -> list[Figure]:
    rows = []
    for side, where, peers in (
        (
            "kvpool, files",
            "over files",
            {
                "nothing cached": "nothing cached",
                "the engines' own caches": "the engines' own caches",
            },
        ),
        ("kvpool, Mooncake", "over Mooncake", {MOONCAKE_STORE: IN_TREE}),
    ):
        ours = conversation(kept, side)
        for column, unit, what, more in (
            ("TTFT mean ms", "ms", "First token, mean", False),
            ("TTFT p99 ms", "ms", "First token, p99", False),
            ("tokens/s", "tokens/s", "Generated tokens", True),
            ("CPU s / turn", "s", "Processor time of a turn", False),
        ):
            theirs = {name: conversation(kept, peer)[column] for name, peer in peers.items()}
            rows += compare(f"{what}, {where}", unit, ours[column], theirs, more_is_better=more)
    for part, model in ((GQA, "SmolLM2-135M"), (MHA, "MHA, 18 million weights")):
        theirs = kept("real_weights", part=part, side=IN_TREE)["CPU over no pool"]
        for side in ("files", "host memory", "Mooncake"):
            ours = kept("real_weights", part=part, side=f"kvpool, {side}")["CPU over no pool"]
            rows += compare(
                f"Processor time over that without a pool, {model}, {side}",
                "",
                ours,
                {MOONCAKE_STORE: theirs},
            )
    return rows


def away(kept: Kept) -> list[Figure]:
    return [
        figure
        for store, what in (
            ("refuses", "refuses every call"),
            ("never answers", "never answers"),
            ("5 s a call", "takes 5 s a call"),
        )
        for figure in compare(
            f"Speed of an engine over a store that {what}",
            "",
            kept("away", store=store)["speed"],
            {"the same engine without a pool": 1.0},
            more_is_better=True,
        )
    ]


def traffic(kept: Kept) -> list[Figure]:
    """A replayed trace."""
    offloading_name = "OffloadingConnector"

    def replayed(side: str, mib: int = 2048) -> dict[str, Any]:
        row = kept("trace", side=side, **{"store MiB": mib})
        return {
            "found": row["found"],
            "CPU": row["CPU s / GB computed or loaded"],
            "hooks": row["held mean us"] / 1e3,
        }

    def found(
        what: str, ours: float, peers: Mapping[str, Value], at_least: float = 1.0
    ) -> list[Figure]:
        return compare(
            f"Prompt tokens found, {what}",
            "",
            ours,
            peers,
            more_is_better=True,
            at_least=at_least,
        )

    def cost(what: str, ours: float, peers: Mapping[str, Value]) -> list[Figure]:
        return compare(f"Processor time of a GB, {what}", "s", ours, peers)

    def hooks(what: str, ours: float, peers: Mapping[str, Value]) -> list[Figure]:
        return compare(f"Hooks of a step, mean, {what}", "ms", ours, peers)

    ours, theirs = replayed("kvpool, Mooncake"), replayed(IN_TREE)
    host, offloading = replayed("kvpool, host memory"), replayed("vLLM's OffloadingConnector")
    three, three_theirs = (
        replayed(f"three engines: {side}") for side in ("kvpool, Mooncake", IN_TREE)
    )
    unbounded = kept("trace", side="unbounded, simulated")["found"]
    small, large = (replayed("kvpool, files", mib)["found"] for mib in (512, 2048))
    return [
        *found("Mooncake of 2 GiB", ours["found"], {MOONCAKE_STORE: theirs["found"]}),
        *found("Mooncake of 2 GiB", ours["found"], {"a store without bounds": unbounded}, 0.0),
        *cost("Mooncake of 2 GiB", ours["CPU"], {MOONCAKE_STORE: theirs["CPU"]}),
        *hooks("Mooncake of 2 GiB", ours["hooks"], {MOONCAKE_STORE: theirs["hooks"]}),
        *found("files of 512 MiB", small, {MOONCAKE_STORE: replayed(IN_TREE, 512)["found"]}),
        *found(
            "files of 2 GiB",
            large,
            {MOONCAKE_STORE: theirs["found"], offloading_name: offloading["found"]},
        ),
        *found("three engines", three["found"], {MOONCAKE_STORE: three_theirs["found"]}),
        *cost("three engines", three["CPU"], {MOONCAKE_STORE: three_theirs["CPU"]}),
        *cost("host memory of 2 GiB", host["CPU"], {offloading_name: offloading["CPU"]}),
        *hooks("host memory of 2 GiB", host["hooks"], {offloading_name: offloading["hooks"]}),
    ]


def handover(kept: Kept) -> list[Figure]:
    ours = {"Mooncake": "kvpool, Mooncake", "files": "kvpool, files"}
    theirs = {NIXL: NIXL_ROWS, MOONCAKE_PEER: MOONCAKE_PEER}

    def of(way: str, tokens: int, at_once: int, decode: str) -> dict[str, Any]:
        columns = {"decode": decode, "tokens": tokens, "at a time": at_once}
        return kept("handover", way=way, **columns)

    def rows_of(
        what: str, unit: str, column: str, tokens: int, at_once: int = 1, decode: str = ""
    ) -> list[Figure]:
        engines = f"blocks of 128{decode}"
        peers = {
            name: of(way, tokens, at_once, engines).get(column, "no end")
            for name, way in theirs.items()
        }
        return [
            figure
            for store, way in ours.items()
            for figure in compare(
                f"{what}, over {store}", unit, of(way, tokens, at_once, engines)[column], peers
            )
        ]

    rows = []
    for tokens, at_once in ((512, 1), (2048, 1), (6144, 1), (2048, 8)):
        what = f"{number(tokens)} tokens" + (f", {at_once} at a time" if at_once > 1 else "")
        for share in ("mean", "p99"):
            rows += rows_of(f"{what}, {share}", "ms", f"gap {share} ms", tokens, at_once)
    for what, decode in (
        ("Processor time, 2,048 tokens", ""),
        ("Processor time, 2,048 tokens, polling for 10 ms", ", no spinning"),
    ):
        rows += rows_of(what, "s", "CPU s", 2048, decode=decode)
    killed = {
        way: kept("handover", way=way, prefill="killed after its answer")["first token s"]
        for way in (*ours.values(), *theirs.values())
    }
    peers = {name: killed[way] for name, way in theirs.items()}
    for store, way in ours.items():
        rows += compare(f"First token after prefill's death, over {store}", "s", killed[way], peers)
    return rows


def hops(kept: Kept) -> list[dict[str, Any]]:
    """Return how long after prefill's last step each part of a hand-over ends, without models."""
    return [
        {
            "prompt": f"{number(tokens)} tokens",
            "store": store,
            **{
                f"{hop}, ms": number(
                    kept(
                        "handover",
                        store=store,
                        tokens=tokens,
                        hop=hop,
                        **{"decode asks": "once all is stored"},
                    )["mean ms"]
                )
                for hop in ("gathered", "stored", "known", "loaded")
            },
        }
        for tokens in (512, 2048, 6144)
        for store in ("Mooncake", "files")
    ]


def transfer(kept: Kept) -> list[Figure]:
    """And staging."""
    rows = []
    for case, size, what in (
        ("S1 graphs in flight", 1, "1 graph in flight"),
        ("S1 graphs in flight", 2048, "2,048 graphs in flight"),
        ("S2 ops in one graph", 64, "a graph of 64 ops"),
        ("S2 ops in one graph", 65_536, "a graph of 65,536 ops"),
    ):
        rows += compare(
            f"Completion of an op, {what}", "µs", kept("scheduler", case=case, size=size)["op us"]
        )
    trip = kept("engine", graph="one op")["p50 us"]
    lane = kept("engine", graph="1000 saves, lane killed")["seconds to the last"]
    rows += [
        *compare(
            "Round trip of an op through engine and lane, p50",
            "µs",
            trip,
            {WANTED: WANTED_ROUND_TRIP_US},
        ),
        *compare(
            "A lane killed among 1,000 saves: all reported after", "s", lane, {"FlexKV": "never"}
        ),
    ]
    for layout, block, form in (
        ("LBNHC", 16, "token-major, block 16"),
        ("LBHNC", 128, "head-major, block 128"),
    ):
        row = kept("gather", layout=layout, block=block, moved_mib=192)
        for way in ("gather", "scatter"):
            rows += compare(
                f"{way.title()}, {form}",
                "GB/s",
                row[f"{way}_gbs"],
                {"memcpy": row["memcpy_gbs"]},
                more_is_better=True,
            )
    states, chunk = (
        kept("states", store="file", what=what)
        for what in ("states at a boundary", "cells of a chunk")
    )
    for way in WAYS:
        rows += compare(
            f"Recurrent states at a boundary, {way}",
            "GB/s",
            states[f"{way} GB/s"],
            {"attention cells of a chunk": chunk[f"{way} GB/s"]},
            more_is_better=True,
        )
        rows += compare(f"Recurrent states at a boundary, {way}, time", "ms", states[f"{way} ms"])
    return rows


def files(kept: Kept) -> list[Figure]:
    rows = []
    for cell, side, what in (
        ("1024 KiB", "store, 32 MiB", "cells of 1 MiB"),
        ("256 KiB", "store, 32 MiB", "cells of 256 KiB"),
        ("256 KiB", "store, 32 MiB x 2 lanes", "cells of 256 KiB, two lanes"),
    ):
        ours, fio = kept("ssd", cell=cell, side=side), kept("ssd", cell=cell, side="fio")
        # Not the ratio of these medians: rounds are compared one by one.
        rows += [
            Figure(
                f"{way.title()}, {what}",
                shown(ours[f"{way}_mb_s"] / 1e3, "GB/s"),
                f"fio, io_uring: {shown(fio[f'{way}_mb_s'] / 1e3, 'GB/s')}",
                times(ours[f"{way}_ratio"]),
            )
            for way in ("write", "read")
        ]
    small = kept("ssd", cell="256 KiB", side="store, 32 MiB")
    waits = kept("ssd", cell="2000000 stored", side="wait for the index")
    rebuilt, first = (
        kept("ssd", cell="200000 sparse files", side=f"index lost: {what}")["s"]
        for what in ("rebuilt, CPU", "first hit")
    )
    wait = "Wait of a process for the index"
    return [
        *rows,
        *compare("Processor time of a put, cell of 256 KiB", "µs", small["write_cpu_us"]),
        *compare("Processor time of a get, cell of 256 KiB", "µs", small["read_cpu_us"]),
        *compare(f"{wait}, mean", "ms", waits["mean_ms"]),
        *compare(f"{wait}, p99", "ms", waits["p99_ms"], {WANTED: WANTED_WAIT_MS}),
        *compare(f"{wait}, longest", "ms", waits["max_ms"]),
        *compare("Rebuild of a lost index, processor time a cell", "µs", rebuilt / 200_000 * 1e6),
        *compare("First hit in a store whose index is lost", "ms", 1e3 * first),
    ]


def mooncake(kept: Kept) -> list[Figure]:
    rows = []

    def of(block: int, side: str) -> dict[str, Any]:
        return kept("mooncake_transfer", block=block, side=side)

    for block in (16, 128):
        ours = of(block, "kvpool")
        plain = [of(block, f"plain, {how}") for how in ("32 keys", "one call")]
        for way in WAYS:
            column = f"{way}_cpu_s_per_gb"
            cheaper = min(row[column] for row in plain)
            # Not the ratio of these medians: rounds are compared one by one.
            judged = kept.judged(
                "mooncake_transfer", f"block {block}, {way}: processor time over plain buffers"
            )
            rows.append(
                Figure(
                    f"Processor time of a GB, {way}, block {block}",
                    shown(ours[column], "s"),
                    f"plain buffers: {shown(cheaper, 's')}",
                    times(1 / judged, at_least=1 / WANTED_CPU),
                )
            )
    for block in (16, 128):
        ours = of(block, "kvpool")
        for side, name, at_least in (
            ("in-tree, 64 keys", MOONCAKE_STORE, 1.0),
            ("plain, 32 keys", "plain buffers", 0.0),
            ("copied and hashed, else plain", "plain buffers, copied and hashed", 0.0),
        ):
            for way in WAYS:
                rows += compare(
                    f"Rate of a {way}, block {block}",
                    "GB/s",
                    ours[f"{way}_gbs"],
                    {name: of(block, side)[f"{way}_gbs"]},
                    more_is_better=True,
                    at_least=at_least,
                )
    rank, head = (
        kept("storage_mode", store="mooncake", cells=f"per {what}") for what in ("rank", "head")
    )
    rows += compare("Keys, cells per rank", "keys", rank["number"], {"per head": head["number"]})
    for what in (*WAYS, "lookup"):
        name = f"{what} ms"
        rows += compare(
            f"Time of a {what}, cells per rank",
            "ms",
            rank[name],
            {"per head": head[name]},
            at_least=0.0,
        )
    return rows


def links(kept: Kept) -> list[Figure]:
    rows = []
    for gbits in (2.5, 5.0, 10.0):
        for block in (16, 128):
            ours, plain = (
                kept("mooncake_link", gbits=gbits, block=block, side=side)
                for side in ("kvpool", "plain, 32 keys")
            )
            for way in WAYS:
                what = f"{gbits:g} Gbit/s, block {block}, {way}"
                cpu, rate = f"{way}_cpu_s_per_gb", f"{way}_gbs"
                rows += compare(
                    f"{what}: processor time of a GB",
                    "s",
                    ours[cpu],
                    {"plain buffers": plain[cpu]},
                    at_least=1 / WANTED_CPU,
                )
                rows += compare(
                    f"{what}: rate",
                    "GB/s",
                    ours[rate],
                    {"plain buffers": plain[rate]},
                    more_is_better=True,
                    at_least=0.8,
                )
    return rows


def encryption(kept: Kept) -> list[Figure]:
    rows = []
    for kind, cell, what in (
        ("with store", "1024 KiB", "over a store in memory, cells of 1 MiB"),
        ("with store", "256 KiB", "over a store in memory, cells of 256 KiB"),
        ("alone", "1024 KiB", "alone, cells of 1 MiB"),
    ):
        secret, plain = (
            kept("encryption", cell=cell, **{"cells are": form}) for form in ("encrypted", "plain")
        )
        for way in WAYS:
            column = f"{way} {kind}, CPU s/GB"
            rows += compare(
                f"{way.title()} {what}",
                "s/GB",
                secret[column],
                {"plain, with checksum": plain[column]},
                at_least=0.0,
            )
    return rows


def lookups(kept: Kept) -> list[Figure]:
    """And hooks."""

    def asked(what: str, share: str) -> float:
        stored = [kept("lookup", **{"stored chunks": n}) for n in (0, 1, 100, 317, 511, 512)]
        return float(max(row[f"{what} {share}"] for row in stored))

    whole = kept("lookup", **{"stored chunks": "one call: cells of the pool"})["asking p50"]
    states, without = (
        kept("lookup", **{"stored chunks": stored}) for stored in ("511, with states", 511)
    )
    near = kept("lookup", **{"stored chunks": "far tier of 1 s a call, all near"})
    rows = []
    for share in SHARES:
        one_call = {"all keys in one call": whole} if share == "p50" else {}
        rows += compare(f"Asking the store, {share}", "ms", asked("asking", share), one_call)
    for share in SHARES:
        target = {WANTED: WANTED_ANSWER_MS} if share == "p50" else {}
        rows += compare(f"Arrival to answer, {share}", "ms", asked("answer", share), target)
    for share in SHARES:
        column = f"asking {share}"
        peers = {"without states": without[column]}
        rows += compare(f"Asking for recurrent states, {share}", "ms", states[column], peers)
    for share in SHARES:
        target = {WANTED: WANTED_NEAR_MS} if share == "p99" else {}
        what = f"Near tier's answer beside a far tier of 1 s a call, {share}"
        rows += compare(what, "ms", near[f"answer {share}"], target)
    for thread in ("scheduler", "model"):
        for save_decode, how in ((False, ""), (True, ", `save_decode`")):
            ours, theirs = (
                all_hooks(kept, side, thread, save_decode=save_decode)
                for side in ("kvpool", "in-tree")
            )
            for share in SHARES:
                rows += compare(
                    f"Hooks of a step, {thread}'s thread{how}, {share}",
                    "µs",
                    ours[f"{share} us"],
                    {MOONCAKE_STORE: theirs[f"{share} us"]},
                )
    return rows


def embeds(kept: Kept) -> list[Figure]:
    transports = {"mooncake": "Mooncake TCP", "local": "shared memory"}

    def of(what: str, transport: str, side: str, **more: object) -> dict[str, Any]:
        return kept("embeds", what=what, transport=transport, side=side, **more)

    rows = []
    for transport, name in transports.items():
        for mib in (64, 256):
            ours, theirs = (
                of("window", transport, side, mib=mib)["cpu_s_gb"]
                for side in ("an eighth", "one grant")
            )
            rows += compare(
                f"Embedding of {mib} MiB through a window of 1/8, {name}",
                "s/GB",
                ours,
                {"a window that holds all": theirs},
                at_least=1 / WANTED_CPU,
            )
    for transport, name in transports.items():
        trip = of("rounds", transport, "two in flight")["ms_a_round"]
        what = f"One more round, two in flight, {name}"
        rows += compare(what, "ms", trip, {WANTED: WANTED_ROUND_MS})
    for row_bytes, size in ((8192, "8 KiB"), (2048, "2 KiB")):
        for transport, name in transports.items():
            many, one = (
                of("many", transport, side, row_bytes=row_bytes)["cpu_s_gb"]
                for side in ("many", "single stream")
            )
            rows += compare(
                f"1,000 embeddings of 256 rows of {size} from 4 encoders, {name}",
                "s/GB",
                many,
                {"one stream": one},
                at_least=1 / WANTED_CPU,
            )
    for items, mib, what in (
        (1, 1, "One embedding of 1 MiB"),
        (1, 16, "One embedding of 16 MiB"),
        (1, 64, "One embedding of 64 MiB"),
        (200, 1, "200 embeddings of 1 MiB"),
    ):
        ours, theirs, again = (
            of("in-tree", "mooncake", side, items=items, mib=mib)["ms"]
            for side in ("kvpool", "in-tree", "in-tree, connections kept")
        )
        peers = {"ECMooncakeConnector": theirs, "ECMooncakeConnector, connections kept": again}
        rows += compare(f"{what}, ready for use", "ms", ours, peers)
    return rows


def router(kept: Kept) -> list[Figure]:
    rust = "vllm-router (Rust)"
    ours, theirs = (
        kept("router", what="short requests", side=f"{side}, whole")
        for side in ("ours", "vllm-router")
    )
    rows = [
        *(
            figure
            for share in ("p50", "p99")
            for figure in compare(
                f"Added to a short request, {share}",
                "ms",
                ours[f"added {share} ms"],
                {rust: theirs[f"added {share} ms"]},
            )
        ),
        *compare(
            "Requests passed on",
            "requests/s",
            ours["requests/s"],
            {rust: theirs["requests/s"]},
            more_is_better=True,
        ),
    ]
    for column, what in (
        ("us a short request", "Processor time of a short request"),
        ("us a streamed token", "Processor time of a streamed token"),
    ):
        own, alone, aiohttp, peer = (
            kept("router_cpu", side=side)[column]
            for side in ("ours", "ours, data plane alone", "aiohttp pass-through", "vllm-router")
        )
        rows += compare(what, "µs", own, {rust: peer, "aiohttp pass-through": aiohttp})
        rows += compare(f"{what}, without the controller", "µs", alone)
    for kind, engines in (("whole", "4 engines"), ("PD", "2 prefill and 2 decode engines")):
        over, over_theirs = (overloaded(kept, side, kind) for side in ("ours", "vllm-router"))
        p99, served = "first token p99 s", "served/s in time"
        rows += [
            *compare(
                f"Twice the sustainable load, {engines}: first token, p99",
                "s",
                over[p99],
                {rust: over_theirs[p99]},
            ),
            *compare(
                f"Twice the sustainable load, {engines}: served in time",
                "requests/s",
                over[served],
                {rust: over_theirs[served]},
                more_is_better=True,
            ),
        ]
    given, queued, waited = (
        kept("router_burst", requests=requests)["first token p99 s"]
        for requests in (
            "given to it, stolen by others",
            "given to nobody that loads",
            "given to it, wait until it is loaded",
        )
    )
    return rows + compare(
        "Burst while two prefill replicas load: first token, p99",
        "s",
        given,
        {"each waits for its own replica": waited, "common queue": queued},
    )


def beside_others(kept: Kept) -> list[dict[str, Any]]:
    """Return docs/comparison.md's rows; text where a run had no figure."""
    first = [kept("ttft", model="Llama", side=side)["warm ms"] for side in ("kvpool", "in-tree")]
    rows: list[tuple[str, str, str]] = []
    for block in (16, 128):
        for side, calls in (("64 keys", "64 keys a call"), ("whole", "one call")):
            row = kept("mooncake_transfer", block=block, side=f"in-tree, {side}")
            for way in WAYS:
                rate, ratio = row[f"{way}_gbs"], row[f"{way}_ratio"]
                result = f"its call: {rate}" if isinstance(rate, str) else times(ratio)
                rows.append((MOONCAKE_STORE, f"rate of a {way}, block {block}, {calls}", result))
    rows.append((MOONCAKE_STORE, "first token of a full hit", times(first[1] / first[0])))
    for thread in ("scheduler", "model"):
        ours, theirs = (
            all_hooks(kept, side, thread, save_decode=False) for side in ("kvpool", "in-tree")
        )
        for name, share in (("median", "p50 us"), ("mean", "mean us")):
            what = f"hooks of a step, {thread}'s thread, {name}"
            rows.append((MOONCAKE_STORE, what, times(theirs[share] / ours[share])))
    for cell, size in (("1024 KiB", "1 MiB"), ("256 KiB", "256 KiB")):
        row = kept("ssd", cell=cell, side="store, 32 MiB")
        for way in ("write", "read"):
            what = f"rate of a {way}, cells of {size}"
            rows.append(("fio with io_uring", what, times(row[f"{way}_ratio"])))
    for items, mib, what in (
        (1, 1, "one item of 1 MiB"),
        (1, 16, "one item of 16 MiB"),
        (1, 64, "one item of 64 MiB"),
        (200, 1, "200 items of 1 MiB"),
    ):
        own, peer = (
            kept("embeds", what="in-tree", items=items, mib=mib, side=side)["ms"]
            for side in ("kvpool", "in-tree")
        )
        rows.append(("ECMooncakeConnector", what, times(peer / own)))
    names = ("beside", "figure", "times better")
    return [dict(zip(names, row, strict=True)) for row in rows]


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


SECTIONS: Mapping[str, Callable[[Kept], list[Figure]]] = {
    "first tokens": first_tokens,
    "ends": ends,
    "real weights": real_weights,
    "away": away,
    "traffic": traffic,
    "handover": handover,
    "transfer": transfer,
    "files": files,
    "mooncake": mooncake,
    "links": links,
    "encryption": encryption,
    "lookups": lookups,
    "embeddings": embeds,
    "router": router,
}


def documents(kept: Kept) -> dict[Path, dict[str, str]]:
    """The tables of each document by name."""

    def of_figures(figures: list[Figure]) -> str:
        return table([figure.row() for figure in figures])

    return {
        COMPARISON: {"beside others": table(beside_others(kept)), "missed": missed(kept.folder)},
        README: {"headline": of_figures(headline(kept))},
        DECISIONS: {"turns": table(superseding(kept))},
        PERFORMANCE: {
            **{name: of_figures(made(kept)) for name, made in SECTIONS.items()},
            "hops": table(hops(kept)),
        },
    }


def main() -> None:
    for document, tables in documents(Kept()).items():
        document.write_text(filled(document.read_text(), tables))


if __name__ == "__main__":
    main()
