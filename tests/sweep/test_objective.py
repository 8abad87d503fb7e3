"""Scores and compositions with numbers worked out by hand."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from selfspec_tune.speedup import expected_tokens
from selfspec_tune.sweep import objective
from selfspec_tune.sweep.objective import Cell, Costs

COSTS = Costs(
    num_layers=11,
    plain=100.0,
    one_layer={1: 8.0, 2: 9.0, 3: 10.0},
    all_layers={1: 78.0, 2: 89.0, 3: 110.0},
    embed=1.0,
    draft_head=20.0,
    verify_heads={1: 21.0, 2: 22.0, 3: 24.0},
    overhead=5.0,
)


def test_scores() -> None:
    assert objective.speedup_predicted(2.1, 0.25, 1.5, 2, 0.1) == pytest.approx(1.0)


def test_alpha_needed_undoes_the_score() -> None:
    for c, v, k in [(0.3, 1.1, 4), (0.1, 1.4, 8), (0.45, 1.0, 1)]:
        alpha = objective.alpha_needed(1.2, c, v, k)
        assert alpha is not None
        assert expected_tokens(alpha, k) / (c * k + v) == pytest.approx(1.2)
    assert objective.alpha_needed(1.0, 0.9, 1.5, 2) is None
    assert objective.alpha_needed(1.0, 0.1, 0.5, 2) == 0.0


def test_costs_are_composed_of_their_pieces() -> None:
    # A layer of 1 row costs (78 − 8)/10 = 7, of 3 rows 10.
    assert COSTS.layers(1, 1) == 8
    assert COSTS.layers(1, 4) == 8 + 3 * 7
    assert COSTS.layers(1, 11) == 78
    assert COSTS.cost_ratio(4) == pytest.approx((1 + 29 + 20) / 100)
    assert COSTS.verify_ratio(4, 2) == pytest.approx((1 + 29 + 10 + 6 * 10 + 24) / 100)
    assert COSTS.verify_ratio(4, 1) == pytest.approx((1 + 29 + 9 + 6 * 8 + 22) / 100)
    assert COSTS.head_share(4) == pytest.approx(20 / 50)
    assert COSTS.overhead_ratio == pytest.approx(0.05)
    assert COSTS.composed_over_measured == pytest.approx(1.0)


def test_the_unit_is_a_plain_step_in_the_engine() -> None:
    costs = replace(COSTS, plain_overhead=25.0)
    assert costs.step == 125
    assert costs.cost_ratio(4) == pytest.approx(50 / 125)
    assert costs.verify_ratio(4, 2) == pytest.approx(124 * 100 / 100 / 125)
    assert costs.overhead_ratio == pytest.approx(5 / 125)
    assert costs.head_share(4) == pytest.approx(20 / 50)
    assert costs.composed_over_measured == pytest.approx(1.0), "of passes alone"


def test_spread() -> None:
    assert objective.spread([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(2 / 3)
    assert objective.spread([3.0]) == objective.spread([]) == 0.0


SAMPLES = {
    "plain": [10.0, 20.0, 40.0],
    "embed": [1.0, 2.0, 4.0],
    "draft head": [2.0, 4.0, 8.0],
    "one": [3.0, 6.0, 12.0],
    "all": [5.0, 10.0, 20.0],
    "head 1": [4.0, 8.0, 16.0],
    "head 2": [5.0, 10.0, 20.0],
}
PIECES = {1: ("one", "all", "head 1"), 2: ("one", "all", "head 2")}


def sampled() -> Costs:
    return Costs.of_samples(SAMPLES, PIECES, num_layers=3, overhead=1.0, plain_overhead=2.0, context_length=64)


def test_figures_are_medians_of_the_samples() -> None:
    costs = sampled()
    assert (costs.plain, costs.embed, costs.draft_head) == (20, 2, 4)
    assert (costs.one_layer, costs.all_layers) == ({1: 6, 2: 6}, {1: 10, 2: 10})
    assert costs.verify_heads == {1: 8, 2: 10}
    assert (costs.overhead, costs.plain_overhead, costs.context_length) == (1, 2, 64)
    assert costs.spread() == pytest.approx((30 - 15) / 20)


def test_resampling_draws_whole_repeats() -> None:
    # Repeat by repeat all pieces are slower together, so a bootstrap of repeats keeps their ratios.
    costs, draw, plains = sampled(), random.Random(0), set()
    for _ in range(50):
        again = costs.resampled(draw)
        plains.add(again.plain)
        factor = again.plain / costs.plain
        assert again.embed == factor * costs.embed and again.verify_heads[2] == factor * costs.verify_heads[2]
        kept = ("overhead", "plain_overhead", "context_length", "batch_size", "num_layers")
        assert all(getattr(again, name) == getattr(costs, name) for name in kept)
    assert plains == {10, 20, 40}, "each median; missed in 1 of a million such tests"
    assert COSTS.resampled(draw) == COSTS


def test_costs_between_and_beyond_two_lengths() -> None:
    low = replace(COSTS, context_length=100, exact_over_fast=1.0)
    passes = {rows: 2 * seconds for rows, seconds in COSTS.all_layers.items()}
    high = replace(low, context_length=300, plain=200.0, all_layers=passes, exact_over_fast=2.0)
    middle = objective.between(low, high, 150)
    assert (middle.context_length, middle.plain, middle.embed) == (150, 125, 1)
    assert middle.all_layers == {rows: pytest.approx(1.25 * s) for rows, s in COSTS.all_layers.items()}
    assert middle.exact_over_fast == pytest.approx(1.25)
    assert objective.between(low, high, 500).plain == 300
    assert objective.between(low, high, 60).plain == 80
    assert objective.between(low, high, 0).plain == 50
    steep = replace(high, plain=1000.0)
    assert objective.between(low, steep, 0).plain == 50, "never below half of the smaller"
    assert objective.between(low, low, 1000) is low
    assert objective.between(low, replace(high, exact_over_fast=None), 150).exact_over_fast is None


def test_the_window_holds_its_ends() -> None:
    assert objective.exits_in((0.3, 0.8), 30) == list(range(9, 25))
    assert objective.exits_in((0.0, 1.0), 4) == [1, 2, 3]
    assert objective.exits_in((0.6, 0.6), 4) == []


def cell(**changes: float) -> Cell:
    base = Cell(4, 2, 0.4, 0.5, 1.1, 1.5, 0.8, 0.7)
    return replace(base, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "costs", "begins", "figures"),
    [
        ({"cost_ratio": 0.3}, COSTS, "α too low", ("α = 0.40", "α ≥ 0.50 would pay", "emits 1.50 tokens")),
        (
            {"cost_ratio": 0.9},
            replace(COSTS, draft_head=50.0),
            "c too high, head too large",
            ("62%", "α ≥ 0.98"),
        ),
        ({"cost_ratio": 1.2}, replace(COSTS, draft_head=2.0), "c too high: ", ("c = 1.20", "even α = 1 would not pay")),
        ({"verify_ratio": 3.2}, COSTS, "v too high", ("v = 3.20", "even α = 1 would not pay")),
    ],
)
def test_the_reason_names_what_is_to_blame(
    changes: dict[str, float], costs: Costs, begins: str, figures: tuple[str, ...]
) -> None:
    sentence = objective.why_not(cell(**changes), costs)
    assert sentence.startswith(begins)
    assert "exit 4 of 11 with k = 2" in sentence
    for figure in figures:
        assert figure in sentence, sentence
