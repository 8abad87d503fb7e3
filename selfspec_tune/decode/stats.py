"""What a run of the decoder did and how long it took: the numbers of `decode --json`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

SUMMED = (
    "prefill_seconds",
    "draft_seconds",
    "verify_seconds",
    "total_seconds",
    "rounds",
    "drafted",
    "accepted",
    "emitted",
    "from_prefill",
    "tested",
)


@dataclass
class Stats:
    """Counts and seconds of one or more requests; names as in the README's glossary."""

    drafter: str | None = None
    exit_layer: int | None = None
    num_draft_tokens: int = 0
    numerics: str = "exact"
    enabled: bool = False
    reason: str = ""
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    total_seconds: float = 0.0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    # First tokens, which cost prefill time and no decoding time.
    from_prefill: int = 0
    # Of the draft tokens that were tested (all before them in their round stood), how many stood.
    tested: int = 0

    def count_round(self, k: int, accepted: int) -> None:
        """Count one row's round of k drafted tokens."""
        self.rounds += 1
        self.drafted += k
        self.accepted += accepted
        self.tested += min(k, accepted + 1)

    def add(self, other: Stats) -> None:
        """Add another run's counts and seconds; its settings replace these."""
        for item in fields(self):
            theirs = getattr(other, item.name)
            setattr(self, item.name, getattr(self, item.name) + theirs if item.name in SUMMED else theirs)

    @property
    def alpha(self) -> float | None:
        """Probability that a tested draft token stands; None before any was tested."""
        return self.accepted / self.tested if self.tested else None

    def to_dict(self) -> dict[str, Any]:
        """Return the statistics as one JSON object."""
        decode_seconds, decoded = self.total_seconds - self.prefill_seconds, self.emitted - self.from_prefill
        return {
            "tokens_per_second": round(decoded / decode_seconds, 2) if decoded > 0 else None,
            "prefill_seconds": round(self.prefill_seconds, 4),
            "draft_seconds": round(self.draft_seconds, 4),
            "verify_seconds": round(self.verify_seconds, 4),
            "rounds": self.rounds,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "emitted": self.emitted,
            "alpha": self.alpha,
            "accepted_fraction": self.accepted / self.drafted if self.drafted else None,
            "tokens_per_round": (self.accepted + self.rounds) / self.rounds if self.rounds else None,
            "drafter": self.drafter,
            "exit_layer": self.exit_layer,
            "num_draft_tokens": self.num_draft_tokens,
            "numerics": self.numerics,
            "enabled": self.enabled,
            "reason": self.reason,
        }
