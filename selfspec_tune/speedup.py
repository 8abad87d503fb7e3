"""The textbook arithmetic of a speed-up: what acceptance and the cost of a draft step are worth. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from selfspec_tune.config import MAX_DRAFT_TOKENS


def expected_tokens(alpha: float, k: int) -> float:
    """Return E(k) = 1 + α + … + α^k, the tokens of a round if every draft token stands with probability α by itself.

    That is (1 − α^(k+1))/(1 − α) of arXiv 2211.17192, without its hole at α = 1.
    """
    return sum(alpha**power for power in range(k + 1))


def speedup_model(alpha: float, cost_ratio: float, k: int) -> float:
    """Return the textbook score E(k)/(c·k + 1) of arXiv 2211.17192: like acceptances, a verification for one step."""
    return expected_tokens(alpha, k) / (cost_ratio * k + 1)


@dataclass(frozen=True)
class Estimate:
    """The best textbook score over exits and k = 1..8, from costs that nobody measured. `sweep-exit` measures.

    Attributes:
        speedup_model: E(k)/(c·k + 1).
        exit_layer: E at which it is reached.
        num_draft_tokens: k at which it is reached.
        alpha: acceptance at that exit.
        cost_ratio: c(E) that was assumed.
    """

    speedup_model: float
    exit_layer: int
    num_draft_tokens: int
    alpha: float
    cost_ratio: float

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON object."""
        return asdict(self)


def best_estimate(alpha: Mapping[int, float], cost_ratio: Mapping[int, float]) -> Estimate:
    """Return the best score over all exits and k.

    Args:
        alpha: exit layer → acceptance probability.
        cost_ratio: exit layer → cost of a draft step in plain steps.
    """
    cells = [
        Estimate(speedup_model(accepted, cost_ratio[layer], k), layer, k, accepted, cost_ratio[layer])
        for layer, accepted in alpha.items()
        for k in range(1, MAX_DRAFT_TOKENS + 1)
    ]
    return max(cells, key=lambda cell: cell.speedup_model)


def read_cost_ratio(exit_layer: int, *, num_layers: int, layer: float, head: float, extra: float = 0.0) -> float:
    """Estimate c(E) by what is read: a step of decoding at batch size 1 takes the time its weights take to be read.

    Args:
        exit_layer: E, layers of the draft.
        num_layers: L.
        layer: weights of one layer, in any unit.
        head: weights of the LM head, which both draft and plain step read whole. It puts a floor under c.
        extra: weights a draft step reads besides, such as those of a trained exit head.
    """
    return (exit_layer * layer + extra + head) / (num_layers * layer + head)
