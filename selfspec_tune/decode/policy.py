"""How many tokens the next round drafts: a fixed k, or none once drafting has been seen not to pay."""

from __future__ import annotations

from dataclasses import dataclass

PROBE_ROUNDS = 24
"""Rounds looked at before a request's drafting is judged."""


@dataclass
class DraftPolicy:
    """A fixed k, watched.

    With measured costs, drafting stops for the rest of the text when the last `PROBE_ROUNDS` rounds emitted fewer
    tokens than plain decoding would have in the same time. Stopping never changes the text.

    Args:
        k: draft tokens per round; 0 decodes plainly.
        round_cost: what a round of k costs in plain steps, c·k + v + o; None never stops drafting.
    """

    k: int
    round_cost: float | None = None
    stopped: bool = False
    _rounds: int = 0
    _emitted: int = 0

    def next(self, remaining: int) -> int:
        """Return how many tokens to draft when `remaining` more tokens are wanted."""
        return 0 if self.stopped else max(0, min(self.k, remaining - 1))

    def observe(self, k: int, accepted: int) -> None:
        """Learn that a round of k draft tokens accepted so many."""
        if self.round_cost is None or k != self.k or k == 0:
            return
        self._rounds += 1
        self._emitted += accepted + 1
        if self._rounds == PROBE_ROUNDS:
            self.stopped = self._emitted < self.round_cost * self._rounds
            self._rounds = self._emitted = 0
