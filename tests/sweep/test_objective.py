"""Scores and compositions with numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

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


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.9, 0.999999])
@pytest.mark.parametrize("k", [1, 4, 8])
def test_expected_tokens_is_the_closed_form(alpha: float, k: int) -> None:
    assert objective.expected_tokens(alpha, k) == pytest.approx((1 - alpha ** (k + 1)) / (1 - alpha), rel=1e-9)
    assert objective.expected_tokens(1.0, k) == k + 1


def test_scores() -> None:
    assert objective.speedup_model(0.5, 0.25, 2) == pytest.approx(1.75 / 1.5)
    assert objective.speedup_predicted(2.1, 0.25, 1.5, 2, 0.1) == pytest.approx(1.0)


def test_alpha_needed_undoes_the_score() -> None:
    for c, v, k in [(0.3, 1.1, 4), (0.1, 1.4, 8), (0.45, 1.0, 1)]:
        alpha = objective.alpha_needed(1.2, c, v, k)
        assert alpha is not None
        assert objective.expected_tokens(alpha, k) / (c * k + v) == pytest.approx(1.2)
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
