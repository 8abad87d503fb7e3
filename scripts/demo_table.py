"""The closing table of the demo: what training and speculation bought, and honest words where they bought nothing.

Knows only the JSON results of the commands; a field that is missing is shown as a dash.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

DASH = "–"
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
    status = _get(results, "regress", "status")
    said = {"passed": "regress passed", "failed": "regress FAILED", "undecided": "regress undecided"}
    verdict = said.get(str(status), "regress: no verdict")
    change = f"{100 * (ratio - 1):+.1f} %, " if ratio is not None else ""
    return ["perplexity, held-out text", number(base), number(trained), change + verdict]


def _choice_row(sweep: Json) -> list[str]:
    artifact = _get(sweep, "artifact") or {}
    if artifact.get("enabled"):
        exit_layer = f", E={artifact['exit_layer']}" if artifact.get("exit_layer") else ""
        choice = f"{artifact.get('drafter')}{exit_layer}, k={artifact.get('num_draft_tokens')}"
    else:
        choice = "off"
    return ["chosen by sweep-exit", "", choice, str(artifact.get("reason") or "")]


def _drafter_rows(sweep: Json) -> list[list[str]]:
    confirmed = {c.get("label"): c for c in _get(sweep, "confirmed") or []}
    rows = []
    for candidate in _get(sweep, "candidates") or []:
        details = (
            f"k {number(candidate.get('num_draft_tokens'), 0)}, α {number(candidate.get('alpha'))}, "
            f"c {number(candidate.get('cost_ratio'))}, v {number(candidate.get('verify_ratio'))}, "
            f"τ {number(candidate.get('tokens_per_round'))}; predicted ×{number(candidate.get('speedup_predicted'))}"
        )
        tried = confirmed.get(candidate.get("label"))
        speed = f"×{number(tried.get('speedup'))} measured" if tried else "not tried"
        if tried and tried.get("identical") is False:
            speed += ", OTHER TOKENS"
        rows.append([str(candidate.get("label")), "×1.00", speed, details])
    return rows


def _decode_rows(results: Json) -> list[list[str]]:
    decode = _get(results, "decode") or {}
    plain, prompts = decode.get("plain"), decode.get("prompts", DASH)
    forced = f"layer skip at E={decode.get('exit_layer', DASH)}, k={decode.get('num_draft_tokens', DASH)}"
    rows = []
    for name, mode in (("as chosen", "chosen"), (forced, "layer-skip")):
        if decode.get(mode) is not None:
            speed = f"×{number(_ratio(decode[mode], plain))} measured, {prompts} prompts"
            rows.append([f"tokens/s, {name}", number(plain, 1), number(decode[mode], 1), speed])
    differing = _get(results, "regress", "lossless", "differing_tokens")
    tokens = _get(results, "regress", "lossless", "tokens")
    claim = f"regress: {differing} of {tokens} tokens differ" if differing is not None else "regress: not tested"
    equal = decode.get("equal")
    identical = DASH if equal is None else ("yes" if equal == prompts else "NO") + f" ({equal} of {prompts})"
    return [*rows, ["outputs identical", "", identical, claim]]


def honest_words(results: Json) -> list[str]:
    """Return the sentences under the table: whether it pays, what is missing where it does not, and any failure."""
    decode, artifact = _get(results, "decode") or {}, _get(results, "sweep", "artifact") or {}
    words = []
    measured = _ratio(decode.get("chosen"), decode.get("plain"))
    if artifact.get("enabled"):
        words.append("Speculation is on: selfspec decode uses what sweep-exit chose by itself.")
        if measured is not None and measured < 1:
            words.append(f"Yet this run measured ×{measured:.2f}: on this machine, now, it did not pay.")
    elif artifact:
        words.append("Speculation is off, so selfspec decode decodes plainly.")
    else:
        words.append("The sweep gave no result.")
    words.append(_layer_skip(results))
    if decode.get("equal") is not None and decode["equal"] != decode.get("prompts"):
        words.append("OUTPUTS DIFFER between plain and speculative decoding: see what `selfspec check` says.")
    if _get(results, "regress", "status") == "failed":
        words.append("regress FAILED: its report is kept in results/regress.json.")
    if _get(results, "regress", "status") == "undecided":
        words.append("regress is undecided: results/regress.json says how many documents would decide.")
    return [sentence for sentence in words if sentence]


def layer_skip(sweep: Json) -> Json | None:
    """Return the best setting of layer skip that the sweep found, None where there is none."""
    return next((c for c in _get(sweep, "candidates") or [] if c.get("drafter") == "layer-skip"), None)


def _layer_skip(results: Json) -> str:
    """Say what trained layer skip lacks where it does not pay: a round must emit as many tokens as plain steps cost."""
    best = layer_skip(_get(results, "sweep") or {})
    if best is None or not isinstance(best.get("speedup_predicted"), int | float) or best["speedup_predicted"] >= 1:
        return ""
    cost = _ratio(best.get("tokens_per_round"), best["speedup_predicted"])
    steps, tokens = _get(results, "train", "steps"), _get(results, "train", "tokens")
    return (
        f"Trained layer skip does not pay here: at its best, E={best.get('exit_layer')}, "
        f"k={best.get('num_draft_tokens')}, a round costs {number(cost)} plain steps and emits "
        f"{number(best.get('tokens_per_round'))} tokens. Training was {DASH if steps is None else steps} steps on "
        f"{DASH if tokens is None else tokens} tokens, which is a demonstration. What would help: longer training on "
        "your own text (α), and a larger model, whose head is a smaller part of a draft step (c)."
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
        [_choice_row(sweep), *_drafter_rows(sweep)],
        _decode_rows(results),
    ]
    for rows in sections:
        for row in rows:
            table.add_row(*row)
        table.add_section()
    console.print(table)
    for sentence in honest_words(results):
        console.print(sentence)
