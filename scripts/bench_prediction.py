"""Hold predicted speed-ups of layer skip against the clock, cell by cell: ours, and the textbook score.

Acceptance is profiled on the prompts that are decoded, so that only the costs are in question. Costs are measured, then
every prompt is decoded plainly and with each cell in turn, A B B A, in one process. The measured speed-up of a cell is
the median over prompts of plain ÷ drafted seconds per token, prefill left out.

    python scripts/bench_prediction.py MODEL --prompts PROMPTS.jsonl [--exits 6,12,18,24] [--num-draft-tokens 1,2,4]
        [--num-prompts 6] [--max-new-tokens 64] [--rounds 2] [--repeats 25] [--dtype auto] [--json]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

from selfspec_tune.config import SweepConfig
from selfspec_tune.decode.drafters.layer_skip import LayerSkipDrafter
from selfspec_tune.decode.engine import Engine
from selfspec_tune.decode.policy import DraftPolicy
from selfspec_tune.decode.requests import Request
from selfspec_tune.decode.sampling import SamplingParams
from selfspec_tune.errors import UserError
from selfspec_tune.model.decoder import load_decoder
from selfspec_tune.model.load import end_tokens, load_tokenizer
from selfspec_tune.progress import Progress, silent
from selfspec_tune.sweep.breakdown import score
from selfspec_tune.sweep.confirm import seconds_per_token
from selfspec_tune.sweep.costs import CostBook
from selfspec_tune.sweep.profile import profile_exits
from selfspec_tune.sweep.prompts import read_prompts


def main() -> int:
    """Profile, measure costs, decode every cell in turn with plain decoding, and print."""
    options = parse()
    exits, ks = (list(map(int, text.split(","))) for text in (options.exits, options.num_draft_tokens))
    config = SweepConfig(
        prompts=options.prompts,
        raw=options.raw,
        num_prompts=options.num_prompts,
        max_new_tokens=options.max_new_tokens,
        max_draft_tokens=max(ks),
        context_lengths=(128, 512),
        repeats=options.repeats,
    )
    params, tokenizer = SamplingParams(options.temperature, seed=1), load_tokenizer(options.model)
    _, prompts = read_prompts(config, tokenizer)
    prompts = prompts[: options.num_prompts]
    decoder = load_decoder(options.model, dtype=options.dtype)
    engine = Engine(decoder, tokenizer, end_tokens=end_tokens(decoder.model))
    profile = profile_exits(engine, prompts, params, max(ks))
    book = CostBook(engine, params, config)
    book.measure(prompts[0].request)
    cells = {(cell.exit_layer, cell.num_draft_tokens): cell for cell in score(profile, book.at(profile.context))}
    requests = [prompt.request for prompt in prompts] * options.rounds
    ratios = speedups_in_turn(engine, requests, params, exits, ks, say)
    rows = [row(cells[key], found) for key, found in ratios.items()]
    report: dict[str, Any] = {
        "cells": rows,
        "off_predicted": median(abs(each["predicted"] / each["measured"] - 1) for each in rows),
        "off_model": median(abs(each["model"] / each["measured"] - 1) for each in rows),
        "context_length": round(profile.context),
        "dtype": str(decoder.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    print(json.dumps(report)) if options.json else show(report)
    return 0


def speedups_in_turn(
    engine: Engine,
    requests: Sequence[Request],
    params: SamplingParams,
    exits: Sequence[int],
    ks: Sequence[int],
    progress: Progress = silent,
) -> dict[tuple[int, int], list[float]]:
    """Decode every request plainly and with layer skip of every exit and k in turn; return plain ÷ drafted times.

    Times are seconds per token without prefill. Requests that give no second token are left out.
    """
    ratios: dict[tuple[int, int], list[float]] = {(e, k): [] for e in exits for k in ks}
    drafters = {exit_layer: LayerSkipDrafter(engine.decoder, exit_layer) for exit_layer in exits}
    for number, request in enumerate(requests):
        progress("decode in turn", number, len(requests))
        for turn, (exit_layer, k) in enumerate(ratios):
            how = [(None, None), (drafters[exit_layer], DraftPolicy(k))]
            order = 1 if (number + turn) % 2 else -1
            runs = [engine.generate([request], params, *each)[1] for each in how[::order]][::order]
            if all(stats.emitted > 1 for stats in runs):
                plain, drafted = map(seconds_per_token, runs)
                ratios[exit_layer, k].append(plain / drafted)
    return ratios


def say(stage: str, done: int, total: int) -> None:
    """Print a line of progress on stderr."""
    print(f"{stage}: {done + 1}/{total}", file=sys.stderr, flush=True)


def row(cell: Any, ratios: list[float]) -> dict[str, Any]:
    """Return the figures of one cell."""
    low, middle, high = quantiles(ratios, n=4, method="inclusive")
    return {
        "exit_layer": cell.exit_layer,
        "num_draft_tokens": cell.num_draft_tokens,
        "tokens_per_round": cell.tokens_per_round,
        "predicted": cell.speedup_predicted,
        "model": cell.speedup_model,
        "measured": middle,
        "quartiles": [low, high],
    }


def show(report: dict[str, Any]) -> None:
    """Print one table as Markdown, and how far off both scores are."""
    print("| exit | k | τ | textbook | predicted | measured (quartiles) |\n|---|---|---|---|---|---|")
    for cell in report["cells"]:
        low, high = cell["quartiles"]
        print(
            f"| {cell['exit_layer']} | {cell['num_draft_tokens']} | {cell['tokens_per_round']:.2f} "
            f"| {cell['model']:.2f} | {cell['predicted']:.2f} | {cell['measured']:.2f} ({low:.2f}–{high:.2f}) |"
        )
    print(
        f"off by, median over {len(report['cells'])} cells: predicted {report['off_predicted']:.1%}, textbook "
        f"{report['off_model']:.1%}; {report['dtype']}, {report['threads']} threads, torch {report['torch']}, "
        f"{report['context_length']} live tokens"
    )


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Hold predicted speed-ups of layer skip against the clock.")
    parser.add_argument("model")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--exits", default="6,12,18,24")
    parser.add_argument("--num-draft-tokens", default="1,2,4")
    parser.add_argument("--num-prompts", type=int, default=6)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    parser.add_argument("--raw", action="store_true", help="no chat template")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
