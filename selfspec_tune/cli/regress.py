"""`selfspec regress`: thresholds and flags become a RegressConfig, the verdict a table or JSON and an exit code."""

from __future__ import annotations

from pathlib import Path
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
    recipe: Annotated[
        Path | None,
        typer.Option("--config", metavar="PATH", help="YAML of options, such as thresholds; flags override it."),
    ] = None,
    *,
    flags: dict[str, Any],
) -> None:
    """Test that training did no harm and that speculation changes nothing.

    Perplexity on held-out text against the base the model was trained from, and greedy decoding with speculation
    against decoding without: every token and, in exact numerics, every bit of the logits. Beside perplexity stand
    KL(base‖model) per token and how often both prefer the same token.

    Perplexity is decided on the 95 % interval of the ratio, a paired bootstrap over documents: passed where all of it
    is within the limit, failed where all of it is beyond, else undecided, with the number of documents that would
    probably decide. Both models read the same tokens in the same windows: a document is tokenised as the tokenizer does
    by itself (no BOS token is added that it would not add) and cut into windows of --window-length tokens that do not
    overlap, at most --max-windows of them from its start; the first token of a window is not scored.

    --tasks compares scores of downstream tasks with the base's, document by document. Sampling with the drafter is
    tested on the prompts too: with shared noise against plain decoding, and by the distribution of the tokens.

    The verdict is kept in MODEL/selfspec.json. Exit code 0: passed, 1: failed or undecided, 2: bad input.

    \b
    Examples:
      selfspec regress trained/ --base SmolLM2-135M/ --text demo/heldout.jsonl --prompts demo/prompts.jsonl --raw
      selfspec regress trained/ --text wiki.txt --text code.jsonl --prompts chats.jsonl --max-perplexity-increase 1%
      selfspec regress trained/ --config recipes/regress.yaml --text heldout.jsonl --report report/
      selfspec regress trained/ --base SmolLM2-135M/ --tasks arc_easy,questions.jsonl --task-limit 500
      selfspec regress Qwen/Qwen3-0.6B --prompts chats.jsonl --exit-layers 6,14 --num-draft-tokens 2,5 --json
    """
    config = configs.build(configs.RegressConfig, configs.read_recipe(recipe) if recipe else {}, flags)

    from selfspec_tune.regress import report

    with console.progress_bar() as progress:
        verdict, notices = report.run(model, config, progress)
    for text in notices:
        console.notice(text)
    if config.json:
        console.print_json(verdict)
    else:
        _print(model, verdict)
    if config.report is not None:
        report.write_report(config.report, model, verdict)
        console.notice(f"written: {config.report / 'regress.md'} and regress.json")
    if not verdict["passed"]:
        raise typer.Exit(1)


def _print(model: str, verdict: dict[str, Any]) -> None:
    from selfspec_tune.regress import table

    sections: dict[str, list[list[str]]] = {}
    for part, *cells in table.rows(verdict):
        sections.setdefault(part, []).append(cells)
    console.sections(table.headline(model, verdict), ["test", "found", "allowed", ""], sections)
    first = table.first_difference(verdict)
    if first is not None:
        print(first)
