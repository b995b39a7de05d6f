"""`python -m tests.soak.plot LINES SVG`: what the engines that were never killed held over time.

`LINES` is what `python -m tests.soak --lines` has written. Scenes follow each other along the axis.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Sample = dict[str, Any]
Lines = dict[str, list[tuple[float, float]]]  # points by what they are of

MIB = 1 << 20
OF_ENGINES: dict[str, Callable[[Sample], float]] = {
    "memory, MiB": lambda vitals: vitals["rss_bytes"] / MIB,
    "threads": lambda vitals: vitals["threads"],
    "open descriptors": lambda vitals: vitals["files"],
    "staging slots in use": lambda vitals: vitals["slots"],
}


def minutes(samples: Iterable[Sample]) -> list[tuple[float, Sample]]:
    """Each sample with its minute of the whole run."""
    placed: list[tuple[float, Sample]] = []
    began_s = last_s = 0.0
    for sample in samples:
        if sample["round"] == 1:  # the next scene
            began_s = last_s
        last_s = began_s + sample["seconds"]
        placed.append((last_s / 60, sample))
    return placed


def panels(placed: Iterable[tuple[float, Sample]]) -> dict[str, Lines]:
    """The lines of each panel. A line ends with its scene."""
    found: dict[str, Lines] = {
        name: defaultdict(list) for name in (*OF_ENGINES, "files of the stores", "kills")
    }
    for minute, sample in placed:
        scene = sample["scene"]
        for title, value in OF_ENGINES.items():
            for engine, vitals in sample["engines"].items():
                found[title][f"{scene} {engine}"].append((minute, value(vitals)))
        for number, directory in enumerate(sample["directories"]):
            line = found["files of the stores"][f"{scene} {number}"]
            line.append((minute, directory["files"]))
        found["kills"][scene].append((minute, sample["kills"]))
    return found


def draw(samples: Iterable[Sample], path: Path) -> None:
    """Draw one picture with a panel for each kind of resource that could leak."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "soak"  # the same numbers give the same file
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 3, figsize=(12, 6))
    for axis, (title, lines) in zip(axes.flat, panels(minutes(samples)).items(), strict=True):
        for label, points in lines.items():
            color = "#4477aa" if "writer" in label else "#cc6677" if "reader" in label else None
            axis.plot(*zip(*points, strict=True), color=color, linewidth=1, label=label)
        axis.set(title=title, xlabel="minutes", ylim=(0, None))
    for line in ("files of the stores", "kills"):
        next(axis for axis in axes.flat if axis.get_title() == line).legend(fontsize="x-small")
    figure.suptitle("blue: the writer that was never killed; red: the reader", fontsize="small")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def read(path: Path) -> list[Sample]:
    """The samples of a file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.plot", description=__doc__)
    parser.add_argument("lines", type=Path)
    parser.add_argument("svg", type=Path)
    arguments = parser.parse_args()
    draw(read(arguments.lines), arguments.svg)


if __name__ == "__main__":
    main()
