"""Everything that is drawn: tables, heat maps, progress bars, notices. The only file that imports rich."""

from __future__ import annotations

import json
import os
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from selfspec_tune.progress import Progress

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

PIPED_WIDTH = 120
"""Columns of tables where stdout is no terminal and COLUMNS is not set."""
NARROW_NAMES = 24
"""Columns that names of rows keep where a table is too wide."""
HEAT_RANGE = 0.5
"""Distance from neutral at which a heat map's colour is at its strongest."""
BLUES = ("#000000 on #c6dbef", "#000000 on #9ecae1", "#000000 on #6baed6", "#ffffff on #2171b5", "#ffffff on #08519c")
ORANGES = ("#000000 on #fee6ce", "#000000 on #fdd0a2", "#000000 on #fdae6b", "#ffffff on #b34a03", "#ffffff on #7f2704")
"""Ink on ground from neutral outwards. Both are named, so neither is left to the terminal."""


def print_json(value: Any) -> None:
    """Print one JSON object on stdout."""
    print(json.dumps(value, ensure_ascii=False))


def notice(text: str) -> None:
    """Print a line for the user on stderr."""
    print(text, file=sys.stderr)


@contextmanager
def progress_bar(*, shown: bool = True) -> Iterator[Progress]:
    """Yield a progress function drawn as bars on stderr: one bar per stage; none where stderr is no terminal."""
    with live_view(shown=shown) as view:
        yield view.progress


@dataclass
class LiveView:
    """Lines of names and values above progress bars, drawn anew in place.

    Attributes:
        is_live: False where stderr is no terminal: nothing is drawn then, and `say` prints lines.
        bars, live: what draws.
    """

    is_live: bool
    bars: Any
    live: Any
    lines: Sequence[tuple[str, str]] = ()

    def __post_init__(self) -> None:
        self._tasks: dict[str, Any] = {}

    def progress(self, stage: str, done: int, total: int) -> None:
        """Draw a stage's bar."""
        if stage not in self._tasks:
            self._tasks[stage] = self.bars.add_task(stage, total=total)
        self.bars.update(self._tasks[stage], completed=done, total=total)

    def show(self, lines: Sequence[tuple[str, str]]) -> None:
        """Draw names and values instead of those before."""
        self.lines = lines
        self.live.update(self.drawn())

    def say(self, text: str) -> None:
        """Print a line that stays, above what is live."""
        if self.is_live:
            _line(self.live.console, text, "default")
        else:
            notice(text)

    def drawn(self) -> Any:
        """Return what is live at the moment."""
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        grid = Table.grid(padding=(0, 2))
        for name, value in self.lines:
            grid.add_row(Text(name, style="bold"), Text(value))
        return Group(grid, self.bars) if self.lines else self.bars


@contextmanager
def live_view(*, shown: bool = True) -> Iterator[LiveView]:
    """Yield a view drawn on stderr while the block runs; silent unless `shown`."""
    from rich.console import Console
    from rich.live import Live
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    is_live = shown and console.is_terminal
    bars = Bars(*columns, console=console)
    view = LiveView(is_live, bars, Live(bars, console=console, refresh_per_second=4))
    if not is_live:
        yield view
        return
    with view.live:
        yield view


def table(
    title: str,
    header: Sequence[str],
    rows: Sequence[Sequence[Any]],
    *,
    caption: str | None = None,
    keys: int | None = None,
    marked: int | None = None,
) -> None:
    """Print a table on stdout; the first column is left-aligned, the others right-aligned.

    Args:
        keys: leading columns that name a row. With it a table too wide is split by columns into several, each with
            these; only the first column may wrap. Without, all columns wrap.
        marked: the row that is bold and starred.
    """
    console = _console()
    lines = [[("* " if number == marked else "") + str(row[0]), *map(str, row[1:])] for number, row in enumerate(rows)]
    widths: Sequence[int | None] = [None] * len(header)
    parts = [list(range(len(header)))]
    if keys is not None:
        widths, parts = _parts(header, lines, keys, console.width)
    for number, columns in enumerate(parts):
        _line(console, title if number == 0 else f"{title}, continued", "bold")
        shown = [[row[column] for column in columns] for row in lines]
        console.print(_grid([header[c] for c in columns], shown, [widths[c] for c in columns], marked))
    if caption:
        _line(console, caption, "italic")


def _line(console: Console, text: str, style: str) -> None:
    """Print text as it is: what stands in square brackets is no markup."""
    from rich.text import Text

    console.print(Text(text, style=style))


def _console() -> Console:
    """Return stdout's console; a pipe, which has no width of its own, is wider than rich would have it."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal and _columns() is None:
        console.width = PIPED_WIDTH
    return console


def _columns() -> int | None:
    given = os.environ.get("COLUMNS", "")
    return int(given) if given.isdecimal() else None


def _grid(
    header: Sequence[str], rows: Sequence[Sequence[str]], widths: Sequence[int | None], marked: int | None
) -> Table:
    from rich.table import Table
    from rich.text import Text

    drawn = Table()
    for index, (name, width) in enumerate(zip(header, widths, strict=True)):
        drawn.add_column(Text(name), justify="left" if index == 0 else "right", width=width)
    for number, row in enumerate(rows):
        drawn.add_row(*map(Text, row), style="bold" if number == marked else None)
    return drawn


def _parts(
    header: Sequence[str], rows: Sequence[Sequence[str]], keys: int, room: int
) -> tuple[list[int], list[list[int]]]:
    """Return widths of columns, and which columns each of as few tables as need be takes, `keys` in all of them."""
    from rich.cells import cell_len

    columns = [[name, *(row[index] for row in rows)] for index, name in enumerate(header)]
    widths = [max(map(cell_len, column)) for column in columns]
    if _total(widths) > room:
        words = max(cell_len(word) for text in columns[0] for word in [*text.split(), ""])
        widths[0] = min(widths[0], max(words, NARROW_NAMES))
    parts: list[list[int]] = [list(range(keys))]
    for column in range(keys, len(header)):
        if len(parts[-1]) > keys and _total([widths[c] for c in [*parts[-1], column]]) > room:
            parts.append(list(range(keys)))
        parts[-1].append(column)
    return widths, parts


def _total(widths: Sequence[int]) -> int:
    """Return the width of a table with such columns, its padding and lines."""
    return sum(widths) + 3 * len(widths) + 1


def sections(title: str, header: Sequence[str], parts: Mapping[str, Sequence[Sequence[str]]]) -> None:
    """Print one table per part on stdout, its name above it, with columns of equal width where the screen has room."""
    from rich.table import Table
    from rich.text import Text

    console = _console()
    widths = [
        max(map(len, column)) for column in zip(header, *(row for rows in parts.values() for row in rows), strict=True)
    ]
    fits = sum(widths) + 3 * len(widths) + 1 <= console.width
    console.print(Text(title, style="bold"))
    for name, rows in parts.items():
        drawn = Table(title=Text(name), title_justify="left")
        for index, (heading, width) in enumerate(zip(header, widths, strict=True)):
            justify: Literal["left", "right"] = "left" if index == 0 else "right"
            drawn.add_column(heading, justify=justify, min_width=width if fits else None)
        for row in rows:
            drawn.add_row(*map(Text, row))
        console.print(drawn)


def paragraph(text: str) -> None:
    """Print a sentence on stdout, wrapped between words where stdout has a width; a pipe gets it as one line."""
    console = _console()
    if console.is_terminal or _columns() is not None:
        text = textwrap.fill(text, console.width, break_long_words=False, break_on_hyphens=False)
    print(text)


@dataclass(frozen=True)
class HeatMap:
    """A grid of numbers to be coloured; rows outside `inside` (first, last) are left plain, which None allows for all.

    The largest number inside is starred, the others above `neutral` get a plus.
    """

    title: str
    row_names: Sequence[str]
    column_names: Sequence[str]
    values: Sequence[Sequence[float]]
    inside: tuple[int, int] | None
    neutral: float = 1.0


def heat_maps(maps: Sequence[HeatMap], *, caption: str) -> None:
    """Print coloured grids on stdout, side by side where they fit: blue above neutral, orange below."""
    from rich.table import Table

    console = _console()
    drawn = [part for one in maps for part in _heat_map(one, console.width)]
    if sum(console.measure(each).maximum for each in drawn) + 2 * len(drawn) <= console.width:
        beside = Table.grid(padding=(0, 2))
        beside.add_row(*drawn)
        console.print(beside)
    else:
        console.print(*drawn, sep="\n")
    _line(console, caption, "italic")


def _heat_map(one: HeatMap, room: int) -> list[Table]:
    """Return a grid as one table, or as several with some of the columns each where it is wider than `room`."""
    from rich.table import Table
    from rich.text import Text

    first, last = one.inside or (0, -1)
    best = max((value for row in one.values[first : last + 1] for value in row), default=None)
    cells: list[list[Text]] = []
    for number, row in enumerate(one.values):
        inside = first <= number <= last
        marks = ["*" if inside and v == best else "+" if round(v, 2) > one.neutral else " " for v in row]
        styles = [_heat(v, one.neutral, bold=mark == "*") if inside else "" for v, mark in zip(row, marks, strict=True)]
        cells.append([Text(f"{v:.2f}{m}", style=s) for v, m, s in zip(row, marks, styles, strict=True)])
    texts = [[name, *map(str, row)] for name, row in zip(one.row_names, cells, strict=True)]
    _, parts = _parts(["", *one.column_names], texts, 1, room)
    tables = []
    for columns in parts:
        title = one.title if columns is parts[0] else f"{one.title}, continued"
        drawn = Table(title=Text(title, style="bold"), title_justify="left")
        for column in columns:
            drawn.add_column(["", *one.column_names][column], justify="right" if column else "left", no_wrap=True)
        for number, name in enumerate(one.row_names):
            row_cells = [cells[number][column - 1] for column in columns[1:]]
            drawn.add_row(name, *row_cells, end_section=number in (first - 1, last))
        tables.append(drawn)
    return tables


def _heat(value: float, neutral: float, *, bold: bool) -> str:
    """Return ink and ground of a number, both given, so that neither depends on the terminal's own colours."""
    steps = BLUES if value >= neutral else ORANGES
    step = steps[min(len(steps) - 1, int(abs(value - neutral) / HEAT_RANGE * len(steps)))]
    return f"{'bold underline ' if bold else ''}{step}"
