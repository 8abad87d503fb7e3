"""Everything that is drawn: tables, heat maps, progress bars, notices. The only file that imports rich."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from selfspec_tune.progress import Progress


def print_json(value: Any) -> None:
    """Print one JSON object on stdout."""
    print(json.dumps(value, ensure_ascii=False))


def notice(text: str) -> None:
    """Print a line for the user on stderr."""
    print(text, file=sys.stderr)


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """Yield a progress function drawn as bars on stderr: one bar per stage, none where stderr is no terminal."""
    from rich.console import Console
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
    with Bars(*columns, console=console, disable=not console.is_terminal) as bars:
        tasks: dict[str, Any] = {}

        def progress(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total)
            bars.update(tasks[stage], completed=done, total=total)

        yield progress


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[Any]], *, caption: str | None = None) -> None:
    """Print a table on stdout; the first column is left-aligned, the others right-aligned."""
    from rich.console import Console
    from rich.table import Table

    drawn = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
    for index, name in enumerate(header):
        drawn.add_column(name, justify="left" if index == 0 else "right")
    for row in rows:
        drawn.add_row(*map(str, row))
    Console().print(drawn)


def sections(title: str, header: Sequence[str], parts: Mapping[str, Sequence[Sequence[str]]]) -> None:
    """Print one table per part on stdout, its name above it, with columns of equal width where the screen has room."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    widths = [
        max(map(len, column)) for column in zip(header, *(row for rows in parts.values() for row in rows), strict=True)
    ]
    fits = sum(widths) + 3 * len(widths) + 1 <= console.width
    console.print(title, highlight=False, style="bold")
    for name, rows in parts.items():
        drawn = Table(title=name, title_justify="left")
        for index, (heading, width) in enumerate(zip(header, widths, strict=True)):
            justify: Literal["left", "right"] = "left" if index == 0 else "right"
            drawn.add_column(heading, justify=justify, min_width=width if fits else None)
        for row in rows:
            drawn.add_row(*row)
        console.print(drawn)


def heat_map(
    title: str,
    row_names: Sequence[str],
    column_names: Sequence[str],
    values: Sequence[Sequence[float]],
    *,
    neutral: float,
) -> None:
    """Print a coloured grid on stdout: green above `neutral`, red below, the largest cell in bold."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    best = max((value for row in values for value in row), default=neutral)
    drawn = Table(title=title, title_justify="left")
    drawn.add_column("")
    for name in column_names:
        drawn.add_column(name, justify="right")
    for name, row in zip(row_names, values, strict=True):
        cells = [Text(f"{value:.2f}", style=_heat(value, neutral, bold=value == best)) for value in row]
        drawn.add_row(name, *cells)
    Console().print(drawn)


def _heat(value: float, neutral: float, *, bold: bool) -> str:
    distance = max(-1.0, min(1.0, (value - neutral) / 0.5))
    strength = 110 + int(145 * abs(distance))
    colour = f"rgb(60,{strength},60)" if distance >= 0 else f"rgb({strength},60,60)"
    return f"bold white on {colour}" if bold else f"white on {colour}"
