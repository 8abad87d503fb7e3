"""Drafters: how a model proposes tokens to itself. One file each, one small protocol.

A drafter only proposes. It may run early layers on the shared cache at positions committed.. (they are stale until the
engine commits), and says from which layer verification may resume.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from selfspec_tune.model.cache import SharedKVCache

ChooseToken = Callable[[Tensor, int], tuple[Tensor, Tensor | None]]
"""`choose(logits [B, V], offset) → (tokens [B], q [B, V] or None when greedy)`: draw the draft token at an offset."""


@dataclass(frozen=True)
class Draft:
    """What a drafter proposes for every row.

    Attributes:
        tokens: [B, k].
        probabilities: q, [B, k, V], the distributions the tokens were drawn from; None when greedy.
        hidden: [B, k + 1, d] hidden states of the last committed token and the drafted ones at `resume_layer`,
            computed by target arithmetic with their early keys and values written; None if there are none.
        resume_layer: layer from which verification runs; 0 without hidden states.
    """

    tokens: Tensor
    probabilities: Tensor | None
    hidden: Tensor | None
    resume_layer: int


class Drafter(Protocol):
    """Proposes k tokens after `last` [B], the newest token of each row, which is not in the cache yet."""

    name: str
    exit_layer: int | None

    def propose(self, last: Tensor, cache: SharedKVCache, k: int, choose: ChooseToken) -> Draft:
        """Return a draft of k ≥ 1 tokens."""
        ...
