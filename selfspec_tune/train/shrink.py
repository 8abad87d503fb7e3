"""Taking back a part of what was trained, until perplexity is within its budget: interpolation with the base.

Between a model and its fine-tuned self, interpolated weights often keep most of what was learnt and lose little of what
was known (arXiv 2109.01903). Acceptance falls slowly towards the base and perplexity quickly, so the largest share
within the budget is looked for by halving the interval.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from selfspec_tune.train.lora import starts_at_zero

HALVINGS = 5
"""Evaluations spent on the search; the share kept is a multiple of 1 / 2**5."""

Weights = dict[str, torch.Tensor]


def interpolated(base: Weights | None, trained: Weights, share: float) -> Weights:
    """Return weights between the base (share 0) and those trained (1).

    Args:
        base: the same names at the start of the run. None for adapters: one of an adapter's two factors starts at zero,
            and scaling it interpolates the merged weights.
        trained: name → tensor.
        share: in [0, 1].
    """
    if base is None:
        return {name: weight * share if starts_at_zero(name) else weight for name, weight in trained.items()}
    return {name: torch.lerp(base[name].to(weight), weight, share) for name, weight in trained.items()}


def largest_share(
    measure: Callable[[float], dict[str, Any]], within: Callable[[dict[str, Any]], bool]
) -> tuple[float, dict[str, Any]] | None:
    """Return the largest share found within the budget and its evaluation; None if none was.

    Args:
        measure: share → evaluation of the weights there. Share 1 is known to be beyond the budget.
        within: whether an evaluation is within the budget.
    """
    low, high, found = 0.0, 1.0, None
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        record = measure(middle)
        if within(record):
            low, found = middle, (middle, record)
        else:
            high = middle
    return found
