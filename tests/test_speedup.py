"""The textbook score, its best cell, and the cost that is estimated from what a step reads."""

from __future__ import annotations

import pytest

from selfspec_tune.speedup import best_estimate, expected_tokens, read_cost_ratio, speedup_model


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.9, 0.999999])
@pytest.mark.parametrize("k", [1, 4, 8])
def test_expected_tokens_is_the_closed_form(alpha: float, k: int) -> None:
    assert expected_tokens(alpha, k) == pytest.approx((1 - alpha ** (k + 1)) / (1 - alpha), rel=1e-9)
    assert expected_tokens(1.0, k) == k + 1


def test_the_score() -> None:
    assert speedup_model(0.5, 0.25, 2) == pytest.approx(1.75 / 1.5)


def test_the_best_of_all_exits_and_k_is_found() -> None:
    # Worked out: at c = 0.5 and α = 0.9 k = 1: 1.9/1.5, 2: 2.71/2, 3: 3.439/2.5, 4: 4.0951/3, ... k = 3 is the best.
    best = best_estimate({3: 0.1, 5: 0.9}, {3: 0.3, 5: 0.5})
    assert (best.exit_layer, best.num_draft_tokens, best.alpha, best.cost_ratio) == (5, 3, 0.9, 0.5)
    assert best.speedup_model == pytest.approx(3.439 / 2.5)
    # A cheaper exit with the same α is better, and a draft that is nearly free is as long as it may be.
    assert best_estimate({3: 0.9, 5: 0.9}, {3: 0.3, 5: 0.5}).exit_layer == 3
    assert best_estimate({3: 0.9}, {3: 0.001}).num_draft_tokens == 8


def test_the_cost_of_a_draft_step_counts_layers_and_head() -> None:
    assert read_cost_ratio(1, num_layers=4, layer=10.0, head=0.0) == 0.25
    assert read_cost_ratio(1, num_layers=4, layer=10.0, head=40.0) == pytest.approx(50 / 80)
    assert read_cost_ratio(1, num_layers=4, layer=10.0, head=40.0, extra=10.0) == pytest.approx(60 / 80)
    # The design's example: SmolLM2-135M, whose head is a fifth of its bytes, measured 0.42 to 0.47 at exit 10 of 30.
    assert 0.42 < read_cost_ratio(10, num_layers=30, layer=3.54e6, head=28.3e6) < 0.49
