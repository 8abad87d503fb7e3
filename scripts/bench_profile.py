"""Hold the profile of one pass against really decoding: tokens per round in a grid of exits and k, and what each costs.

Greedy: rounds and tokens of real decoding must be those replayed; in fp32 in every cell, in bf16 up to near-ties, which
the pass over many rows may break otherwise (within 1 % of tokens per round in a cell). Sampling: the text that
speculation emitted is profiled, its rounds are simulated from the acceptance probabilities, and the real tokens per
round must lie in the 99 % interval of these simulations; of many cells one in a hundred lies outside by chance.

    python scripts/bench_profile.py MODEL --prompts PROMPTS.jsonl --dtype float32 [--exits 5,10,15,20,25,29]
        [--num-draft-tokens 1,2,4,8] [--num-prompts 6] [--max-new-tokens 64] [--temperature 0] [--top-p 1] [--json]

Exit code 1 if a greedy cell is off, or more cells of sampling than chance allows (probability below 0.001).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from selfspec_tune.config import PromptConfig
from selfspec_tune.decode.drafters.layer_skip import LayerSkipDrafter
from selfspec_tune.decode.engine import Engine
from selfspec_tune.decode.policy import DraftPolicy
from selfspec_tune.decode.prompts import read_requests
from selfspec_tune.decode.requests import Request
from selfspec_tune.decode.sampling import SamplingParams
from selfspec_tune.errors import UserError
from selfspec_tune.model.decoder import load_decoder
from selfspec_tune.model.load import end_tokens, load_tokenizer
from selfspec_tune.sweep.profile import Profiler, Prompt, acceptance

SIMULATIONS, COVERAGE = 4000, 0.99
BF16_TOLERANCE = 0.01
"""Largest relative difference of tokens per round in low precision."""


def simulate(weights: np.ndarray, k: int, budget: int, draw: np.random.Generator) -> np.ndarray:
    """Return rounds and tokens of `SIMULATIONS` ways to emit a text, [2, SIMULATIONS], forwards as the engine runs."""
    length = len(weights)
    start, rounds = np.zeros(SIMULATIONS, int), np.zeros(SIMULATIONS, int)
    tokens = np.zeros(SIMULATIONS, int)
    while (start < length).any():
        drafted = np.minimum(k, budget - start - 1)
        active = start < length
        standing, accepted = active & (drafted > 0), np.zeros(SIMULATIONS, int)
        for offset in range(k):
            place = np.minimum(start + offset, length - 1)
            standing &= (offset < drafted) & (start + offset < length) & (draw.random(SIMULATIONS) < weights[place])
            accepted += standing
        emitted = np.minimum(accepted + 1, length - start)
        rounds += active & (drafted > 0)
        tokens += np.where(active & (drafted > 0), emitted, 0)
        start += np.where(active, emitted, 0)
    return np.stack([rounds, tokens])


class Bench:
    """Real decoding and its profile, cell by cell."""

    def __init__(self, engine: Engine, requests: list[Request], params: SamplingParams) -> None:
        self.engine, self.requests, self.params = engine, requests, params
        self.draw = np.random.default_rng(0)
        self.grid_seconds = 0.0

    def decode(self, exit_layer: int, k: int) -> tuple[int, int, list[list[int]]]:
        """Really decode: rounds, the tokens they emitted, and the texts."""
        drafter, rounds, tokens, texts = LayerSkipDrafter(self.engine.decoder, exit_layer), 0, 0, []
        for request in self.requests:
            begin = time.perf_counter()
            [completion], stats = self.engine.generate([request], self.params, drafter, DraftPolicy(k))
            self.grid_seconds += time.perf_counter() - begin
            rounds += stats.rounds
            tokens += stats.emitted - stats.from_prefill - stats.plain_steps
            texts.append(completion.token_ids)
        return rounds, tokens, texts

    @torch.inference_mode()
    def interval(self, profiler: Profiler, texts: list[list[int]], exit_layer: int, k: int) -> tuple[float, float]:
        """Return the interval of tokens per round that simulations of these texts give."""
        total = np.zeros((2, SIMULATIONS))
        for request, text in zip(self.requests, texts, strict=True):
            if len(text) < 2:
                continue
            cache = self.engine.cache_for(len(request.prompt_ids) + len(text))
            ids = torch.tensor([request.prompt_ids], device=self.engine.decoder.device)
            self.engine.decoder.prefill(ids, cache)
            weights, _ = acceptance(self.engine.decoder, cache, text, self.params, profiler.head)
            total += simulate(weights[exit_layer - 1].numpy(), k, request.max_new_tokens - 1, self.draw)
        low, high = np.quantile(total[1] / total[0], [(1 - COVERAGE) / 2, (1 + COVERAGE) / 2])
        return float(low), float(high)


def too_many(outside: int, cells: int) -> bool:
    """Whether so many cells lie outside their interval by chance in fewer than one of a thousand runs."""
    miss = 1 - COVERAGE
    chances = (math.comb(cells, n) * miss**n * (1 - miss) ** (cells - n) for n in range(outside))
    return 1 - sum(chances) < 0.001


def main() -> int:
    """Profile, decode the grid, compare and print."""
    options = parse()
    tokenizer = load_tokenizer(options.model)
    params = SamplingParams(options.temperature, options.top_k, options.top_p, seed=1)
    limits = {"max_new_tokens": options.max_new_tokens, "limit": options.num_prompts}
    _, requests = read_requests(options.prompts, tokenizer, PromptConfig(raw=options.raw), **limits)
    decoder = load_decoder(options.model, dtype=options.dtype)
    engine = Engine(decoder, tokenizer, end_tokens=end_tokens(decoder.model))
    exits, ks = (list(map(int, text.split(","))) for text in (options.exits, options.num_draft_tokens))
    profiler, bench = Profiler(engine, params, max(ks), "generated"), Bench(engine, requests, params)
    plain_seconds = profile_seconds = 0.0
    tallies, prompts = [], [Prompt(request) for request in requests]
    engine.generate(requests[:1], params)  # warm-up
    for start in range(0, len(prompts), profiler.together):
        part = prompts[start : start + profiler.together]
        begin = time.perf_counter()
        for prompt in part:
            engine.generate([prompt.request], params)
        middle = time.perf_counter()
        tallies += profiler.tallies(part)
        plain_seconds, profile_seconds = plain_seconds + middle - begin, profile_seconds + time.perf_counter() - middle
    cells = []
    for exit_layer in exits:
        for k in ks:
            print(f"exit {exit_layer}, k = {k}", file=sys.stderr, flush=True)
            rounds, tokens, texts = bench.decode(exit_layer, k)
            real = tokens / rounds
            if params.greedy:
                sums = [sum(getattr(t, name)[k - 1][exit_layer - 1] for t in tallies) for name in ("tokens", "rounds")]
                low = high = sums[0] / sums[1]
                slack = 0.0 if decoder.dtype == torch.float32 else BF16_TOLERANCE * real
            else:
                (low, high), slack = bench.interval(profiler, texts, exit_layer, k), 0.0
            fits = low - slack <= real <= high + slack
            cells.append({"exit_layer": exit_layer, "k": k, "real": real, "low": low, "high": high, "fits": fits})
    outside = sum(not cell["fits"] for cell in cells)
    failed = outside > 0 if params.greedy else too_many(outside, len(cells))
    report = {
        "cells": cells,
        "outside": outside,
        "plain_seconds": plain_seconds,
        "profile_seconds": profile_seconds,
        "profile_over_plain": profile_seconds / plain_seconds,
        "grid_seconds": bench.grid_seconds,
        "grid_over_plain": bench.grid_seconds / plain_seconds,
        "generated_together": profiler.together,
        "dtype": str(decoder.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    print(json.dumps(report)) if options.json else show(report, params)
    return int(failed)


def show(report: dict[str, Any], params: SamplingParams) -> None:
    """Print the grid and the costs."""
    print(f"{report['dtype']}, {params}, torch {report['torch']}, threads {report['threads']}")
    for cell in report["cells"]:
        computed = f"{cell['low']:.4f}" if params.greedy else f"{cell['low']:.3f} to {cell['high']:.3f}"
        mark = "" if cell["fits"] else "  OFF"
        print(f"  E = {cell['exit_layer']}, k = {cell['k']}: τ decoded {cell['real']:.4f}, computed {computed}{mark}")
    print(
        f"cells off: {report['outside']} of {len(report['cells'])}\n"
        f"plain generation, one prompt at a time: {report['plain_seconds']:.1f} s; the whole profile, generation "
        f"({report['generated_together']} together) included: {report['profile_seconds']:.1f} s "
        f"(×{report['profile_over_plain']:.2f}); this grid of real decodes: {report['grid_seconds']:.1f} s "
        f"(×{report['grid_over_plain']:.1f})"
    )


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Hold the one-pass profile against really decoding.")
    parser.add_argument("model")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--exits", default="5,10,15,20,25,29")
    parser.add_argument("--num-draft-tokens", default="1,2,4,8")
    parser.add_argument("--num-prompts", type=int, default=6)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0)
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
