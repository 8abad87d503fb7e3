"""A verdict in rows of (part, test, found, allowed, status), for the terminal's table and the Markdown report alike.

Works on the verdict's JSON, so that a part taken over from an earlier run is shown too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from selfspec_tune.regress.quality import advice

SHOWN = {"passed": "passed", "failed": "FAILED", "undecided": "undecided"}


class Row(NamedTuple):
    """One test: what it belongs to, its name, what was found, what is allowed, and the status it decides."""

    part: str
    test: str
    found: str
    allowed: str = ""
    status: str = ""


def rows(verdict: dict[str, Any]) -> list[Row]:
    """Return a row for every test of the verdict, those of one part together."""
    found = []
    if verdict.get("perplexity") is not None:
        found += _perplexity_rows(verdict["perplexity"])
    if verdict.get("tasks") is not None:
        found += _task_rows(verdict["tasks"])
    if verdict.get("lossless") is not None:
        found += _lossless_rows(verdict["lossless"])
    if verdict.get("sampling") is not None:
        found += _sampling_rows(verdict["sampling"])
    return found


def headline(model: str, verdict: dict[str, Any]) -> str:
    """Return the verdict in one line, with what would decide it where it is undecided."""
    hints = [
        f"{each['name']}: {advice(each)}"
        for each in (verdict.get("perplexity") or {}).get("sets", [])
        if each["status"] == "undecided"
    ]
    for task in (verdict.get("tasks") or {}).get("tasks", []):
        if task["status"] == "undecided":
            needed = f"use >= {task['needed']:,} documents" if task["needed"] else "use more documents"
            hints.append(f"{_task_name(task)}: {needed}")
    tests = (verdict.get("sampling") or {}).get("ratio_test", [])
    if any(test["p_value"] is None for test in tests if test["order"] == "probability"):
        hints.append("too few sampled tokens to test their distribution: more --sampling-texts")
    return f"{model}: {SHOWN[verdict['status']]}" + (f" ({'; '.join(hints)})" if hints else "")


def first_difference(verdict: dict[str, Any]) -> str | None:
    """Return where speculative decoding first parts from plain decoding, None where it does not."""
    first = (verdict.get("lossless") or {}).get("first_difference")
    if first is None:
        return None
    sides = [
        f"{first[f'{side}_token']} {side} (top-2 gap {number(first[f'{side}_gap'])})"
        for side in ("plain", "speculative")
    ]
    return (
        f"first difference: prompt {first['prompt']}, token {first['position']}, {first['drafter']}, "
        f"{first['num_draft_tokens']} draft tokens: {', '.join(sides)}, logits differ by up to "
        f"{number(first['largest_logit_difference'])}{', a tie' if first['tie'] else ''}"
    )


def settings(verdict: dict[str, Any]) -> list[tuple[str, str]]:
    """Return (name, value) of everything the numbers depend on besides the weights."""
    found = list((verdict.get("perplexity") or {}).get("settings", {}).items())
    if verdict.get("lossless"):
        lossless = verdict["lossless"]
        found.append(("decoding", f"greedy, numerics {lossless['numerics']}, {lossless['dtype']}"))
    versions = ", ".join(f"{name} {value}" for name, value in verdict.get("versions", {}).items())
    return [*found, ("versions", versions), ("date", verdict["date"])]


def markdown(model: str, verdict: dict[str, Any]) -> str:
    """Return the report as Markdown."""
    lines = [f"**selfspec regress: {_escaped(headline(model, verdict))}**", ""]
    lines += ["| | test | found | allowed | |", "|---|---|---|---|---|"]
    part = None
    for row in rows(verdict):
        # Only the first row of a part names it.
        lines.append(f"| {' | '.join(map(_escaped, (row.part if row.part != part else '', *row[1:])))} |")
        part = row.part
    first = first_difference(verdict)
    if first is not None:
        lines += ["", _escaped(first)]
    lines += ["", *(f"- {name}: {_escaped(value)}" for name, value in settings(verdict))]
    return "\n".join(lines) + "\n"


def number(value: float | None) -> str:
    """Return a number in four digits, or none."""
    return "none" if value is None else f"{value:.4g}" if 0 < abs(value) < 1e-3 else f"{value:.4f}"


def _perplexity_rows(perplexity: dict[str, Any]) -> list[Row]:
    if "sets" not in perplexity:  # a part that an older version left in selfspec.json
        shown = SHOWN["passed" if perplexity.get("passed") else "failed"]
        return [Row("perplexity, of an earlier run", "ratio", number(perplexity.get("ratio")), "", shown)]
    found = []
    for each in perplexity["sets"]:
        part = f"{each['name']}: {each['documents']:,} of {each['available']:,} documents, {each['tokens']:,} tokens"
        limit = f"at most {each['limit']:.4f}"
        found += [
            Row(part, "perplexity, base → model", f"{number(each['base'])} → {number(each['trained'])}"),
            Row(part, "ratio", number(each["ratio"])),
            Row(part, "ratio, 95 % interval", _interval(each["interval"]), limit, SHOWN[each["status"]]),
            Row(part, "KL(base‖model), nats/token", number(each["kl"])),
            Row(part, "KL, 95 % interval", _interval(each["kl_interval"])),
            Row(part, "same most probable token", f"{100 * each['top1_agreement']:.2f} %"),
        ]
    return found


def _lossless_rows(found: dict[str, Any]) -> list[Row]:
    lengths = ", ".join(map(str, found["num_draft_tokens"]))
    part = f"losslessness: {found['prompts']} prompts, {', '.join(found['drafters'])}, draft tokens {lengths}"
    status = SHOWN["passed" if found["passed"] else "failed"]
    differing = f"{found['differing_tokens']:,} of {found['tokens']:,}"
    bits = "equal bit for bit" if found["bitwise_logits"] else "differ"
    rows = [Row(part, "draft tokens accepted", f"{found['accepted']:,} of {found['drafted']:,}")]
    if found["numerics"] == "exact":
        equal = SHOWN["passed" if found["bitwise_logits"] else "failed"]
        same = SHOWN["failed" if found["differing_tokens"] else "passed"]
        return [
            *rows,
            Row(part, "tokens that differ", differing, "0", same),
            Row(part, f"logits, {found['dtype']}", bits, "equal", equal),
        ]
    parted = f"{found['differing_cases']}, {found['ties']}"
    return [
        *rows,
        Row(part, "tokens that differ", differing),
        Row(part, f"logits, {found['dtype']}", bits),
        Row(part, "texts that part, at a tie", parted, "ties only", status),
    ]


def _task_rows(tasks: dict[str, Any]) -> list[Row]:
    found = []
    for task in tasks["tasks"]:
        part = f"task {_task_name(task)}: {task['documents']:,} documents"
        interval = _interval(task["interval"]) if task["interval"] else "none"
        found += [
            Row(part, f"{task['metric']}, base → model", f"{number(task['base'])} → {number(task['trained'])}"),
            Row(part, "change", number(task["difference"])),
            Row(part, "change, 95 % interval", interval, f"at least {number(task['allowed'])}", SHOWN[task["status"]]),
        ]
    return found


def _sampling_rows(found: dict[str, Any]) -> list[Row]:
    noise, tests = found["shared_noise"], found["ratio_test"]
    part = (
        f"sampling: {found['prompts']} prompts, temperature {found['temperature']:g}, top-p {found['top_p']:g}, "
        f"{found['texts_per_prompt']} texts each, {', '.join(found['drafters'])}"
    )
    fast = found["numerics"] == "fast"
    excused = sum(cell["rounding"] for cell in noise) if fast else 0
    parted = sum(cell["differing_texts"] for cell in noise) > excused
    differing, tokens = (sum(cell[name] for cell in noise) for name in ("differing_tokens", "tokens"))
    known = [test["p_value"] for test in tests if test["p_value"] is not None]
    least = found["threshold"]
    uneven = bool(known) and min(known) < least
    enough = all(test["p_value"] is not None for test in tests if test["order"] == "probability")
    uniform = SHOWN["failed"] if uneven else SHOWN["passed"] if enough else "too few tokens: more --sampling-texts"
    return [
        Row(part, "draft tokens accepted", f"{found['accepted']:,} of {found['drafted']:,}"),
        Row(
            part,
            "shared noise: differing",
            f"{differing:,} of {tokens:,}",
            "by rounding only" if fast else "0",
            SHOWN["failed" if parted else "passed"],
        ),
        Row(
            part,
            "impossible tokens",
            f"{found['impossible_tokens']:,}",
            "0",
            SHOWN["failed" if found["impossible_tokens"] else "passed"],
        ),
        Row(
            part,
            f"least p-value of {len(tests)} tests",
            number(min(known)) if known else "too few tokens",
            f"at least {least:.2g}",
            uniform,
        ),
    ]


def _task_name(task: dict[str, Any]) -> str:
    return Path(task["name"]).name


def _interval(bounds: list[float | None]) -> str:
    return " to ".join(map(number, bounds))


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")
