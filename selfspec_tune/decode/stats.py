"""What a run of the decoder did and how long it took: the numbers of `decode --json`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any

SUMMED = (
    "prefill_seconds",
    "draft_seconds",
    "verify_seconds",
    "plain_seconds",
    "passes",
    "total_seconds",
    "rounds",
    "drafted",
    "accepted",
    "emitted",
    "from_prefill",
    "tested",
    "rounds_of",
    "plain_steps",
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
    # Passes of plain steps.
    plain_seconds: float = 0.0
    # Rounds and plain steps of the batch; `rounds` and `plain_steps` count rows.
    passes: int = 0
    total_seconds: float = 0.0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    # First tokens, which cost prefill time and no decoding time.
    from_prefill: int = 0
    # Of the draft tokens that were tested (all before them in their round stood), how many stood.
    tested: int = 0
    rounds_of: Counter[tuple[str, int, int]] = field(default_factory=Counter)
    """Rounds by drafter (of a hybrid: the part that drafted), tokens drafted, and tokens accepted."""
    plain_steps: int = 0
    """Steps of a row without a draft."""

    def count_round(self, drafter: str, k: int, accepted: int) -> None:
        """Count one row's round of k tokens drafted by a drafter."""
        self.rounds_of[drafter, k, accepted] += 1
        self.rounds += 1
        self.drafted += k
        self.accepted += accepted
        self.tested += min(k, accepted + 1)

    def counts(self) -> dict[str, Any]:
        """Return the counts without seconds and settings, as a JSON object."""
        rounds = [[*key, count] for key, count in sorted(self.rounds_of.items())]
        names = ("plain_steps", "emitted", "from_prefill")
        return {"rounds_of": rounds, **{name: getattr(self, name) for name in names}}

    @classmethod
    def of_counts(cls, counts: dict[str, Any]) -> Stats:
        """Return what `counts` was taken from."""
        stats = cls(**{name: value for name, value in counts.items() if name != "rounds_of"})
        for drafter, k, accepted, count in counts["rounds_of"]:
            for _ in range(count):
                stats.count_round(drafter, k, accepted)
        return stats

    def add(self, other: Stats) -> None:
        """Add another run's counts and seconds; its settings replace these."""
        for item in fields(self):
            theirs = getattr(other, item.name)
            setattr(self, item.name, getattr(self, item.name) + theirs if item.name in SUMMED else theirs)

    @property
    def alpha(self) -> float | None:
        """Probability that a tested draft token stands; None before any was tested."""
        return self.accepted / self.tested if self.tested else None

    def part(self, drafter: str) -> Stats:
        """Return the counts of one drafter's rounds alone."""
        part = Stats(drafter=drafter)
        for (name, k, accepted), count in self.rounds_of.items():
            if name == drafter:
                part.rounds, part.drafted = part.rounds + count, part.drafted + count * k
                part.accepted, part.tested = (
                    part.accepted + count * accepted,
                    part.tested + count * min(k, accepted + 1),
                )
        return part

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
            "by_drafter": {
                name: {"rounds": part.rounds, "drafted": part.drafted, "accepted": part.accepted, "alpha": part.alpha}
                for name in sorted({name for name, _, _ in self.rounds_of})
                for part in [self.part(name)]
            },
            "drafter": self.drafter,
            "exit_layer": self.exit_layer,
            "num_draft_tokens": self.num_draft_tokens,
            "numerics": self.numerics,
            "enabled": self.enabled,
            "reason": self.reason,
        }
