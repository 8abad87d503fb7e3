"""Time our plain decoding, in `exact` and in `fast`, against transformers' `generate`: same prompts, same weights.

One process, in turn (exact, fast, generate, exact, …), so that a busy machine slows all three alike. Time per token
without prefill: ours is measured inside the engine, `generate` is timed for n + 1 tokens and for 1, and the difference
counts. The result is the median over prompts and rounds of generate ÷ ours in the same turn; above 1 ours is faster.

    python scripts/bench_plain.py MODEL --prompts FILE [--num-prompts 4] [--max-new-tokens 48] [--rounds 5] [--json]
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import transformers

from selfspec_tune.config import PromptConfig
from selfspec_tune.decode.engine import Engine
from selfspec_tune.decode.graphs import synchronise
from selfspec_tune.decode.prompts import read_requests
from selfspec_tune.decode.requests import Request
from selfspec_tune.decode.sampling import SamplingParams
from selfspec_tune.errors import UserError
from selfspec_tune.model.decoder import LayeredDecoder
from selfspec_tune.model.load import load_model, load_tokenizer

Measure = Callable[[Request], float]
"""Decode a request's `max_new_tokens` tokens after the first and return seconds per token, prefill left out."""

OURS, THEIRS = ("exact", "fast"), "generate"


def measure_engine(engine: Engine) -> Measure:
    """Time our plain decoding. The engine has no end tokens, so every token asked for is decoded."""

    def measure(request: Request) -> float:
        longer = replace(request, max_new_tokens=request.max_new_tokens + 1)
        _, stats = engine.generate([longer], SamplingParams())
        return (stats.total_seconds - stats.prefill_seconds) / request.max_new_tokens

    return measure


def measure_generate(model: Any) -> Measure:
    """Time transformers' generate."""

    def seconds(prompt: torch.Tensor, tokens: int) -> float:
        synchronise(model.device)
        begin = time.perf_counter()
        model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            pad_token_id=0,
        )
        synchronise(model.device)
        return time.perf_counter() - begin

    def measure(request: Request) -> float:
        prompt = torch.tensor([request.prompt_ids], device=model.device)
        count = request.max_new_tokens
        return (seconds(prompt, count + 1) - seconds(prompt, 1)) / count

    return measure


def alternate(measures: dict[str, Measure], requests: list[Request], rounds: int) -> dict[str, list[float]]:
    """Return seconds per token of every contender, in step: one value per round and prompt. One short turn warms up."""
    times: dict[str, list[float]] = {name: [] for name in measures}
    for measure in measures.values():
        measure(replace(requests[0], max_new_tokens=4))
    for _ in range(rounds):
        for request in requests:
            for name, measure in measures.items():
                times[name].append(measure(request))
    return times


def summarise(times: dict[str, list[float]]) -> dict[str, Any]:
    """Return medians in ms per token, and quartiles [lower, median, upper] of generate ÷ ours, paired by turn."""
    ratios = {}
    for name in OURS:
        paired = [theirs / ours for theirs, ours in zip(times[THEIRS], times[name], strict=True)]
        ratios[name] = quantiles(paired, n=4, method="inclusive") if len(paired) > 1 else paired * 3
    return {
        "milliseconds_per_token": {name: 1000 * median(values) for name, values in times.items()},
        "generate_over_ours": ratios,
        "turns": len(times[THEIRS]),
    }


def bench(options: argparse.Namespace) -> dict[str, Any]:
    """Load, measure and summarise."""
    if min(options.rounds, options.max_new_tokens) < 1:
        raise UserError("rounds and max-new-tokens must be 1 or more")
    tokenizer = load_tokenizer(options.model)
    model = load_model(options.model, dtype=options.dtype, device=options.device)
    count = options.max_new_tokens
    _, requests = read_requests(
        options.prompts, tokenizer, PromptConfig(raw=options.raw), max_new_tokens=count, limit=options.num_prompts
    )
    decoder = LayeredDecoder(model)
    measures = {name: measure_engine(Engine(decoder, numerics=name)) for name in OURS}
    measures[THEIRS] = measure_generate(model)
    lengths = [len(request.prompt_ids) for request in requests]
    return {
        **summarise(alternate(measures, requests, options.rounds)),
        "prompts": len(requests),
        "prompt_tokens": lengths,
        "new_tokens": count,
        "measured_on": {
            "device": torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else platform.machine(),
            "dtype": str(model.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }


def show(result: dict[str, Any]) -> None:
    """Print the result for people."""
    about, times = result["measured_on"], result["milliseconds_per_token"]
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    print(f"{result['prompts']} prompts of {result['prompt_tokens']} tokens, {result['new_tokens']} new tokens each")
    print(f"{THEIRS:>10}: {times[THEIRS]:8.2f} ms per token")
    for name in OURS:
        low, middle, high = result["generate_over_ours"][name]
        line = f"{times[name]:8.2f} ms per token, generate / {name} {middle:.3f} (quartiles {low:.3f} to {high:.3f})"
        print(f"{name:>10}: {line}")


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line and run; a UserError is exit code 2."""
    parser = argparse.ArgumentParser(description="Time our plain decoding against transformers' generate.")
    parser.add_argument("model", help="checkpoint directory or hub name")
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL of prompts")
    parser.add_argument("--num-prompts", type=int, default=4, help="[default: %(default)s]")
    parser.add_argument("--max-new-tokens", type=int, default=48, help="[default: %(default)s]")
    parser.add_argument("--rounds", type=int, default=5, help="[default: %(default)s]")
    parser.add_argument("--dtype", default="bfloat16", choices=["auto", "float32", "bfloat16", "float16"])
    parser.add_argument("--device", default="auto", help="[default: %(default)s]")
    parser.add_argument("--raw", action="store_true", help="give prompts as they are, without the chat template")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    try:
        result = bench(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(result))
    else:
        show(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
