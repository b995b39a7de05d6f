"""`python -m tests.soak.results SUMMARY LINES`: keep a soak among the results of the benchmarks.

`SUMMARY` and `LINES` are what `python -m tests.soak --json SUMMARY --lines LINES` has written.
"""

import argparse
import json
import shutil
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.common import Row
from benchmarks.run_all import RESULTS, keep, write_documents
from tests.soak.plot import draw, read

MIB = 1 << 20
COUNTED = ("rounds", "kills", "requests", "hits", "wrong", "seconds", "cpu_s")


def rows(summaries: Iterable[dict[str, Any]]) -> list[Row]:
    """A row for each scene, which may have begun anew, and one for all."""
    by_scene: dict[str, Counter[str]] = {}
    for summary in summaries:
        counts = by_scene.setdefault(summary["scene"], Counter())
        counts.update({name: summary[name] for name in COUNTED})
        counts["half-written"] += summary["totals"].get("half-written files", 0)
        counts["at the start"] += summary["totals"].get("kills at the start", 0)
        counts["troubles"] += bool(summary["trouble"])
    total: Counter[str] = Counter()
    for counts in by_scene.values():
        total.update(counts)
    return [row_of(scene, counts) for scene, counts in [*by_scene.items(), ("all", total)]]


def row_of(scene: str, counts: Counter[str]) -> Row:
    return {
        "scene": scene,
        "minutes": counts["seconds"] / 60,
        "rounds": counts["rounds"],
        "kills": counts["kills"],
        "of them while they opened": counts["at the start"],
        "files half-written": counts["half-written"],
        "requests": counts["requests"],
        "hits": counts["hits"],
        "wrong": counts["wrong"],
        "CPU s": counts["cpu_s"],
        "kills / CPU s": counts["kills"] / counts["cpu_s"] if counts["cpu_s"] else 0.0,
        "troubles": counts["troubles"],
    }


def growth(summaries: Iterable[dict[str, Any]]) -> list[str]:
    """Return notes on the resources of never killed engines, after their first and last rounds."""
    notes = []
    for summary in summaries:
        for engine, seen in summary["vitals"].items():
            first, last = seen["first"], seen["last"]
            notes.append(
                f"{summary['scene']}, {engine}, after the first and the last of "
                f"{summary['rounds']} rounds: memory {first['rss_bytes'] // MIB} and "
                f"{last['rss_bytes'] // MIB} MiB, "
                + ", ".join(
                    f"{what} {first[name]} and {last[name]}"
                    for what, name in (
                        ("threads", "threads"),
                        ("descriptors", "files"),
                        ("slots", "slots"),
                    )
                )
            )
    return notes


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.results", description=__doc__)
    parser.add_argument("summary", type=Path)
    parser.add_argument("lines", type=Path)
    parser.add_argument("--note", action="append", default=[], help="what a reader must know")
    arguments = parser.parse_args()
    summary = json.loads(arguments.summary.read_text())
    draw(read(arguments.lines), RESULTS / "soak.svg")
    shutil.copyfile(arguments.lines, RESULTS / "soak.jsonl")
    notes = [*arguments.note, *growth(summary["scenes"])]
    command = f"python -m tests.soak --minutes 60 --seed {summary['seed']}"
    keep("soak", {"command": command, "rows": rows(summary["scenes"]), "notes": notes})
    write_documents()


if __name__ == "__main__":
    main()
