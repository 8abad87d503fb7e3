"""Parts: what a round costs against its pieces, speed-ups against their prediction, and other sizes.

A round of k draft tokens should cost k·c + v plain steps, no more than its pieces timed alone: what is above that is
the engine's own. The speed-up predicted is τ/(c·k + v + o) with τ from a profile of the very texts that are decoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
from bench_prediction import speedups_in_turn  # type: ignore[import-not-found]  # beside gpu_check.py, which runs this
from synthetic_model import dial, random_prompts  # type: ignore[import-not-found]
from synthetic_weights import scale_late  # type: ignore[import-not-found]

from selfspec_tune.config import MAX_DRAFT_TOKENS
from selfspec_tune.decode.drafters.layer_skip import LayerSkipDrafter
from selfspec_tune.decode.engine import Engine
from selfspec_tune.decode.policy import DraftPolicy
from selfspec_tune.decode.price import draft_costs, plain_step_seconds
from selfspec_tune.decode.requests import Request
from selfspec_tune.decode.sampling import GREEDY
from selfspec_tune.decode.stats import Stats
from selfspec_tune.speedup import expected_tokens
from selfspec_tune.sweep.breakdown import ranked, score
from selfspec_tune.sweep.objective import Costs, speedup_predicted
from selfspec_tune.sweep.profile import Prompt
from selfspec_tune.sweep.tally import Profile
from selfspec_tune.sweep.timing import bookkeeping_seconds, measure_costs

from .part import Bench, Result

LATE_SCALE = 0.02
"""s of the texts on which rounds are timed: most of a draft stands, so that few tokens make many long rounds."""
MOST_OF_IDEAL, LEAST_OF_PREDICTED = 1.05, 0.95
WARM_UP, TURNS = 2, 2
"""Times each text is decoded before it counts, as rounds are first compiled and then recorded, and times it counts."""
ALPHA = 0.85
"""α at which speed-ups of other sizes are computed from their costs."""


def check_rounds(bench: Bench, result: Result) -> None:
    """Time rounds at every exit and k, in units of the k·c + v plain steps that their pieces take."""
    sizes, engine = bench.sizes, bench.engine(1)
    costs = measure_costs(
        engine, GREEDY, max_draft_tokens=MAX_DRAFT_TOKENS, context_length=sizes.context, repeats=sizes.repeats
    )
    requests = [Request("0", bench.random_tokens(sizes.context), tokens) for tokens in sizes.round_tokens]
    result.values |= {"plain_step_ms": 1000 * costs.plain, "context_length": sizes.context}
    result.values["rounds"] = found = []
    slowest = 0.0
    for exit_layer in sizes.exits:
        scale_late(engine.decoder.model, exit_layer, LATE_SCALE)
        drafter = LayerSkipDrafter(engine.decoder, exit_layer)
        for k in sizes.draft_lengths:
            if not result.fits(f"rounds of E = {exit_layer}, k = {k}", slowest):
                continue
            before = result.left()
            turns = [
                [engine.generate([request], GREEDY, drafter, DraftPolicy(k))[1] for request in requests]
                for _ in range(WARM_UP + TURNS)
            ]
            entry: dict[str, Any] = {"exit_layer": exit_layer, "num_draft_tokens": k}
            entry["ideal_steps"] = k * costs.cost_ratio(exit_layer) + costs.verify_ratio(exit_layer, k)
            entry["over_ideal"] = median(over_ideal(turn, costs, exit_layer) for turn in turns[WARM_UP:])
            found.append(entry)
            slowest = max(slowest, before - result.left())
    worst = max((each["over_ideal"] for each in found), default=None)
    if worst is not None and worst <= MOST_OF_IDEAL and len(found) < len(sizes.exits) * len(sizes.draft_lengths):
        worst = None  # those left out might be worse
    result.aim("a round over its k·c + v, worst of all", worst, at_most=MOST_OF_IDEAL)


def over_ideal(turn: Sequence[Stats], costs: Costs, exit_layer: int) -> float:
    """Return the time that the rounds of the second text take beyond the first's, over the sum of their k·c + v.

    Batch size 1; the second text is the longer one.

    What begins and ends a text, such as a round launched ahead that nobody needs, is in both and cancels out.
    """

    def ideal(stats: Stats) -> float:
        steps = float(stats.plain_steps)
        for (_, k, _), count in stats.rounds_of.items():
            steps += count * (k * costs.cost_ratio(exit_layer) + costs.verify_ratio(exit_layer, k))
        return steps * costs.plain

    short, long = turn
    seconds = [stats.total_seconds - stats.prefill_seconds for stats in turn]
    return (seconds[1] - seconds[0]) / (ideal(long) - ideal(short))


def check_speedups(bench: Bench, result: Result) -> None:
    """Dial α, predict the speed-up of the k that is best by prediction, and decode to measure it."""
    sizes, engine, exit_layer = bench.sizes, bench.engine(1), bench.sizes.exits[0]
    vocab_size = engine.decoder.family.vocab_size
    prompts = random_prompts(vocab_size, sizes.prompts, sizes.prompt_tokens, sizes.new_tokens)
    costs = measure_costs(
        engine,
        GREEDY,
        max_draft_tokens=MAX_DRAFT_TOKENS,
        context_length=sizes.prompt_tokens + sizes.new_tokens // 2,
        repeats=sizes.repeats,
        overheads=bookkeeping_seconds(engine, GREEDY, prompts[0].request, MAX_DRAFT_TOKENS // 2),
    )
    result.values["alphas"] = found = []
    tried: dict[float, Profile] = {}
    slowest = 0.0
    for alpha in sizes.alphas:
        if not result.fits(f"α = {alpha}", slowest):
            result.aim(f"measured over predicted speed-up, α = {alpha}", None, at_least=LEAST_OF_PREDICTED)
            continue
        before = result.left()
        entry = measured_speedup(engine, exit_layer, alpha, prompts, costs, tried)
        found.append(entry)
        share = entry["measured"] / entry["predicted"] if entry["reached"] else None
        result.aim(f"measured over predicted speed-up, α = {alpha}", share, at_least=LEAST_OF_PREDICTED)
        slowest = max(slowest, before - result.left())


def measured_speedup(
    engine: Engine,
    exit_layer: int,
    alpha: float,
    prompts: list[Prompt],
    costs: Costs,
    tried: dict[float, Profile],
) -> dict[str, Any]:
    """Dial one α and return what was found of it, the speed-up predicted, and the one measured."""
    dialled = dial(engine, exit_layer, alpha, prompts, tried)
    own = [cell for cell in score(dialled.profile, costs) if cell.exit_layer == exit_layer]
    best = ranked(own)[0]
    k = best.num_draft_tokens
    requests = [prompt.request for prompt in prompts] * (WARM_UP + TURNS)
    ratios = speedups_in_turn(engine, requests, GREEDY, [exit_layer], [k])[exit_layer, k][WARM_UP * len(prompts) :]
    return {
        **dialled.to_dict(),
        "num_draft_tokens": k,
        "tokens_per_round": best.tokens_per_round,
        "cost_ratio": best.cost_ratio,
        "verify_ratio": best.verify_ratio,
        "overhead_ratio": costs.overhead_ratio,
        "predicted": best.speedup_predicted,
        "measured": median(ratios),
    }


def check_sizes(bench: Bench, result: Result) -> None:
    """Measure a plain step and a draft's costs at other batch sizes and contexts, where the device has the memory."""
    sizes = bench.sizes
    result.values["sizes"] = found = []
    slowest = 0.0
    for context_length in sizes.contexts:
        for batch_size in sizes.batch_sizes:
            what = f"batch size {batch_size} at {context_length} tokens"
            missing = memory_missing(bench, batch_size, context_length)
            if missing > 0:
                result.skip(what, f"{missing / 1e9:.0f} GB more would be needed")
            elif result.fits(what, 2 * slowest):
                before = result.left()
                # The engine is not kept: its cache would take the next size's memory.
                found.append(measured_size(bench, Engine(bench.decoder, batch_size=batch_size), context_length))
                slowest = max(slowest, before - result.left())


def measured_size(bench: Bench, engine: Engine, context_length: int) -> dict[str, Any]:
    """Return the cost of a plain step and of a draft of the first exit, and what they are worth at `ALPHA`."""
    decoder, batch_size, repeats = engine.decoder, engine.batch_size, bench.sizes.repeats
    seconds = plain_step_seconds(
        decoder, [engine.rows], batch_size=batch_size, context_length=context_length, repeats=repeats
    )
    drafter = LayerSkipDrafter(decoder, bench.sizes.exits[0])
    costs = draft_costs(engine, drafter, context_length=context_length, repeats=repeats)
    predicted = {
        k: speedup_predicted(expected_tokens(ALPHA, k), costs.cost_ratio, costs.verify_ratio[k - 1], k)
        for k in range(1, MAX_DRAFT_TOKENS + 1)
    }
    best = max(predicted, key=lambda k: predicted[k])
    return {
        "batch_size": batch_size,
        "context_length": context_length,
        "plain_step_ms": {name: 1000 * value for name, value in seconds.items()},
        "tokens_per_second": batch_size / seconds["exact"],
        "of_roofline": bench.step_bytes(context_length, batch_size) / bench.bandwidth / seconds["exact"],
        "exit_layer": bench.sizes.exits[0],
        "cost_ratio": costs.cost_ratio,
        "verify_ratio": list(costs.verify_ratio),
        f"speedup_at_alpha_{ALPHA}": {"num_draft_tokens": best, "speedup": predicted[best]},
    }


def memory_missing(bench: Bench, batch_size: int, context_length: int) -> float:
    """Return the bytes by which the device's free memory falls short of a size; below 0 where it suffices."""
    if bench.device.type != "cuda":
        return -1.0
    bench.release()
    cache = bench.step_bytes(context_length + 2 * MAX_DRAFT_TOKENS, batch_size) - bench.step_bytes(0)
    wanted = cache * (1 + 6 / bench.decoder.num_layers)
    return wanted - torch.cuda.mem_get_info(bench.device)[0]
