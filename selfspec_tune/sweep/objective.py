"""The arithmetic of a speed-up: from acceptance and costs to scores, and from a wish back to the acceptance it needs.

Costs are in units of one plain decoding step. Pure functions of numbers: this module imports no torch and measures
nothing.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from statistics import median, quantiles
from typing import Any

from selfspec_tune.speedup import expected_tokens

HOPELESS_ALPHA = 0.95
"""Where a draft would have to be accepted more often than this, its cost is to blame, not its quality."""
WISH = 1.2
"""The speed-up for which the α needed is shown."""
LARGE_HEAD = 0.3
"""Share of a draft step from which the head is named as the reason for its cost."""


@dataclass(frozen=True)
class Costs:
    """Measured pieces at one context length and batch size, in seconds, and what is composed from them.

    Attributes:
        num_layers: L.
        plain: a plain step's passes, measured as a whole.
        one_layer, all_layers: rows per sequence → a pass over one layer, and over all L.
        embed: embedding one token.
        draft_head: final norm, head and choice of a draft token.
        verify_heads: rows → final norm, head and acceptance.
        overhead: what the engine spends on a round outside draft and verification.
        plain_overhead: what it spends on a plain step besides.
        exact_over_fast: price of a plain step in exact numerics over one in fast; None where exact is not certified.
        samples: piece → seconds of each repeat, of which the figures above are medians.
        pieces: rows per sequence → names of their passes in `samples`, (one layer, all layers, verify head).
        context_length, batch_size: what they were measured at.
    """

    num_layers: int
    plain: float
    one_layer: Mapping[int, float]
    all_layers: Mapping[int, float]
    embed: float
    draft_head: float
    verify_heads: Mapping[int, float]
    overhead: float = 0.0
    plain_overhead: float = 0.0
    exact_over_fast: float | None = None
    samples: Mapping[str, Sequence[float]] = field(default_factory=dict)
    pieces: Mapping[int, tuple[str, str, str]] = field(default_factory=dict)
    context_length: int = 0
    batch_size: int = 1

    @classmethod
    def of_samples(
        cls,
        samples: Mapping[str, Sequence[float]],
        pieces: Mapping[int, tuple[str, str, str]],
        *,
        num_layers: int,
        **others: Any,
    ) -> Costs:
        """Take medians; `samples` holds "plain", "embed", "draft head" and the names in `pieces`."""
        middle = {name: median(values) for name, values in samples.items()}
        one, all_, heads = ({rows: middle[names[part]] for rows, names in pieces.items()} for part in range(3))
        return cls(
            num_layers,
            middle["plain"],
            one,
            all_,
            middle["embed"],
            middle["draft head"],
            heads,
            samples=samples,
            pieces=pieces,
            **others,
        )

    def resampled(self, draw: random.Random) -> Costs:
        """Return the costs that a bootstrap over the repeats gives: whole repeats are drawn again."""
        count = len(next(iter(self.samples.values()), ()))
        if count < 2:
            return self
        taken = draw.choices(range(count), k=count)
        others = {"overhead", "plain_overhead", "exact_over_fast", "context_length", "batch_size"}
        return Costs.of_samples(
            {name: [values[index] for index in taken] for name, values in self.samples.items()},
            self.pieces,
            num_layers=self.num_layers,
            **{name: getattr(self, name) for name in others},
        )

    @property
    def step(self) -> float:
        """Seconds of a plain step in the engine: the unit of all ratios."""
        return self.plain + self.plain_overhead

    def spread(self, piece: str = "plain") -> float:
        """Return the interquartile range over the median of a piece's repeats; 0 where there are too few."""
        return spread(self.samples.get(piece, ()))

    def layers(self, rows: int, count: int) -> float:
        """Return the seconds of one pass of `rows` rows over `count` ≥ 1 layers."""
        one, all_ = self.one_layer[rows], self.all_layers[rows]
        return one + (all_ - one) * (count - 1) / max(1, self.num_layers - 1)

    def cost_ratio(self, exit_layer: int) -> float:
        """Return c(E): layers 0..E on one token, norm, head and choice, over a plain step."""
        return (self.embed + self.layers(1, exit_layer) + self.draft_head) / self.step

    def verify_ratio(self, exit_layer: int, k: int) -> float:
        """Return v(E, k): the last early pass, layers E..L on k + 1 rows, head and acceptance, over a plain step."""
        early = self.embed + self.layers(1, exit_layer)
        late = self.layers(k + 1, self.num_layers - exit_layer)
        return (early + late + self.verify_heads[k + 1]) / self.step

    @property
    def overhead_ratio(self) -> float:
        """o: a round's overhead over a plain step."""
        return self.overhead / self.step

    def head_share(self, exit_layer: int) -> float:
        """Return the part of a draft step, 0..1, that norm, head and choice take."""
        return self.draft_head / (self.cost_ratio(exit_layer) * self.step)

    @property
    def composed_over_measured(self) -> float:
        """A plain step composed from its pieces over the one measured whole; far from 1: a noisy machine."""
        return (self.embed + self.all_layers[1] + self.verify_heads[1]) / self.plain


def spread(values: Sequence[float]) -> float:
    """Return the interquartile range over the median; 0 for fewer than two values."""
    if len(values) < 2:
        return 0.0
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return (high - low) / middle


def between(low: Costs, high: Costs, context_length: float) -> Costs:
    """Return costs at a context length between two measured ones: a pass grows linearly with what attention reads.

    Below the shortest and beyond the longest measured length the nearest line goes on, but never below half of it.
    """
    if low.context_length == high.context_length:
        return low
    share = (context_length - low.context_length) / (high.context_length - low.context_length)

    def mixed(a: Any, b: Any) -> Any:
        if isinstance(a, Mapping):
            return {key: mixed(value, b[key]) for key, value in a.items()}
        return None if a is None or b is None else max(a + (b - a) * share, min(a, b) / 2)

    names = {f.name for f in fields(Costs)} - {"num_layers", "samples", "pieces", "batch_size", "context_length"}
    values = {name: mixed(getattr(low, name), getattr(high, name)) for name in names}
    near = low if share < 0.5 else high
    return replace(near, **values, context_length=round(context_length))


@dataclass(frozen=True)
class Cell:
    """One exit layer and one k, with what they are expected to bring.

    Attributes:
        interval: 95 % interval of `speedup_predicted`, over prompts and over repeats of the cost measurement.
    """

    exit_layer: int
    num_draft_tokens: int
    alpha: float
    cost_ratio: float
    verify_ratio: float
    tokens_per_round: float
    speedup_model: float
    speedup_predicted: float
    interval: tuple[float, float] = (0.0, float("inf"))


def speedup_predicted(
    tokens_per_round: float, cost_ratio: float, verify_ratio: float, k: int, overhead_ratio: float = 0.0
) -> float:
    """Return τ/(c·k + v + o): tokens of a round over the plain steps it costs."""
    return tokens_per_round / (cost_ratio * k + verify_ratio + overhead_ratio)


def alpha_needed(speedup: float, cost_ratio: float, verify_ratio: float, k: int) -> float | None:
    """Return the smallest α whose E(k) reaches `speedup`·(c·k + v); None where even α = 1 does not.

    Args:
        speedup: the wish, such as 1.0 to break even.
        verify_ratio: v; add o to it to count a round's overhead.
    """
    wanted = speedup * (cost_ratio * k + verify_ratio)
    if wanted <= 1:
        return 0.0
    if wanted > k + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(60):  # halved to the last bit of a double
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens(middle, k) < wanted else (low, middle)
    return high


def exits_in(window: tuple[float, float], num_layers: int) -> list[int]:
    """Return the exit layers E whose depth E/L lies in `window`, ends included."""
    low, high = window
    margin = 1e-9  # 0.3 · 30 is not 9 in floating point
    return [e for e in range(1, num_layers) if low - margin <= e / num_layers <= high + margin]


def why_not(cell: Cell, costs: Costs) -> str:
    """Return a sentence saying what keeps a cell from paying: α too low, or which of its costs is too high."""
    exit_layer, num_layers, k = cell.exit_layer, costs.num_layers, cell.num_draft_tokens
    c, v = cell.cost_ratio, cell.verify_ratio
    needed = alpha_needed(1.0, c, v + costs.overhead_ratio, k)
    figures = (
        f"at exit {exit_layer} of {num_layers} with k = {k} a round costs {c * k + v + costs.overhead_ratio:.2f} plain "
        f"steps (c = {c:.2f}, v = {v:.2f}) and emits {cell.tokens_per_round:.2f} tokens (α = {cell.alpha:.2f}"
    )
    figures += "; even α = 1 would not pay)" if needed is None else f"; α ≥ {needed:.2f} would pay)"
    if needed is not None and needed <= HOPELESS_ALPHA:
        return f"α too low: {figures}"
    # Without head and padding a draft step would cost E/L and a verification 1: what is above that is to blame.
    if v - 1 > k * (c - exit_layer / num_layers):
        return f"v too high: {figures}"
    head_share = costs.head_share(exit_layer)
    if head_share > LARGE_HEAD:
        return f"c too high, head too large: {figures}; the head takes {head_share:.0%} of a draft step"
    return f"c too high: {figures}; its layers alone would be c = {exit_layer / num_layers:.2f}"
