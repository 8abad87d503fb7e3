"""What ends a run or turns it back: numbers that are not finite, and perplexity beyond the budget. Imports no torch."""

from __future__ import annotations

import math
from typing import Any

from selfspec_tune.config import TrainConfig

MAX_LOWERED = 4
"""Times that the exits' share is halved; if perplexity is still beyond the budget then, something else raises it."""
STOPPED = {
    "max_steps": "all steps are done",
    "max_minutes": "the time is up",
    "max_perplexity_increase": "perplexity rose beyond the budget",
    "diverged": "the loss or its gradient was not finite",
}
"""Values of `stopped_by` in a run's facts, in words."""


class Diverged(Exception):
    """The loss or the norm of its gradient is not finite at a step; the weights are those before it."""


def check_finite(loss: float, gradient_norm: float, step: int) -> None:
    """Raise Diverged unless both are finite.

    Args:
        loss: of the step, the same on all ranks.
        gradient_norm: before it is clipped.
        step: from 1.
    """
    for name, value in (("loss", loss), ("norm of the gradient", gradient_norm)):
        if not math.isfinite(value):
            raise Diverged(f"the {name} is {value} at step {step}")


def keeps_base(config: TrainConfig) -> tuple[int, ...]:
    """Return the step of the base if its trained weights must be kept beside the best ones, to go back towards them."""
    back = config.over_budget == "lower" or (config.over_budget == "shrink" and not config.lora_rank)
    return (0,) if back else ()


def increases(before: dict[str, Any], now: dict[str, Any]) -> dict[str, float]:
    """Return, for each text of two evaluations, by which share full-depth perplexity rose over the base (0.02: 2 %)."""
    names = {"held_out": "perplexity", "general": "general_perplexity"}
    return {text: now[name] / before[name] - 1 for text, name in names.items() if name in before}


def beyond(rises: dict[str, float], budget: float) -> list[str]:
    """Return the texts whose perplexity rose by more than the budget; one that is no number did."""
    return [text for text, rise in rises.items() if not rise <= budget]


def better(record: dict[str, Any], best: dict[str, Any] | None) -> bool:
    """Whether an evaluation's estimated speed-up is at least that of the best so far; None is no best yet."""
    return best is None or score(record) >= score(best)


def score(record: dict[str, Any]) -> float:
    """Return the estimated speed-up of an evaluation."""
    estimated: float = record["speedup_estimate"]["speedup_model"]
    return estimated
