"""How `selfspec sweep-exit` shows its result in a terminal or a pipe: grids, tables, and at the end what to do."""

from __future__ import annotations

from typing import Any

from selfspec_tune.cli import console
from selfspec_tune.cli.console import HeatMap
from selfspec_tune.sweep import tables, words
from selfspec_tune.sweep.tables import Table

MAP_ROWS, TABLE_ROWS = 32, 12
"""Exits shown at about most; the report shows all."""


def show(result: dict[str, Any]) -> None:
    """Print what `Sweep.to_dict()` holds; the answer comes last, where a terminal leaves the eye."""
    show_maps(result)
    notable = tables.notable_exits(result)
    exits = tables.shown_exits(result["num_layers"], TABLE_ROWS - len(notable), notable)
    drawn = [tables.exits_table(result, exits), tables.drafters_table(result)]
    if result["by_context"]:
        drawn.append(tables.contexts_table(result))
    if result["by_domain"]:
        drawn.append(tables.domains_table(result))
    drawn.append(tables.costs_table(result))
    enabled = result["artifact"]["enabled"]
    if not enabled:
        drawn.append(tables.needed_table(result, exits))
    for table in drawn:
        show_table(table)
    for name, meaning in tables.GLOSSARY.items():
        console.paragraph(f"{name}  {meaning}")
    print()
    for label, reason in result["skipped"].items():
        console.paragraph(f"not tried: {label}: {reason}")
    for confirmed in result["confirmed"]:
        if confirmed["identical"] is False:
            console.paragraph(f"OTHER TOKENS than plain decoding with {confirmed['label']}")
    for warning in (words.approximate(result), *result["warnings"]):
        if warning:
            console.paragraph(f"warning: {warning}")
    console.paragraph(f"speculation {'on' if enabled else 'off'}: {result['artifact']['reason']}")
    better = words.better_outside(result)
    if better:
        console.paragraph(better)
    print(f"next: {words.next_command(result)}")
    if result["path"]:
        print(f"written: {result['path']}")
    else:
        console.print_json(result["artifact"])


def show_maps(result: dict[str, Any]) -> None:
    """Print both scores of every exit and k, coloured, with the window between lines."""
    grid, window, num_layers = tables.cells_by_exit(result), tables.window_exits(result), result["num_layers"]
    exits = tables.shown_exits(num_layers, MAP_ROWS, tables.notable_exits(result))
    rows = [number for number, exit_layer in enumerate(exits) if exit_layer in window]
    inside = (rows[0], rows[-1]) if rows else None
    scores = {"Textbook score": "speedup_model", "Predicted speed-up": "speedup_predicted"}
    maps = [
        HeatMap(
            f"{title}{' (approximate)' if result['approximate'] else ''}",
            [f"E={tables.depth(exit_layer, num_layers)}" for exit_layer in exits],
            [f"k={cell['num_draft_tokens']}" for cell in result["cells"] if cell["exit_layer"] == exits[0]],
            [[cell[score] for cell in grid[exit_layer]] for exit_layer in exits],
            inside,
        )
        for title, score in scores.items()
    ]
    low, high = result["window"]
    caption = (
        "Layer skip against plain decoding. E: layers the draft runs. k: tokens it drafts. "
        f"Between the lines, coloured: the window of {low:.0%} to {high:.0%} of depth, from which the exit is chosen. "
        "+ and blue: faster than plain decoding; orange: slower. * the best of the window."
    )
    if len(exits) < num_layers - 1:
        caption += f" {len(exits)} of {num_layers - 1} exits are shown; --json and --report have all."
    console.heat_maps(maps, caption=caption)
    print()


def show_table(table: Table) -> None:
    """Print a table, split by columns where it is too wide."""
    console.table(
        table.title, table.columns, table.rows, caption=table.caption or None, keys=table.keys, marked=table.marked
    )
    print()
