"""Acceptance counted prompt by prompt, summed over prompts, and how sure the sums are. Knows no model and no costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from selfspec_tune.bootstrap import widening

RESAMPLES, SEED, COVERAGE = 400, 0, 0.95
"""Bootstrap of the intervals: resamples, seed, and the share of them inside."""


@dataclass(frozen=True)
class PromptTally:
    """What one prompt's continuation says of every exit; lists over exits run from 1 to L − 1.

    Attributes:
        domain: of the prompt; "" where records name none.
        context: mean live cache length over the positions profiled.
        positions: tokens that could have been drafted.
        accepted: by exit, the summed probabilities that the draft of a token stands.
        rounds, tokens: by k (from 1) and exit, expected rounds and the tokens they emit.
        own: summed over positions, whether the head agrees with the token decoded behind the *last* layer.
    """

    prompt: str
    domain: str
    num_tokens: int
    context: float
    positions: int
    accepted: list[float]
    rounds: list[list[float]]
    tokens: list[list[float]]
    own: float
    generate_seconds: float = 0.0
    profile_seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON object, which `PromptTally(**…)` reads."""
        return asdict(self)


@dataclass(frozen=True)
class Profile:
    """Acceptance on a set of prompts.

    Attributes:
        num_layers: L; exits are 1..L − 1.
        tallies: one per prompt.
    """

    num_layers: int
    tallies: Sequence[PromptTally]

    @property
    def num_prompts(self) -> int:
        """Prompts profiled."""
        return len(self.tallies)

    @property
    def num_tokens(self) -> int:
        """Tokens of their continuations."""
        return sum(tally.num_tokens for tally in self.tallies)

    @property
    def positions(self) -> int:
        """Tokens that could have been drafted."""
        return sum(tally.positions for tally in self.tallies)

    @property
    def context(self) -> float:
        """Mean live cache length while they were decoded, in tokens."""
        return sum(tally.context * tally.positions for tally in self.tallies) / max(1, self.positions)

    @property
    def longest(self) -> int:
        """The longest text profiled, prompt included, in tokens."""
        return max(round(tally.context + tally.positions / 2) + 1 for tally in self.tallies)

    @property
    def own(self) -> float:
        """Share of the tokens decoded that the profile's head chooses behind the last layer; 1 but for rounding."""
        return sum(tally.own for tally in self.tallies) / max(1, self.positions)

    @property
    def generate_seconds(self) -> float:
        """Seconds of generating the continuations."""
        return sum(tally.generate_seconds for tally in self.tallies)

    @property
    def profile_seconds(self) -> float:
        """Seconds of profiling them, generating not counted."""
        return sum(tally.profile_seconds for tally in self.tallies)

    @cached_property
    def alpha(self) -> dict[int, float]:
        """Exit layer → mean acceptance probability of a draft token."""
        return _by_exit(self._sums(_once(self))[0][0].tolist())

    @cached_property
    def tokens_per_round(self) -> dict[tuple[int, int], float]:
        """(exit layer, k) → mean tokens emitted per round."""
        return _by_cell(self._sums(_once(self))[1][0].tolist())

    def of_domain(self, domain: str) -> Profile:
        """Return the profile of one domain's prompts."""
        return Profile(self.num_layers, [tally for tally in self.tallies if tally.domain == domain])

    @property
    def domains(self) -> list[str]:
        """Domains that prompts name, sorted."""
        return sorted({tally.domain for tally in self.tallies} - {""})

    def alpha_intervals(self) -> dict[int, tuple[float, float]]:
        """Exit layer → `COVERAGE` interval of α: prompts are drawn again, as tokens of one text are not independent."""
        samples = self._sums(_resampled(self))[0]
        return {
            exit_layer: clipped(interval(values, self.alpha[exit_layer], self.num_prompts), 0.0, 1.0)
            for exit_layer, values in _by_exit(samples.T.tolist()).items()
        }

    def tokens_samples(self) -> dict[tuple[int, int], list[float]]:
        """(exit layer, k) → τ of `RESAMPLES` resamples of the prompts, the same resamples for every cell."""
        samples = self._sums(_resampled(self))[1]
        return _by_cell(samples.permute(1, 2, 0).tolist())

    def _sums(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return α [R, X] and τ [R, K, X] of prompts weighted by [R, P]."""
        positions = torch.tensor([tally.positions for tally in self.tallies], dtype=torch.float64)
        accepted, rounds, tokens = (
            torch.tensor([getattr(tally, name) for tally in self.tallies], dtype=torch.float64)
            for name in ("accepted", "rounds", "tokens")
        )
        alpha = (weights @ accepted) / (weights @ positions)[:, None]
        return alpha, torch.einsum("rp,pkx->rkx", weights, tokens) / torch.einsum("rp,pkx->rkx", weights, rounds)


def interval(values: Sequence[float], centre: float, units: int) -> tuple[float, float]:
    """Return the range that holds the middle `COVERAGE` of bootstrap samples, widened as they come from few units.

    A single unit says nothing of its spread: then there are no bounds.
    """
    if units < 2:
        return -math.inf, math.inf
    ordered = sorted(values)
    outside, wider = int(len(ordered) * (1 - COVERAGE) / 2), widening(units)
    return centre + wider * (ordered[outside] - centre), centre + wider * (ordered[-1 - outside] - centre)


def clipped(bounds: tuple[float, float], least: float, most: float) -> tuple[float, float]:
    """Return bounds cut to what is possible."""
    return min(max(bounds[0], least), most), min(max(bounds[1], least), most)


def _once(profile: Profile) -> Tensor:
    return torch.ones(1, profile.num_prompts, dtype=torch.float64)


def _resampled(profile: Profile) -> Tensor:
    """Return how often each prompt is drawn, [RESAMPLES, P]."""
    count = profile.num_prompts
    generator = torch.Generator().manual_seed(SEED)
    drawn = torch.randint(count, (RESAMPLES, count), generator=generator)
    weights = torch.zeros(RESAMPLES, count, dtype=torch.float64)
    return weights.scatter_add_(1, drawn, torch.ones_like(weights))


def _by_exit(values: Sequence[Any]) -> dict[int, Any]:
    return {index + 1: value for index, value in enumerate(values)}


def _by_cell(values: Sequence[Sequence[Any]]) -> dict[tuple[int, int], Any]:
    return {(index + 1, k + 1): value for k, row in enumerate(values) for index, value in enumerate(row)}
