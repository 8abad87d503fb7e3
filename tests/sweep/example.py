"""What `Sweep.to_dict()` gives, for tests of how it is shown: a plausible model of 30 layers, not measured anywhere."""

from __future__ import annotations

from operator import itemgetter
from typing import Any

from selfspec_tune.speedup import expected_tokens, speedup_model
from selfspec_tune.sweep.objective import alpha_needed, speedup_predicted

NUM_LAYERS, MAX_DRAFT_TOKENS, OVERHEAD = 30, 8, 0.03
CONTEXTS, BATCHES = (128, 512, 2048), (1, 4)
CONTEXT_ROWS = ((128, 9, 3, 1.337), (512, 9, 2, 1.218), (2048, None, 0, 0.941))
OFF_ROWS = ((128, None, 0, 0.702), (512, None, 0, 0.691), (2048, None, 0, 0.653))
DRAFT = {"draft_bits": 4, "draft_head_bits": 8, "draft_group": 32, "hybrid_with": "low-precision", "draft_vocab": None}


def example_result(*, pays: bool = True, domain: str = "code") -> dict[str, Any]:
    """Return a result as `selfspec sweep-exit --json` prints it.

    Args:
        pays: whether speculation is on, with layer skip; else no exit comes near.
        domain: the name of the first of four domains.
    """
    exits = range(1, NUM_LAYERS)
    alphas = {e: _alpha(e, pays) for e in exits}
    cells = [_cell(e, k, alphas[e]) for e in exits for k in range(1, MAX_DRAFT_TOKENS + 1)]
    predicted = itemgetter("speedup_predicted")
    inside = [cell for cell in cells if 9 <= cell["exit_layer"] <= 24]
    outside = max((cell for cell in cells if cell not in inside), key=predicted)
    best = max(inside, key=predicted)
    candidates = _candidates(best, pays)
    return {
        "model": "models/example-30",
        "num_layers": NUM_LAYERS,
        "prompts": "prompts/traffic.jsonl",
        "raw": False,
        "source": "generated",
        "approximate": False,
        "sampling": {"temperature": 0.0, "top_k": 0, "top_p": 1.0},
        "numerics": "exact",
        "window": [0.3, 0.8],
        "artifact": _artifact(candidates[0], pays),
        "cells": cells,
        "alpha_by_exit": {str(e): alpha for e, alpha in alphas.items()},
        "alpha_intervals": {str(e): [max(0.0, a - 0.021), min(1.0, a + 0.023)] for e, a in alphas.items()},
        "costs": [_costs(context, batch) for context in CONTEXTS for batch in BATCHES],
        "by_context": [_context(*row) for row in (CONTEXT_ROWS if pays else OFF_ROWS)],
        "by_domain": _domains(domain),
        "alpha_needed": [_needed(e, alphas[e]) for e in exits],
        "candidates": candidates,
        "skipped": {"low-precision 8-bit": "its packed weights need 3.1 GB"},
        "confirmed": [_confirmed(candidates[0], 1.04), _confirmed(candidates[1], 0.93)],
        "better_outside_window": outside if predicted(outside) > predicted(best) else None,
        "warnings": ["the machine was busy: a plain step composed from its pieces is ×1.18 of the one measured"],
        "plain_tokens_per_second": 41.37,
        "profile_seconds": 12.4,
        "generate_seconds": 9.2,
        "path": "models/example-30/selfspec.json",
    }


def _alpha(exit_layer: int, pays: bool) -> float:
    depth = exit_layer / NUM_LAYERS
    return 0.11 + 0.86 * min(1.0, depth / 0.32) ** 1.3 * (0.86 + 0.14 * depth) if pays else 0.02 + 0.6 * depth**3


def _ratios(exit_layer: int, k: int, scale: float = 1.0) -> tuple[float, float]:
    """Return c(E) and v(E, k)."""
    return 0.09 + 0.91 * exit_layer / NUM_LAYERS, (1.02 + 0.045 * k) * scale


def _cell(exit_layer: int, k: int, alpha: float) -> dict[str, Any]:
    c, v = _ratios(exit_layer, k)
    tokens = 0.98 * expected_tokens(alpha, k)
    predicted = speedup_predicted(tokens, c, v, k, OVERHEAD)
    return {
        "exit_layer": exit_layer,
        "num_draft_tokens": k,
        "alpha": alpha,
        "cost_ratio": c,
        "verify_ratio": v,
        "tokens_per_round": tokens,
        "speedup_model": speedup_model(alpha, c, k),
        "speedup_predicted": predicted,
        "interval": [predicted * 0.951, predicted * 1.043],
    }


def _costs(context: int, batch: int) -> dict[str, Any]:
    scale = 1 + 0.05 * (batch - 1) + context / 20000
    return {
        "context_length": context,
        "batch_size": batch,
        "plain_seconds": 0.0242 * scale,
        "plain_spread": 0.013 * batch,
        "exact_over_fast": 1.0 if batch == 1 else None,
        "overhead_ratio": OVERHEAD,
        "composed_over_measured": 0.991 if context < 2048 else 1.18,
        "cost_ratio": {str(e): _ratios(e, 1)[0] * (1 + context / 40000) for e in range(1, NUM_LAYERS)},
        "verify_ratio": {
            str(e): [_ratios(e, k, scale)[1] for k in range(1, MAX_DRAFT_TOKENS + 1)] for e in range(1, NUM_LAYERS)
        },
    }


def _context(max_context: int, exit_layer: int | None, k: int, predicted: float) -> dict[str, Any]:
    return {
        "max_context": max_context,
        "exit_layer": exit_layer,
        "num_draft_tokens": k,
        "speedup_predicted": predicted,
    }


def _needed(exit_layer: int, alpha: float) -> dict[str, Any]:
    best: tuple[float, int] = (2.0, 1)
    for k in range(1, MAX_DRAFT_TOKENS + 1):
        c, v = _ratios(exit_layer, k)
        needed = alpha_needed(1.2, c, v + OVERHEAD, k)
        best = min(best, (2.0 if needed is None else needed, k))
    return {
        "exit_layer": exit_layer,
        "num_draft_tokens": best[1],
        "alpha": alpha,
        "needed": None if best[0] == 2.0 else best[0],
    }


def _candidates(cell: dict[str, Any], pays: bool) -> list[dict[str, Any]]:
    skip = cell | {"label": f"layer-skip E={cell['exit_layer']}", "drafter": "layer-skip", "draft": DRAFT, "costs": {}}
    skip |= {"tokens_per_step": cell["tokens_per_round"]}
    skip["cost_per_step"] = skip["tokens_per_step"] / skip["speedup_predicted"]
    del skip["interval"]

    def other(label: str, drafter: str, draft: dict[str, Any], k: int, alpha: float | None, cost: float) -> Any:
        tokens = expected_tokens(alpha or 0.0, k)
        return {
            "label": label,
            "drafter": drafter,
            "exit_layer": None,
            "draft": draft,
            "num_draft_tokens": k,
            "alpha": alpha,
            "cost_ratio": 0.52 if drafter == "low-precision" else 0.0,
            "verify_ratio": 1.17,
            "tokens_per_round": tokens,
            "tokens_per_step": tokens,
            "cost_per_step": cost,
            "speedup_model": tokens / 1.6,
            "speedup_predicted": tokens / cost,
            "costs": {},
        }

    coarse = DRAFT | {"draft_group": 64}
    copy = other("copy", "copy", DRAFT, 4, 0.61, 1.94)
    quantised = other("low-precision 4-bit group 64", "low-precision", coarse, 2, 0.947, 2.31)
    both = other("hybrid (copy, low-precision 4-bit group 64)", "hybrid", coarse, 3, 0.88, 2.9)
    if pays:
        return [skip, quantised, copy, both]
    copy = other("copy", "copy", DRAFT, 4, None, 1.06)
    return [copy, skip, other("low-precision 4-bit group 64", "low-precision", coarse, 2, 0.41, 2.31)]


def _confirmed(candidate: dict[str, Any], ratio: float) -> dict[str, Any]:
    speedup = candidate["speedup_predicted"] * ratio
    return {
        "label": candidate["label"],
        "speedup": speedup,
        "low": speedup * 0.965,
        "spread": 0.083,
        "identical": True,
        "tokens_per_round": candidate["tokens_per_round"],
        "drafted_share": 0.973,
        "num_prompts": 6,
        "num_tokens": 384,
    }


def _domains(first: str) -> list[dict[str, Any]]:
    names = ("domain", "num_prompts", "num_tokens", "alpha", "tokens_per_round", "best", "exit_layer")
    names += ("num_draft_tokens", "speedup_best", "speedup_shared", "loss")
    rows = [
        (first, 10, 960, 0.874, 3.31, "copy", None, 4, 1.913, 1.552),
        ("chat", 9, 864, 0.692, 2.39, "layer-skip E=10", 10, 2, 1.193, 1.187),
        ("math", 8, 768, 0.815, 2.95, "layer-skip E=10", 10, 4, 1.417, 1.417),
        ("summarization", 5, 480, 0.634, 2.12, "layer-skip E=11", 11, 1, 1.081, 0.972),
    ]
    return [dict(zip(names, (*row, 1 - row[-1] / row[-2]), strict=True)) for row in rows]


def _artifact(candidate: dict[str, Any], pays: bool) -> dict[str, Any]:
    copied = ("drafter", "exit_layer", "draft", "num_draft_tokens", "alpha", "cost_ratio", "verify_ratio")
    copied += ("tokens_per_round", "speedup_model", "speedup_predicted", "costs")
    label, k, predicted = candidate["label"], candidate["num_draft_tokens"], candidate["speedup_predicted"]
    reason = f"{label} with k = {k} is predicted at ×{predicted:.2f} of plain decoding"
    return {name: candidate[name] for name in copied} | {
        "checkpoint_fingerprint": "0" * 64,
        "model_type": "llama",
        "num_layers": NUM_LAYERS,
        "enabled": pays,
        "reason": reason if pays else f"copy: nothing was drafted, so {reason}",
        "k_min": 1,
        "k_max": MAX_DRAFT_TOKENS,
        "k_policy": "cost",
        "by_context": [],
        "numerics": "exact",
        "rows": [1, 2, 3, 4, 5, 6, 7, 8, 9],
        "batch_size": 1,
        "speedup_confirmed": _confirmed(candidate, 1.04),
        "measured_on": {
            "device": "Example CPU 2000",
            "dtype": "bfloat16",
            "threads": 2,
            "torch": "2.13.0",
            "transformers": "5.24.0",
            "triton": None,
            "numba": "0.68.1",
        },
        "eval_set": {"name": "traffic.jsonl", "num_prompts": 32, "num_tokens": 3072, "temperature": 0.0},
        "regress": None,
        "schema_version": 1,
    }
