"""How many tokens the next round drafts: a fixed k, or none once drafting has been seen not to pay."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from selfspec_tune.decode.drafters import Source

LEAST_ROUNDS = 24
"""Rounds seen before drafting is judged."""
MARGIN = 3.0
"""Standard errors by which the mean must lie below what pays: a draft that does pay is stopped about once in a
thousand runs, one that is far from paying after the first `LEAST_ROUNDS` rounds."""


@dataclass
class DraftPolicy:
    """A fixed k, watched.

    With measured costs, drafting stops for the rest of the run when its rounds emit clearly fewer tokens than plain
    decoding would have in the same time. Greedy text and text with shared noise are the same either way.

    Args:
        k: draft tokens per round; 0 decodes plainly.
        round_cost: what a round of k costs in plain steps, c·k + v; None never stops drafting.
    """

    k: int
    round_cost: float | None = None
    stopped: bool = False
    _rounds: int = 0
    _sum: float = 0.0
    _squares: float = 0.0

    def next(self, remaining: int, sources: Sequence[Source]) -> tuple[Source, int] | None:
        """Return from which source to draft how many (1 or more) tokens; None to take a plain step.

        Args:
            remaining: tokens still wanted; at most one fewer is drafted.
            sources: what the drafter offers this round.
        """
        if self.stopped or not sources:
            return None
        k = min(self.k, remaining - 1, sources[0].most)
        return (sources[0], k) if k > 0 else None

    def enough(self, source: Source, confidence: float) -> bool:
        """Whether a draft that believes so far in all its tokens with probability `confidence` should end here."""
        return False

    def observe(self, source: Source, k: int, accepted: int) -> None:
        """Learn that of k tokens drafted from `source` so many were accepted."""
        if self.round_cost is None or k != self.k or k == 0:
            return
        emitted = accepted + 1
        self._rounds += 1
        self._sum += emitted
        self._squares += emitted * emitted
        if self._rounds < LEAST_ROUNDS:
            return
        mean = self._sum / self._rounds
        deviation = math.sqrt(max(self._squares / self._rounds - mean * mean, 1 / self._rounds))
        self.stopped = mean + MARGIN * deviation / math.sqrt(self._rounds) < self.round_cost
