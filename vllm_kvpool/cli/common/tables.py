"""Tables for people: aligned text, or rich's on a terminal."""

import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

PROSE_CHARS = 24  # that a column of prose is narrowed to before others are left out


def is_on_terminal() -> bool:
    """Return True if stdout is a terminal; it is None where the caller has closed it (`>&-`)."""
    return sys.stdout is not None and sys.stdout.isatty()


@dataclass(frozen=True, slots=True)
class TextTable:
    """A title ("" for none), the names of the columns, and rows of as many values.

    Values are never cut or wrapped: where lines are too long, `optional` columns are left out, the
    first of them first.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    optional: tuple[str, ...] = ()
    prose: str = ""
    """The name of a column whose words may wrap."""

    def as_text(self) -> str:
        """Return lines of aligned columns, indented below the title.

        On a terminal the lines are as wide as the terminal.
        """
        table = self.fitted(shutil.get_terminal_size().columns) if is_on_terminal() else self
        lines = [table.title] if table.title else []
        widths = table._widths()
        every = (table.columns, *table.rows)
        lines += ("  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in every)
        return "\n".join(lines)

    def fitted(self, width: int) -> "TextTable":
        """Return the table without the optional columns that do not fit into `width`.

        The new table's title names the columns that were left out.
        """
        table, left_out = self, []
        for name in self.optional:
            if sum(table._widths(PROSE_CHARS)) + 2 * len(table.columns) <= width:
                break
            table = table._without(name)
            left_out.append(name)
        if not left_out:
            return self
        note = f"(too narrow for {', '.join(left_out)})"
        return replace(table, title=f"{self.title} {note}" if self.title else f"  {note}")

    def _widths(self, prose_chars: int | None = None) -> list[int]:
        widths = [max(map(len, each)) for each in zip(self.columns, *self.rows, strict=True)]
        if prose_chars is None or self.prose not in self.columns:
            return widths
        i = self.columns.index(self.prose)
        return [*widths[:i], min(widths[i], prose_chars), *widths[i + 1 :]]

    def _without(self, column: str) -> "TextTable":
        i = self.columns.index(column)
        columns, *rows = ((*row[:i], *row[i + 1 :]) for row in (self.columns, *self.rows))
        return replace(self, columns=columns, rows=tuple(rows))

    def as_rich(self) -> "Table":
        """Return the table for rich, which must be installed."""
        from rich.table import Table

        table = Table(title=self.title or None, title_justify="left", box=None, pad_edge=False)
        for column in self.columns:
            table.add_column(column, header_style="bold", no_wrap=column != self.prose)
        for row in self.rows:
            table.add_row(*row)
        return table


def show_live(frames: Iterable[Sequence[TextTable]]) -> None:
    """Show tables in place of those before them until there are no more; needs rich."""
    from rich.console import Group
    from rich.live import Live

    with Live(auto_refresh=False, vertical_overflow="visible") as live:
        for tables in frames:
            fitted = (table.fitted(live.console.width) for table in tables)
            live.update(Group(*(table.as_rich() for table in fitted)), refresh=True)


def size_text(nbytes: float) -> str:
    """Return a size with a unit: 1536 is 1.5 KiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.4g} TiB"


def time_text(seconds: float | None) -> str:
    """Return a duration with a unit, - for none: 0.0015 is 1.5 ms."""
    if seconds is None:
        return "-"
    for factor, unit in ((1e6, "µs"), (1e3, "ms")):
        if seconds * factor < 1000:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s"


def age_text(seconds: float) -> str:
    """Return an age in its largest whole unit: 7200 is 2 h."""
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0, seconds):.0f} s"


def texts(rows: Sequence[Sequence[object]]) -> tuple[tuple[str, ...], ...]:
    """Return rows of any values as rows of text."""
    return tuple(tuple(map(str, row)) for row in rows)
