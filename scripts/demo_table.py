"""The closing table of the demo: what training and speculation bought, and honest words where they bought nothing.

Knows only the JSON results of the commands; a field that is missing is shown as a dash.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

DASH = "–"
BEST_CELLS = 3
NARROWEST = 110

Json = Mapping[str, Any]


def number(value: Any, digits: int = 2) -> str:
    """Format a number, or a dash for anything that is none."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return f"{value:.{digits}f}" if is_number else DASH


def _ratio(above: Any, below: Any) -> float | None:
    return above / below if isinstance(above, int | float) and isinstance(below, int | float) and below else None


def _get(results: Json, *path: str) -> Any:
    """Return a nested field, None where any step of the path is missing."""
    value: Any = results
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _alpha_rows(train: Json) -> list[list[str]]:
    before, after = _get(train, "alpha_before") or {}, _get(train, "alpha_after") or {}
    exits = sorted(
        {*before, *after}, key=lambda name: (not str(name).isdigit(), int(name) if str(name).isdigit() else 0)
    )
    return [[f"α, exit {e}", number(before.get(e), 3), number(after.get(e), 3), ""] for e in exits]


def _perplexity_row(results: Json) -> list[str]:
    base, trained = _get(results, "regress", "perplexity", "base"), _get(results, "regress", "perplexity", "trained")
    if base is None and trained is None:
        base, trained = _get(results, "train", "perplexity_before"), _get(results, "train", "perplexity_after")
    ratio = _ratio(trained, base)
    passed = _get(results, "regress", "passed")
    verdict = {True: "regress passed", False: "regress FAILED"}.get(passed, "regress: no verdict")
    change = f"{100 * (ratio - 1):+.1f} %, " if ratio is not None else ""
    return ["perplexity, held-out text", number(base), number(trained), change + verdict]


def _choice_row(sweep: Json) -> list[str]:
    artifact = _get(sweep, "artifact") or {}
    if artifact.get("enabled"):
        choice = f"E={artifact.get('exit_layer')}, k={artifact.get('num_draft_tokens')}"
    else:
        choice = "off"
    return ["chosen exit and k", "", choice, str(artifact.get("reason") or "")]


def _cell_rows(sweep: Json) -> list[list[str]]:
    cells = [c for c in _get(sweep, "cells") or [] if isinstance(c.get("speedup_predicted"), int | float)]
    cells.sort(key=lambda cell: cell["speedup_predicted"], reverse=True)
    rows = []
    for cell in cells[:BEST_CELLS]:
        details = (
            f"α {number(cell.get('alpha'))}, c {number(cell.get('cost_ratio'))}, v {number(cell.get('verify_ratio'))}, "
            f"τ {number(cell.get('tokens_per_round'))}, textbook score {number(cell.get('speedup_model'))}"
        )
        name = f"best cells: E={cell.get('exit_layer')}, k={cell.get('num_draft_tokens')}"
        rows.append([name, "×1.00", f"×{number(cell['speedup_predicted'])} predicted", details])
    return rows


def _decode_rows(results: Json) -> list[list[str]]:
    decode = _get(results, "decode") or {}
    plain, fast = decode.get("plain"), decode.get("speculative")
    setting = f"E={decode.get('exit_layer', DASH)}, k={decode.get('num_draft_tokens', DASH)}"
    speed = f"×{number(_ratio(fast, plain))} measured at {setting}, {decode.get('prompts', DASH)} prompts"
    differing = _get(results, "regress", "lossless", "differing_tokens")
    tokens = _get(results, "regress", "lossless", "tokens")
    claim = f"regress: {differing} of {tokens} tokens differ" if differing is not None else "regress: not tested"
    equal, prompts = decode.get("equal"), decode.get("prompts")
    identical = DASH if equal is None else ("yes" if equal == prompts else "NO") + f" ({equal} of {prompts})"
    return [["tokens/s", number(plain, 1), number(fast, 1), speed], ["outputs identical", "", identical, claim]]


def _drafter_rows(results: Json) -> list[list[str]]:
    rows = []
    for name, domains in (_get(results, "drafters", "drafters") or {}).items():
        row = domains.get("all") or {}
        low, high = row.get("quartiles") or (None, None)
        details = (
            f"α {number(row.get('alpha'))}, c {number(row.get('cost_ratio'))}, v {number(row.get('verify_ratio'))}, "
            f"τ {number(row.get('tokens_per_round'))}; quartiles ×{number(low)} to ×{number(high)}"
        )
        rows.append([f"other drafts: {name}", "×1.00", f"×{number(row.get('speedup'))} measured", details])
    return rows


def best_drafter(results: Json) -> str:
    """Return a sentence on the fastest of the other drafts; "" where none was measured."""
    drafters = _get(results, "drafters", "drafters") or {}
    speeds = {name: _get(domains, "all", "speedup") for name, domains in drafters.items()}
    speeds = {name: speed for name, speed in speeds.items() if isinstance(speed, int | float)}
    if not speeds:
        return ""
    name = max(speeds, key=lambda name: speeds[name])
    if speeds[name] <= 1:
        return f"Of the drafts that need no training none pays here; the best, {name}, measured ×{speeds[name]:.2f}."
    kind, _, bits = name.partition("-precision-")
    flag = f"low-precision --draft-bits {bits}" if bits else kind
    command = f"selfspec decode MODEL --drafter {flag} --k-policy cost"
    return f"Of the drafts that need no training {name} is the fastest here: {command}"


def honest_words(results: Json) -> list[str]:
    """Return the sentences under the table: whether it pays, what is missing where it does not, and any failure."""
    decode, artifact = _get(results, "decode") or {}, _get(results, "sweep", "artifact") or {}
    words = []
    measured = _ratio(decode.get("speculative"), decode.get("plain"))
    if artifact.get("enabled"):
        words.append("Speculation is on: selfspec decode uses the chosen exit and k by itself.")
        if measured is not None and measured < 1:
            words.append(f"Yet this run measured ×{measured:.2f}: on this machine, now, it did not pay.")
    elif artifact:
        words.append(f"Speculation is off, so selfspec decode decodes plainly.{_missing(results)}")
        steps, tokens = _get(results, "train", "steps"), _get(results, "train", "tokens")
        if steps is not None:
            words.append(
                f"Training was {steps} steps on {DASH if tokens is None else tokens} tokens, which is a demonstration. "
                "What would help: longer training on your own text (α), and a larger model, whose head is a smaller "
                "part of a draft step (c)."
            )
    else:
        words.append("The sweep gave no result.")
    if best_drafter(results):
        words.append(best_drafter(results))
    if _get(results, "drafters", "prompts_that_differ"):
        words.append("OUTPUTS DIFFER with another draft: see what `selfspec check` says.")
    if decode.get("equal") is not None and decode["equal"] != decode.get("prompts"):
        words.append("OUTPUTS DIFFER between plain and speculative decoding: see what `selfspec check` says.")
    if _get(results, "regress", "passed") is False:
        words.append("regress FAILED: its report is kept in results/regress.json.")
    return words


def _missing(results: Json) -> str:
    """Say what the best cell lacks: a round costs tokens_per_round / speedup plain steps and must emit as many."""
    cells = [c for c in _get(results, "sweep", "cells") or [] if isinstance(c.get("speedup_predicted"), int | float)]
    best = max(cells, key=lambda cell: cell["speedup_predicted"], default=None)
    if best is None:
        return ""
    name = f"E={best.get('exit_layer')}, k={best.get('num_draft_tokens')}"
    cost = _ratio(best.get("tokens_per_round"), best["speedup_predicted"])
    if best["speedup_predicted"] >= 1 or cost is None:
        best_score = number(best["speedup_predicted"])
        return f" The best prediction is ×{best_score} at {name}; the table says why it is not used."
    return (
        f" In the best cell, {name}, a round costs as much as {cost:.2f} plain steps but emits only "
        f"{number(best.get('tokens_per_round'))} tokens."
    )


def print_table(results: Json) -> None:
    """Print the results of `train`, `sweep`, `regress` and `decode` as one table on stdout, with a few sentences."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=NARROWEST)
    table = Table(title="selfspec demo", title_justify="left")
    table.add_column("")
    table.add_column("base / plain", justify="right")
    table.add_column("trained / speculative", justify="right")
    table.add_column("")
    sweep = _get(results, "sweep") or {}
    sections = [
        [*_alpha_rows(_get(results, "train") or {}), _perplexity_row(results)],
        [_choice_row(sweep), *_cell_rows(sweep)],
        _decode_rows(results),
        _drafter_rows(results),
    ]
    for rows in sections:
        for row in rows:
            table.add_row(*row)
        table.add_section()
    console.print(table)
    for sentence in honest_words(results):
        console.print(sentence)
