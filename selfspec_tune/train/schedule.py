"""What happens at which step: learning rate, dropped layers, active exits, each a function of step and generator."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from selfspec_tune.errors import UserError


def resolve_exits(exits: Sequence[float], num_layers: int) -> tuple[int, ...]:
    """Turn exits given as layer numbers (1 and above) or fractions of depth (below 1) into sorted layer numbers.

    Args:
        exits: such as `(6, 10)` or `(0.2, 0.5)`; both kinds may be mixed.
        num_layers: L, the depth of the model.

    Returns:
        Distinct exit layers, each with 1 <= E < L.

    Raises:
        UserError: none given, one out of range or not whole, or two that name the same layer.
    """
    allowed = f"layer numbers 1..{num_layers - 1}, or fractions between 0 and 1"
    if not exits:
        raise UserError("training needs at least one exit", allowed=allowed, command="--exits 0.3,0.5")
    named: dict[int, float] = {}
    for given in exits:
        layer = round(given * num_layers) if 0 < given < 1 else given
        if layer != int(layer) or not 1 <= layer < num_layers:
            raise UserError(
                f"exit {given:g} is not a layer of this {num_layers}-layer model", got=f"{given:g}", allowed=allowed
            )
        if int(layer) in named:
            raise UserError(
                f"two exits name the same layer {int(layer)}",
                got=f"{named[int(layer)]:g} and {given:g}",
                allowed=allowed,
            )
        named[int(layer)] = given
    return tuple(sorted(named))


def active_exits(
    exits: Sequence[int], exits_per_step: int, step: int, *, curriculum: str = "rotational", max_steps: int = 1
) -> tuple[int, ...]:
    """Return the exits trained at `step` (from 0), sorted: the next `exits_per_step` in rotation over those enabled.

    Both curricula are LayerSkip's (arXiv 2404.16710, section 4.2). rotational: all exits are enabled. gradual: the last
    exit is enabled from the start, and an earlier one more every T / 2n steps, so n exits all are by half of T steps:
    at step t the last min(n, 1 + floor(2 n t / T)).

    Args:
        exits: ascending exit layers.
        exits_per_step: at most so many at one step.
        step: optimiser steps done.
        curriculum: rotational or gradual.
        max_steps: T; the rotation does not look at it.
    """
    enabled = len(exits)
    if curriculum == "gradual":
        enabled = min(enabled, 1 + 2 * enabled * step // max_steps)
    last = exits[len(exits) - enabled :]
    count = min(exits_per_step, enabled)
    return tuple(sorted(last[(step * count + offset) % enabled] for offset in range(count)))


def exit_shares(exits: Sequence[int], exit_share: float, weights: str = "uniform") -> tuple[float, ...]:
    """Return the weights of the final layer's loss and of each exit's in the total; they add up to 1.

    Args:
        exits: layers of the exits active at a step.
        exit_share: what they get together; the final layer gets the rest, without exits all.
        weights: how they divide it: uniform (evenly), linear (by E) or quadratic (by E squared).
    """
    if not exits:
        return (1.0,)
    power = {"uniform": 0, "linear": 1, "quadratic": 2}[weights]
    depths = [float(layer**power) for layer in exits]
    return (1 - exit_share, *(exit_share * depth / sum(depths) for depth in depths))


def mixture_weight(alpha: float) -> float:
    """Return λ, the weight of KL against total variation, for an exit whose running acceptance is `alpha` in [0, 1].

    λ = exp(-3 α), from 1 to 0.05, as in LK losses (arXiv 2602.23881): where little is accepted, the gradient of total
    variation is weak and KL leads; where much is, total variation counts, as it is one minus the acceptance.
    """
    return math.exp(-3 * alpha)


def drop_probabilities(num_layers: int, p_max: float, schedule: str = "exponential") -> list[float]:
    """Return the dropout probability of every layer; with `p_max` 0 none is ever dropped.

    exponential: from 0 at the first layer to `p_max` at the last, p(l) = (exp(l * ln2 / (L - 1)) - 1) * p_max, as in
    LayerSkip (arXiv 2404.16710, section 4.1). uniform: `p_max` at every layer.
    """
    if schedule == "uniform":
        return [p_max] * num_layers
    if num_layers == 1:
        return [0.0]
    return [(math.exp(layer * math.log(2) / (num_layers - 1)) - 1) * p_max for layer in range(num_layers)]


def draw_dropped(probabilities: Sequence[float], generator: torch.Generator) -> frozenset[int]:
    """Draw the layers that are not run at this step; takes exactly L numbers from `generator`."""
    draws = torch.rand(len(probabilities), generator=generator).tolist()
    return frozenset(layer for layer, (draw, p) in enumerate(zip(draws, probabilities, strict=True)) if draw < p)


def learning_rate(step: int, *, peak: float, warmup_steps: int, max_steps: int) -> float:
    """Return the learning rate of `step` (from 0): linear warm-up to `peak`, then a cosine down to a tenth of it."""
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    span = max(1, max_steps - 1 - warmup_steps)
    done = min(1.0, (step - warmup_steps) / span)
    return peak * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done)))
