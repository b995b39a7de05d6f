"""The tables of README.md and of four documents in docs/, from the kept results.

    python benchmarks/figures.py

`figures.md.jinja` has a block for each table. A row has one value of the pool, at most one of a
peer, and the ratio of both. It takes each number from a kept row. `run_all.py` writes the tables
anew; `tests/test_figures.py` fails where a document has other ones.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2

from benchmarks.scale import RESULTS, ROOT, filled, number

README = ROOT / "README.md"
PERFORMANCE = ROOT / "docs" / "performance.md"
COMPARISON = ROOT / "docs" / "comparison.md"
DECISIONS = ROOT / "docs" / "decisions.md"
DEVICES = ROOT / "docs" / "devices.md"
TEMPLATE = Path(__file__).with_name("figures.md.jinja")
TABLE = re.compile(r"<!-- ((?!end )[\w ]+) -->\n(.*?)<!-- end -->", re.DOTALL)
HEAD = "| figure | vllm-kvpool | compared with | times better |\n|---|---|---|---|"
Value = float | str
"""A figure, or why there is none."""


class Figure(NamedTuple):
    """A row of a table: one value of the pool, and at most one of a peer."""

    what: str
    ours: str
    beside: str = ""
    ratio: str = ""


class Kept:
    """The kept results. A call returns the value of a column in the only row with these values."""

    def __init__(self, folder: Path = RESULTS) -> None:
        self._results: dict[str, dict[str, Any]] = {
            path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))
        }

    def rows(self, name: str) -> list[dict[str, Any]]:
        """Return all rows of a kept result."""
        return list(self._results[name]["rows"])

    def row(self, name: str, having: str = "", /, **columns: object) -> dict[str, Any]:
        """Return the only row with these values, and with the column `having`."""
        found = [
            row
            for row in self.rows(name)
            if columns.items() <= row.items() and (not having or having in row)
        ]
        if len(found) != 1:
            raise LookupError(f"results/{name}.json has {len(found)} rows with {columns}")
        return found[0]

    def __call__(self, name: str, column: str, /, **columns: object) -> Any:
        return self.row(name, column, **columns)[column]

    def column(self, name: str, column: str, key: str, values: Sequence[object]) -> list[Any]:
        """Return a column of the rows that have these values as `key`."""
        return [self(name, column, **{key: value}) for value in values]

    def judged(self, name: str, what: str) -> float:
        """The value of a kept target, as the benchmark judged it."""
        targets = self._results[name]["targets"]
        [value] = [target["value"] for target in targets if target["what"] == what]
        return float(value)

    def missed(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield each target that is missed, with the name of its result."""
        for name, result in self._results.items():
            yield from ((name, each) for each in result.get("targets", []) if not each["reached"])


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


def row(*cells: object) -> str:
    """Return a row of a table in Markdown."""
    return f"| {' | '.join(map(str, cells))} |"


NAMES: Mapping[str, Any] = {
    "HEAD": HEAD,
    "STORE": "MooncakeStoreConnector",
    "IN_TREE": "vLLM's MooncakeStore",
    "NIXL": "NixlConnector, a poll each 1 ms",
    "RUST": "vllm-router (Rust)",
    "MODELS": ("Llama", "LFM2", "Qwen3-Next"),
    "TALKS": {"part": "conversations", "turns/s": 1.0},
    "WAYS": ("save", "load"),
    "SHARES": ("mean", "p50", "p99"),
    "compare": lambda *args, **how: "\n".join(row(*each) for each in compare(*args, **how)),
    **{"max": max, "min": min, "number": number, "row": row, "shown": shown, "times": times},
}
"""What the template calls."""


def tables(kept: Kept, names: Sequence[str]) -> dict[str, str]:
    """Return the tables of these names, in Markdown."""
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string(TEMPLATE.read_text(), {**NAMES, "kept": kept})
    context = template.new_context()
    return {
        name: "".join(template.blocks[name.replace(" ", "_")](context)).rstrip() for name in names
    }


def names_of(document: Path) -> list[str]:
    """Return the names of a document's tables."""
    return [name for name, _ in TABLE.findall(document.read_text())]


def documents(kept: Kept) -> dict[Path, dict[str, str]]:
    """Return the tables of each document by name."""
    each = (README, PERFORMANCE, COMPARISON, DECISIONS, DEVICES)
    return {document: tables(kept, names_of(document)) for document in each}


def main() -> None:
    for document, made in documents(Kept()).items():
        document.write_text(filled(document.read_text(), made))


if __name__ == "__main__":
    main()
