"""What `sweep-exit` found, as tables of text: for the terminal and for the report's page. Draws nothing.

Every function takes the dict of `Sweep.to_dict()`. This module imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from selfspec_tune.sweep.objective import WISH, alpha_needed, exits_in

Json = dict[str, Any]

GLOSSARY = {
    "α": "alpha: how often a drafted token is what the model itself would have written; 1 is always.",
    "c": "cost_ratio: the time to draft one token, as a share of the time of one ordinary step of the model.",
    "v": "verify_ratio: the time to check a round's draft, in ordinary steps; 1 would be a check for the price of one.",
    "τ": "tokens_per_round: tokens gained by one round of drafting and checking; an ordinary step gains 1.",
}
"""One sentence for each figure, for a reader who never heard of it."""


@dataclass(frozen=True)
class Table:
    """A table of text.

    Attributes:
        keys: columns at the left that name a row; those after them hold figures.
        marked: number of the row that matters most, if any.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    keys: int = 1
    marked: int | None = None


def printable(text: str) -> str:
    """Return text from a model or a prompt file on one line, without characters that could steer a terminal."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)


def shown_exits(num_layers: int, limit: int, always: set[int]) -> list[int]:
    """Return all exits 1..L − 1 if they are at most `limit`, else about as many spread ones and those in `always`."""
    exits = range(1, num_layers)
    if len(exits) <= limit:
        return list(exits)
    spread = {exits[round(i * (len(exits) - 1) / (limit - 1))] for i in range(limit)} if limit > 1 else set()
    return sorted(spread | always)


def notable_exits(result: Json) -> set[int]:
    """Return the exits that a thinned table must not lose: the chosen, the best in the window, a better one outside."""
    found = (result["artifact"], best_in_window(result, "speedup_predicted"), result["better_outside_window"])
    return {each["exit_layer"] for each in found if each and each["exit_layer"]}


def cells_by_exit(result: Json) -> dict[int, list[Json]]:
    """Return exit → its cells by k."""
    found: dict[int, list[Json]] = {}
    for cell in result["cells"]:
        found.setdefault(cell["exit_layer"], []).append(cell)
    return found


def window_exits(result: Json) -> list[int]:
    """Return the exits the choice was made from."""
    low, high = result["window"]
    return exits_in((low, high), result["num_layers"])


def best_in_window(result: Json, score: str) -> Json | None:
    """Return the window's cell with the highest `score`; None where no exit lies in it."""
    inside = set(window_exits(result))
    return max((c for c in result["cells"] if c["exit_layer"] in inside), key=lambda cell: cell[score], default=None)


def chosen(result: Json) -> int | None:
    """Return the number of the candidate that `selfspec.json` names."""
    names = ("drafter", "exit_layer", "draft")
    found = (i for i, c in enumerate(result["candidates"]) if all(c[n] == result["artifact"][n] for n in names))
    return next(found, None)


def depth(exit_layer: int, num_layers: int) -> str:
    """Return an exit as a reader meets it, such as "9 (30%)"."""
    return f"{exit_layer} ({exit_layer / num_layers:.0%})"


def _labelled(table: Table, result: Json) -> Table:
    """Say in the title where figures rest on reference texts."""
    return replace(table, title=f"{table.title} (approximate)") if result["approximate"] else table


def _number(value: float | None, digits: int = 2, none: str = "–") -> str:
    return none if value is None else f"{value:.{digits}f}"


def _range(value: float, interval: Sequence[float], digits: int) -> str:
    low, high = interval
    return f"{value:.{digits}f} ({low:.{digits}f}–{high:.{digits}f})"


def exits_table(result: Json, exits: Sequence[int]) -> Table:
    """Return the best k of each exit, with what it would take to break even."""
    grid, evaluated = cells_by_exit(result), result["artifact"]["eval_set"]
    best = best_in_window(result, "speedup_predicted")
    rows: list[list[str]] = []
    marked: int | None = None
    for exit_layer in exits:
        cell = max(grid[exit_layer], key=lambda cell: cell["speedup_predicted"])
        k, c = cell["num_draft_tokens"], cell["cost_ratio"]
        round_cost = cell["tokens_per_round"] / cell["speedup_predicted"]
        needed = alpha_needed(1.0, c, round_cost - c * k, k)
        if best and best["exit_layer"] == exit_layer:
            marked = len(rows)
        rows.append(
            [
                depth(exit_layer, result["num_layers"]),
                str(k),
                _range(cell["alpha"], result["alpha_intervals"][str(exit_layer)], 3),
                _number(needed, 3, "never"),
                *(_number(cell[name]) for name in ("cost_ratio", "verify_ratio", "tokens_per_round", "speedup_model")),
                _range(cell["speedup_predicted"], cell["interval"], 2),
            ]
        )
    of = f"{len(exits)} of {result['num_layers'] - 1} exits" if len(exits) < result["num_layers"] - 1 else "every exit"
    table = Table(
        f"Layer skip, {of}, each at its best k: {evaluated['num_prompts']} prompts, {evaluated['num_tokens']} tokens, "
        f"temperature {evaluated['temperature']:g}",
        ["exit", "k", "α", "α needed", "c", "v", "τ", "textbook", "predicted"],
        rows,
        "k: tokens drafted per round. α needed: to be as fast as plain decoding at these costs. textbook, predicted: "
        "speed-up over plain decoding, by a formula and from this machine's costs. In brackets: 95 % intervals. "
        "Starred: the best of the window.",
        keys=2,
        marked=marked,
    )
    return _labelled(table, result)


def scores_table(result: Json, score: str, title: str) -> Table:
    """Return one score of every exit and k."""
    grid, best = cells_by_exit(result), best_in_window(result, score)
    rows = [
        [depth(exit_layer, result["num_layers"]), *(_number(cell[score], 3) for cell in cells)]
        for exit_layer, cells in grid.items()
    ]
    header = ["exit", *(f"k={cell['num_draft_tokens']}" for cell in next(iter(grid.values())))]
    marked = list(grid).index(best["exit_layer"]) if best else None
    return _labelled(Table(title, header, rows, "Starred: the exit with the window's best.", marked=marked), result)


def needed_table(result: Json, exits: Sequence[int]) -> Table:
    """Return, exit by exit, the α a speed-up of ×1.2 would take, beside the α there is."""
    shown = [row for row in result["alpha_needed"] if row["exit_layer"] in set(exits)]
    rows = []
    for row in shown:
        there, needed = row["alpha"], row["needed"]
        enough = "–" if needed is None else "enough" if there >= needed else f"{needed - there:.3f} short"
        name = depth(row["exit_layer"], result["num_layers"])
        rows.append([name, str(row["num_draft_tokens"] or "–"), _number(there, 3), _number(needed, 3, "never"), enough])
    caption = (
        f"How often a draft would have to be right for ×{WISH:g}, at the k that asks least; "
        "never: it costs too much even if always right."
    )
    title = f"The α you would need at each exit for ×{WISH:g}"
    return _labelled(Table(title, ["exit", "k", "α there is", "α needed", "gap"], rows, caption, keys=2), result)


def measured(confirmed: Json | None) -> str:
    """Return a measured speed-up with half the span of its quartiles; "" where there is none."""
    return f"×{confirmed['speedup']:.2f} ±{confirmed['spread'] / 2:.0%}" if confirmed else ""


def drafters_table(result: Json) -> Table:
    """Return every drafter that was compared, the best first."""
    tried = {confirmed["label"]: confirmed for confirmed in result["confirmed"]}
    rows = [
        [
            one["label"],
            str(one["num_draft_tokens"]),
            _number(one["alpha"], 3),
            *(_number(one[n]) for n in ("cost_ratio", "verify_ratio", "tokens_per_step", "cost_per_step")),
            *(_number(one[n]) for n in ("speedup_model", "speedup_predicted")),
            measured(tried.get(one["label"])),
        ]
        for one in result["candidates"]
    ]
    return Table(
        "Drafters",
        ["drafter", "k", "α", "c", "v", "tokens", "cost", "textbook", "predicted", "measured"],
        rows,
        "k: mean. tokens, cost: of a step, plain ones among them, in tokens and plain steps. measured: against plain "
        "decoding in turn, on other prompts; ± half the quartiles' span. N: tokens that a draft may propose. "
        "Starred: the one in selfspec.json.",
        marked=chosen(result),
    )


def confirmed_table(result: Json) -> Table:
    """Return what really decoding with the best drafters gave."""
    identical = {True: "yes", False: "NO", None: "sampled"}
    rows = [
        [
            one["label"],
            f"×{one['speedup']:.2f}",
            f"×{one['low']:.2f}",
            f"{one['spread']:.1%}",
            _number(one["tokens_per_round"]),
            f"{one['drafted_share']:.1%}",
            identical[one["identical"]],
            str(one["num_prompts"]),
            str(one["num_tokens"]),
        ]
        for one in result["confirmed"]
    ]
    header = ["drafter", "measured", "lower quartile", "spread", "τ", "drafted", "same tokens", "prompts", "tokens"]
    caption = (
        "measured: the median over prompts and turns; a quarter of them lie below the lower quartile. "
        "spread: the quartiles' span. drafted: tokens that came from rounds, the others from plain steps."
    )
    return Table("Really decoded, in turn with plain decoding", header, rows, caption)


def contexts_table(result: Json) -> Table:
    """Return the best of layer skip up to each context length."""
    rows = [
        [
            f"up to {row['max_context']}",
            depth(row["exit_layer"], result["num_layers"]) if row["num_draft_tokens"] else "off",
            str(row["num_draft_tokens"]) if row["num_draft_tokens"] else "–",
            _number(row["speedup_predicted"]),
        ]
        for row in result["by_context"]
    ]
    caption = "live tokens: prompt and answer together. off: plain decoding is faster there."
    table = Table("Layer skip by context length", ["live tokens", "exit", "k", "predicted"], rows, caption)
    return _labelled(table, result)


def domains_table(result: Json) -> Table:
    """Return each domain under the shared choice and under its own best."""
    rows = [
        [
            printable(row["domain"]),
            str(row["num_prompts"]),
            str(row["num_tokens"]),
            _number(row["alpha"], 3),
            _number(row["tokens_per_round"]),
            _number(row["speedup_shared"]),
            _number(row["speedup_best"]),
            f"{row['loss']:.1%}",
            f"{row['best']}, k={row['num_draft_tokens']}",
        ]
        for row in result["by_domain"]
    ]
    caption = (
        "α, τ, shared: with the one choice for all domains. best: with the drafter that suits this domain most. "
        "loss: what the shared choice gives away."
    )
    header = ["domain", "prompts", "tokens", "α", "τ", "shared", "best", "loss", "best drafter"]
    return _labelled(Table("By domain, predicted speed-up", header, rows, caption), result)


def costs_table(result: Json) -> Table:
    """Return the measured costs by context length and batch size; c and v at the window's best cell."""
    best = best_in_window(result, "speedup_predicted")
    exit_layer, k = (best["exit_layer"], best["num_draft_tokens"]) if best else (1, 1)
    rows = [
        [
            str(row["context_length"]),
            str(row["batch_size"]),
            f"{1000 * row['plain_seconds']:.1f} ms",
            f"{row['plain_spread']:.1%}",
            _number(row["cost_ratio"][str(exit_layer)], 3),
            _number(row["verify_ratio"][str(exit_layer)][k - 1], 3),
            _number(row["overhead_ratio"], 3),
            _number(row["composed_over_measured"], 3),
            _number(row["exact_over_fast"], 2),
        ]
        for row in result["costs"]
    ]
    header = ["live tokens", "batch", "plain step", "spread", f"c E={exit_layer}", f"v E={exit_layer} k={k}", "o"]
    caption = (
        f"{result['numerics']} numerics. spread: the quartiles' span of the plain step. o: what a round costs besides. "
        "parts ÷ whole: a plain step composed from its parts over the one measured; far from 1: a noisy machine. "
        "exact ÷ fast: the price of exact numerics, – where they cannot be certified."
    )
    return Table("Costs on this machine", [*header, "parts ÷ whole", "exact ÷ fast"], rows, caption, keys=2)
