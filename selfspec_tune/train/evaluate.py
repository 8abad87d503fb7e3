"""What an evaluation measures: full-depth perplexity on one text or two, alpha per exit, and what that may be worth."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from selfspec_tune.errors import UserError
from selfspec_tune.progress import Progress
from selfspec_tune.speedup import best_estimate, read_cost_ratio
from selfspec_tune.train.data import Sequences

HELD_OUT, GENERAL = "held_out", "general"
"""The two texts, as records name them."""


@dataclass(frozen=True)
class Evaluator:
    """Measures a module; every rank reads all sequences, so every rank knows the result.

    Attributes:
        held_out: sequences of the domain trained on.
        general: sequences of general text; None where there are none.
        exits: exit layers.
        cost_ratio: exit layer → c(E), assumed.
        batch_size: sequences per forward pass.
        device: that of the module.
        progress: called with ("evaluate", done, total).
    """

    held_out: Sequences
    general: Sequences | None
    exits: tuple[int, ...]
    cost_ratio: dict[int, float]
    batch_size: int
    device: torch.device
    progress: Progress

    def measure(self, module: Any) -> dict[str, Any]:
        """Return a JSON object: perplexity {text: value}, alpha {exit: value} on held-out text, speedup_estimate.

        Alpha is the share of positions where an exit's first choice is the final layer's. The estimate is the best
        textbook score over exits and k, with costs that are assumed; `sweep-exit` measures.

        Raises:
            UserError: a text has no token to predict.
        """
        held_out, general = self.held_out, self.general
        total = len(held_out) + (0 if general is None else len(general))
        tokens, nll, *agreed = self._count(module, held_out, self.exits, 0, total)
        alpha = {layer: count / tokens for layer, count in zip(self.exits, agreed, strict=True)}
        perplexity = {HELD_OUT: _perplexity(nll, tokens)}
        if general is not None:
            tokens, nll = self._count(module, general, (), len(held_out), total)
            perplexity[GENERAL] = _perplexity(nll, tokens)
        return {
            "perplexity": perplexity[HELD_OUT],
            **({"general_perplexity": perplexity[GENERAL]} if general is not None else {}),
            "alpha": {str(layer): value for layer, value in alpha.items()},
            "speedup_estimate": best_estimate(alpha, self.cost_ratio).to_dict(),
        }

    @torch.no_grad()
    def _count(self, module: Any, data: Sequences, exits: tuple[int, ...], before: int, total: int) -> list[float]:
        """Return tokens, summed negative log-likelihood and per exit the positions agreed on."""
        from accelerate.utils import broadcast

        counts = torch.zeros(2 + len(exits), dtype=torch.float64, device=self.device)
        was_training = module.training
        module.eval()
        for start in range(0, len(data), self.batch_size):
            rows = list(range(start, min(start + self.batch_size, len(data))))
            ids, counted, *states = [tensor.to(self.device) for tensor in data.read(rows)]
            counts += module(ids, counted, exits, frozenset(), *states)[0]
            self.progress("evaluate", before + rows[-1] + 1, total)
        module.train(was_training)
        # Ranks may differ in the last bit, and what follows from the counts all must do alike.
        values: list[float] = broadcast(counts).tolist()
        if not values[0]:
            what = "general" if data is self.general else "held-out"
            raise UserError(f"the {what} data have no token to predict", got="prompts only")
        return values


def assumed_costs(model: Any, exits: tuple[int, ...], *, extra_layers: int = 0) -> dict[int, float]:
    """Return exit layer → c(E), estimated from the weights that a step of decoding reads.

    Args:
        model: the transformers model as it will be decoded, whole, without adapters.
        exits: exit layers.
        extra_layers: layers that a draft step runs besides, such as the one of a trained exit head.
    """
    layers = model.model.layers
    layer = sum(parameter.numel() for parameter in layers.parameters()) / len(layers)
    head = model.lm_head.weight.numel()
    return {
        exit_layer: read_cost_ratio(
            exit_layer, num_layers=len(layers), layer=layer, head=head, extra=extra_layers * layer
        )
        for exit_layer in exits
    }


def _perplexity(nll: float, tokens: float) -> float:
    return math.exp(min(nll / tokens, 700.0))
