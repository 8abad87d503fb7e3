"""`selfspec regress`: the flags become a RegressConfig, the verdict becomes a table or JSON and an exit code."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from selfspec_tune import config as configs
from selfspec_tune.cli import console
from selfspec_tune.cli.options import options_from


@options_from(configs.RegressConfig)
def regress(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Checkpoint directory or hub name.", show_default=False)
    ],
    *,
    flags: dict[str, Any],
) -> None:
    """Test that training did no harm and that speculation changes nothing.

    Perplexity on held-out text against the base the model was trained from, and greedy decoding with speculation
    against decoding without: every token and, in exact numerics, every bit of the logits. The verdict is kept in
    MODEL/selfspec.json. Exit code 0: passed, 1: failed, 2: bad input.

    \b
    Examples:
      selfspec regress trained/ --base SmolLM2-135M/ --text demo/heldout.jsonl --prompts demo/prompts.jsonl --raw
      selfspec regress trained/ --text wiki.txt --text code.jsonl --prompts chats.jsonl --max-perplexity-increase 1%
      selfspec regress Qwen/Qwen3-0.6B --prompts chats.jsonl --exit-layers 6,14 --num-draft-tokens 2,5 --json
    """
    config = configs.build(configs.RegressConfig, flags)

    from selfspec_tune.regress import report

    with console.progress_bar() as progress:
        verdict, notices = report.run(model, config, progress)
    for text in notices:
        console.notice(text)
    if config.json:
        console.print_json(verdict)
    else:
        _print(model, verdict)
    if not verdict["passed"]:
        raise typer.Exit(1)


def _print(model: str, verdict: dict[str, Any]) -> None:
    perplexity, lossless, rows = verdict["perplexity"], verdict["lossless"], []
    if perplexity is not None:
        rows += _perplexity_rows(perplexity)
    if lossless is not None:
        rows += _lossless_rows(lossless)
    result = "passed" if verdict["passed"] else "FAILED"
    console.table(f"{model}: {result}", ["test", "found", "allowed"], rows, caption=_first_difference(lossless))


def _perplexity_rows(found: dict[str, Any]) -> list[list[str]]:
    low, high = found["interval"]
    return [
        [f"perplexity of the base ({found['tokens']:,} tokens)", _number(found["base"]), ""],
        ["perplexity of the model", _number(found["trained"]), ""],
        ["ratio", _number(found["ratio"]), f"at most {found['limit']:.4f}"],
        ["ratio, 95 % interval over windows", f"{_number(low)} to {_number(high)}", ""],
    ]


def _lossless_rows(found: dict[str, Any]) -> list[list[str]]:
    exact = found["numerics"] == "exact"
    drafters, lengths = (", ".join(map(str, found[name])) for name in ("drafters", "num_draft_tokens"))
    rows = [
        [f"{found['prompts']} prompts, {drafters}, draft tokens {lengths}", f"{found['cases']} cases", ""],
        ["draft tokens accepted", f"{found['accepted']:,} of {found['drafted']:,}", ""],
        ["tokens that differ from plain decoding", f"{found['differing_tokens']:,} of {found['tokens']:,}", ""],
        [f"logits, {found['dtype']}", "equal bit for bit" if found["bitwise_logits"] else "differ", ""],
    ]
    if exact:
        rows[2][2], rows[3][2] = "0", "equal bit for bit"
    else:
        rows.append(["cases that part, of these at a tie", f"{found['differing_cases']}, {found['ties']}", "ties only"])
    return rows


def _first_difference(found: dict[str, Any] | None) -> str | None:
    first = found["first_difference"] if found is not None else None
    if first is None:
        return None
    sides = [
        f"{first[f'{side}_token']} {side} (top-2 gap {_number(first[f'{side}_gap'])})"
        for side in ("plain", "speculative")
    ]
    return (
        f"first difference: prompt {first['prompt']}, token {first['position']}, {first['drafter']}, "
        f"{first['num_draft_tokens']} draft tokens: {', '.join(sides)}, logits differ by up to "
        f"{_number(first['largest_logit_difference'])}{', a tie' if first['tie'] else ''}"
    )


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}" if abs(value) < 1e-3 else f"{value:.4f}"
