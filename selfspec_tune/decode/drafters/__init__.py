"""Drafters: how a model proposes tokens to itself. One file each, one small protocol.

A drafter only proposes. It may run layers on the shared cache at positions committed.. (they are stale until the engine
commits), and says from which layer verification may resume. Whether to draft, and how many tokens, the policy decides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from selfspec_tune.config import MAX_DRAFT_TOKENS
from selfspec_tune.model.cache import SharedKVCache

ChooseToken = Callable[[Tensor, int], tuple[Tensor, Tensor | None]]
"""`choose(logits [B, V], offset) → (tokens [B], q [B, V] or None when greedy)`: draw the draft token at an offset."""

Enough = Callable[[], bool]
"""Asked after every drafted token: whether the draft's own confidence says that a further one would not pay."""


def never() -> bool:
    """Draft all k tokens."""
    return False


@dataclass(frozen=True)
class Source:
    """What a drafter could do in the coming round.

    Attributes:
        drafter: name of the drafter, which knows its costs.
        quality: which of its proposals are alike, for statistics of acceptance; "" where all are.
        most: tokens it can propose at most.
    """

    drafter: str
    quality: str = ""
    most: int = MAX_DRAFT_TOKENS


@dataclass(frozen=True)
class Draft:
    """What a drafter proposes for every row.

    Attributes:
        tokens: [B, k], k at least 1 and at most what was asked for.
        probabilities: q, [B, k, V], the distributions the tokens were drawn from; None when greedy, and for tokens that
            were not drawn but given (copied): then q is one at the token.
        hidden: [B, k + 1, d] hidden states of the last committed token and the drafted ones at `resume_layer`,
            computed by target arithmetic with their early keys and values written; None if there are none.
        resume_layer: layer from which verification runs; 0 without hidden states.
    """

    tokens: Tensor
    probabilities: Tensor | None
    hidden: Tensor | None
    resume_layer: int


class Drafter:
    """Proposes tokens after `last` [B], the newest token of each row, which is not in the cache yet."""

    name: str = ""
    exit_layer: int | None = None
    reads_text: bool = True
    """Whether it must know what was emitted (`extend`) before it drafts again; else rounds may be launched ahead."""
    copies: bool = False
    """Whether it proposes on the host, without choosing tokens from logits, so that the rest of a round is recorded."""

    @property
    def num_bytes(self) -> int:
        """Memory of weights that only the draft has."""
        return 0

    @property
    def remarks(self) -> list[str]:
        """Lines for the user about how it drafts on this machine."""
        return []

    def start(self, texts: list[list[int]]) -> None:
        """Begin new requests: the prompt of each row. Rows of an unfilled batch are missing."""

    def extend(self, row: int, tokens: list[int]) -> None:
        """Learn the tokens that a row emitted."""

    def use_exit(self, exit_layer: int) -> None:
        """Leave at another layer from the next round on, where the drafter is layer skip."""

    def parts(self) -> list[Drafter]:
        """Return the drafters whose costs are to be known."""
        return [self]

    def part(self, source: Source) -> Drafter:
        """Return the drafter that a source of this one's is of."""
        return self

    def sources(self) -> list[Source]:
        """Return what could be drafted in the coming round; empty if nothing."""
        return [Source(self.name)]

    def propose(
        self, last: Tensor, cache: SharedKVCache, k: int, choose: ChooseToken, source: Source, enough: Enough = never
    ) -> Draft:
        """Return a draft of 1 to k tokens from one of `sources()`; fewer than k only if `enough()`."""
        raise NotImplementedError
