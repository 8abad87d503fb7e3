"""What `sweep-exit` found, as PNG images, each for light and for dark pages. Needs matplotlib (extra `report`).

Names from prompt files are drawn as they are: no mathematics is read into them.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from selfspec_tune.sweep.objective import WISH
from selfspec_tune.sweep.tables import (
    Json,
    best_in_window,
    cells_by_exit,
    depth,
    notable_exits,
    printable,
    shown_exits,
    window_exits,
)
from selfspec_tune.sweep.theme import THEMES, Theme, ink_on, new_figure, render

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAP_ROWS = 48
"""Exits in a heat map at about most."""
NAME_WIDTH = 28
"""Letters of a name on an axis, in each of three lines at most; the page's tables have all."""
MARKS = ("o", "s", "^", "D", "v", "P")
SCORES = {
    "speedup_model": ("textbook", "Textbook score"),
    "speedup_predicted": ("predicted", "Predicted speed-up"),
}


@dataclass(frozen=True)
class Plot:
    """One image: its file's name without the ending, what it shows in words, and the PNG by name of theme."""

    name: str
    alt: str
    png: dict[str, bytes]


def draw_plots(result: Json) -> list[Plot]:
    """Return all plots of the dict of `Sweep.to_dict()`; those without data are left out."""
    scale = max(0.1, min(1.0, max(abs(c[s] - 1) for c in result["cells"] for s in SCORES)))
    drawings: list[tuple[str, str, Callable[[Theme], Figure]]] = [
        ("alpha", "acceptance by exit layer, with its interval", lambda t: alpha_by_depth(result, t)),
        *(
            (f"heat-{name}", f"{title} by exit layer and k", lambda t, s=score: heat_map(result, t, s, scale))
            for score, (name, title) in SCORES.items()
        ),
        ("costs", "costs of drafting and checking by exit layer", lambda t: cost_curves(result, t)),
    ]
    if result["by_context"]:
        drawings.append(("context", "predicted speed-up by context length", lambda t: by_context(result, t)))
    if result["by_domain"]:
        drawings.append(("domains", "predicted speed-up by domain", lambda t: by_domain(result, t)))
    drawings.append(("drafters", "predicted and measured speed-up of drafters", lambda t: drafters(result, t)))
    return [
        Plot(name, alt, {theme: render(draw, colours) for theme, colours in THEMES.items()})
        for name, alt, draw in drawings
    ]


def _title(text: str, result: Json) -> str:
    return f"{text} (approximate)" if result["approximate"] else text


def _short(name: str) -> str:
    return "\n".join(textwrap.wrap(printable(name), NAME_WIDTH, max_lines=3, placeholder="…", break_on_hyphens=False))


def alpha_by_depth(result: Json, theme: Theme) -> Figure:
    """Draw α over the exit layer with its interval, the window, and the α that the wish would take."""
    figure = new_figure(7, 4.2)
    axes = figure.subplots()
    exits = [int(exit_layer) for exit_layer in result["alpha_by_exit"]]
    lows, highs = zip(*result["alpha_intervals"].values(), strict=True)
    colour = theme.lines[0]
    window = window_exits(result)
    if window:
        axes.axvspan(window[0] - 0.5, window[-1] + 0.5, color=theme.faint, alpha=0.45, lw=0, label="window")
    axes.fill_between(exits, lows, highs, color=colour, alpha=0.3, lw=0, label="95 % interval")
    axes.plot(exits, list(result["alpha_by_exit"].values()), color=colour, marker="o", label="α there is")
    asked = [(row["exit_layer"], row["needed"]) for row in result["alpha_needed"] if row["needed"] is not None]
    if asked:
        label = f"α needed for ×{WISH:g}"
        axes.plot(*zip(*asked, strict=True), color=theme.lines[1], ls="--", marker="s", ms=3.5, label=label)
    axes.set(xlim=(0.5, result["num_layers"] - 0.5), ylim=(0, 1.02), ylabel="α, share of drafts that stand")
    axes.set_xlabel(f"exit layer E of {result['num_layers']}")
    axes.set_title(_title("How often a draft is right", result))
    figure.legend(loc="outside lower center", ncols=4)
    return figure


def heat_map(result: Json, theme: Theme, score: str, scale: float) -> Figure:
    """Draw a score of every exit and k, colours from 1 − `scale` to 1 + `scale`, with the best of the window framed."""
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.patches import Rectangle

    grid, num_layers = cells_by_exit(result), result["num_layers"]
    exits = shown_exits(num_layers, MAP_ROWS, notable_exits(result))
    values = [[cell[score] for cell in grid[exit_layer]] for exit_layer in exits]
    columns = len(values[0])
    figure = new_figure(max(3.6, 1.6 + 0.56 * columns), 1.5 + 0.235 * len(exits))
    axes = figure.subplots()
    colours = LinearSegmentedColormap.from_list("around plain", [theme.slower, theme.even, theme.faster])
    image = axes.imshow(values, cmap=colours, vmin=1 - scale, vmax=1 + scale, aspect="auto")
    for row, line in enumerate(values):
        for column, value in enumerate(line):
            ink = ink_on(colours((value - 1 + scale) / (2 * scale)))
            figures = axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=8, color=ink)
            figures.set_in_layout(False)  # it is inside the axes, and measuring hundreds takes seconds
    inside = [number for number, exit_layer in enumerate(exits) if exit_layer in set(window_exits(result))]
    for edge in (inside[0] - 0.5, inside[-1] + 0.5) if inside else ():
        axes.axhline(edge, color=theme.ink, lw=1.2, ls="--")
    best = best_in_window(result, score)
    if best:
        corner = (best["num_draft_tokens"] - 1.5, exits.index(best["exit_layer"]) - 0.5)
        axes.add_patch(Rectangle(corner, 1, 1, fill=False, ec=theme.ink, lw=2.4, zorder=3))
    axes.grid(visible=False)
    axes.set_xticks(range(columns), [str(k + 1) for k in range(columns)])
    axes.set_yticks(range(len(exits)), [depth(exit_layer, num_layers) for exit_layer in exits], fontsize=8)
    axes.set(xlabel="k, tokens drafted per round", ylabel=f"exit layer E of {num_layers}")
    axes.set_title(_title(SCORES[score][1], result))
    bar = figure.colorbar(image, ax=axes, location="bottom", shrink=0.9, aspect=32, pad=0.02)
    bar.set_label("slower   ←   1 is plain decoding   →   faster", fontsize=9)
    return figure


def cost_curves(result: Json, theme: Theme) -> Figure:
    """Draw c(E), and v(E, k) for a few k, one line per context length and batch size."""
    most = len(next(iter(result["costs"][0]["verify_ratio"].values())))
    best = best_in_window(result, "speedup_predicted")
    chosen = best["num_draft_tokens"] if best else most // 2
    shown = sorted({1, chosen, (most + 1) // 2, most}, key=lambda k: (k not in (1, most, chosen), k))[:3]
    figure = new_figure(7, 6.4)
    panels: list[Axes] = list(figure.subplots(2, 2, sharex=True).flat)
    contexts = list(dict.fromkeys(row["context_length"] for row in result["costs"]))
    batches = list(dict.fromkeys(row["batch_size"] for row in result["costs"]))
    for row in result["costs"]:
        number = contexts.index(row["context_length"]) % len(theme.lines)
        style = {
            "color": theme.lines[number],
            "marker": MARKS[number],
            "markevery": max(1, result["num_layers"] // 6),
            "ls": ("-", "--", ":", "-.")[batches.index(row["batch_size"]) % 4],
        }
        exits = [int(exit_layer) for exit_layer in row["cost_ratio"]]
        label = f"{row['context_length']} tokens, batch {row['batch_size']}"
        panels[0].plot(exits, list(row["cost_ratio"].values()), label=label, **style)
        for axes, k in zip(panels[1:], sorted(shown), strict=False):
            axes.plot(exits, [values[k - 1] for values in row["verify_ratio"].values()], **style)
    num_layers = result["num_layers"]
    panels[0].plot([0, num_layers], [0, 1], color=theme.ink, lw=1, ls=(0, (1, 3)), label="layers alone, E/L")
    panels[0].set(ylim=(0, None), title="c, to draft a token", ylabel="plain steps")
    highest = max(v for row in result["costs"] for values in row["verify_ratio"].values() for v in values)
    for axes, k in zip(panels[1:], sorted(shown), strict=False):
        axes.axhline(1, color=theme.ink, lw=1)
        axes.set(ylim=(0, highest * 1.08), title=f"v, to check k = {k}")
    for axes in panels[len(shown) + 1 :]:
        axes.set_visible(False)
    panels[2].set(ylabel="plain steps", xlabel=f"exit layer E of {num_layers}")
    panels[3].set(xlabel=f"exit layer E of {num_layers}")
    figure.legend(loc="outside lower center", ncols=3)
    return figure


def by_context(result: Json, theme: Theme) -> Figure:
    """Draw the best of layer skip for each context length, as a bar up or down from plain decoding."""
    figure, rows = new_figure(7, 3.8), result["by_context"]
    axes = figure.subplots()
    gains = [row["speedup_predicted"] - 1 for row in rows]
    colours = [theme.faster if gain > 0 else theme.slower for gain in gains]
    axes.bar(range(len(rows)), gains, bottom=1, width=0.55, color=colours)
    for number, row in enumerate(rows):
        k, value = row["num_draft_tokens"], row["speedup_predicted"]
        text = f"×{value:.2f}\n" + (f"E = {row['exit_layer']}, k = {k}" if k else "off")
        up = value >= 1
        offset = (0, 4 if up else -4)
        axes.annotate(
            text, (number, value), offset, textcoords="offset points", ha="center", va="bottom" if up else "top"
        )
    reach = max(0.05, *map(abs, gains))
    low, high = min(0.0, *gains), max(0.0, *gains)
    axes.set_ylim(1 + low - 0.4 * reach, 1 + high + 0.4 * reach)
    axes.axhline(1, color=theme.ink, lw=1)
    axes.set_xticks(range(len(rows)), [f"up to {row['max_context']}" for row in rows])
    axes.set_xlim(-0.6, len(rows) - 0.4)
    axes.grid(visible=False, axis="x")
    axes.set(xlabel="live tokens: prompt and answer", ylabel="predicted speed-up")
    axes.set_title(_title("Layer skip by context length", result))
    return figure


@dataclass(frozen=True)
class Pair:
    """One line of a plot of pairs: a figure, a second one if there is one, its range, and words at the right."""

    name: str
    first: float
    second: float | None = None
    span: tuple[float, float] | None = None
    words: str = ""


def by_domain(result: Json, theme: Theme) -> Figure:
    """Draw for each domain the shared choice against the domain's own best."""
    rows = [
        Pair(
            row["domain"],
            row["speedup_shared"],
            row["speedup_best"],
            words=f"{row['best']}, k = {row['num_draft_tokens']}",
        )
        for row in result["by_domain"]
    ]
    names = ("shared choice", "best for the domain (named)")
    return _pairs(rows, names, _title("By domain", result), "predicted speed-up", theme)


def drafters(result: Json, theme: Theme) -> Figure:
    """Draw the predicted speed-up of each drafter, and the measured one with its quartiles where it was tried."""
    tried = {one["label"]: one for one in result["confirmed"]}
    rows = []
    for one in result["candidates"]:
        row, got = Pair(one["label"], one["speedup_predicted"]), tried.get(one["label"])
        if got:
            span = (got["low"], got["low"] + got["spread"] * got["speedup"])
            row = replace(row, second=got["speedup"], span=span)
        rows.append(row)
    return _pairs(rows, ("predicted", "measured, with quartiles"), "Drafters", "speed-up", theme)


def _pairs(rows: Sequence[Pair], names: tuple[str, str], title: str, label: str, theme: Theme) -> Figure:
    """Draw pairs of figures line by line: the first a ring, the second a filled square."""
    figure = new_figure(7, 1.7 + 0.46 * len(rows))
    axes = figure.subplots()
    for number, row in enumerate(rows):
        if row.second is not None:
            axes.plot([row.first, row.second], [number, number], color=theme.faint, lw=3, zorder=1)
        if row.span:
            axes.plot(row.span, [number, number], color=theme.lines[1], lw=1.5, marker="|", ms=9, zorder=2)
        if row.words:
            right = max(row.first, row.second or row.first)
            axes.annotate(
                _short(row.words), (right, number), (8, 0), textcoords="offset points", va="center", fontsize=8
            )
    seconds = {number: row.second for number, row in enumerate(rows) if row.second is not None}
    if seconds:
        axes.scatter(
            list(seconds.values()), list(seconds), s=52, marker="s", color=theme.lines[1], zorder=3, label=names[1]
        )
    firsts, ring = [row.first for row in rows], theme.lines[0]
    axes.scatter(
        firsts, range(len(rows)), s=70, facecolors="none", edgecolors=ring, linewidths=2, zorder=4, label=names[0]
    )
    axes.axvline(1, color=theme.ink, lw=1)
    values = [1.0, *(v for row in rows for v in (row.first, row.second, *(row.span or ())) if v is not None)]
    margin = max(0.05, 0.08 * (max(values) - min(values)))
    room = 6 * margin if any(row.words for row in rows) else margin
    axes.set_xlim(min(values) - margin, max(values) + room)
    axes.set_yticks(range(len(rows)), [_short(row.name) for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel(f"{label} (1 is plain decoding)")
    axes.set_title(title)
    figure.legend(loc="outside lower center", ncols=2)
    return figure
