"""Tables for people: aligned text, or rich's on a terminal."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, slots=True)
class TextTable:
    """A title ("" for none), the names of the columns, and rows of as many values."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def as_text(self) -> str:
        """Lines of aligned columns, indented below the title."""
        lines = [self.title] if self.title else []
        every = (self.columns, *self.rows)
        widths = [max(map(len, column)) for column in zip(*every, strict=True)]
        lines += ("  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in every)
        return "\n".join(lines)

    def as_rich(self) -> "Table":
        """The same for rich, which must be installed."""
        from rich.table import Table

        table = Table(title=self.title or None, title_justify="left", box=None, pad_edge=False)
        for column in self.columns:
            table.add_column(column, header_style="bold")
        for row in self.rows:
            table.add_row(*row)
        return table


def show_live(frames: Iterable[Sequence[TextTable]]) -> None:
    """Show tables in place of those before them until there are no more; needs rich."""
    from rich.console import Group
    from rich.live import Live

    with Live(auto_refresh=False, vertical_overflow="visible") as live:
        for tables in frames:
            live.update(Group(*(table.as_rich() for table in tables)), refresh=True)


def size_text(nbytes: float) -> str:
    """A size with a unit: 1536 is 1.5 KiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.4g} TiB"


def time_text(seconds: float | None) -> str:
    """A duration with a unit, - for none: 0.0015 is 1.5 ms."""
    if seconds is None:
        return "-"
    for factor, unit in ((1e6, "µs"), (1e3, "ms")):
        if seconds * factor < 1000:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s"


def age_text(seconds: float) -> str:
    """An age in its largest whole unit: 7200 is 2 h."""
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0, seconds):.0f} s"


def texts(rows: Sequence[Sequence[object]]) -> tuple[tuple[str, ...], ...]:
    """Rows of any values as rows of text."""
    return tuple(tuple(map(str, row)) for row in rows)
