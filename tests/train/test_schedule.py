from __future__ import annotations

import pytest
import torch

from selfspec_tune.errors import UserError
from selfspec_tune.train.schedule import (
    active_exits,
    draw_dropped,
    drop_probabilities,
    exit_shares,
    learning_rate,
    mixture_weight,
    resolve_exits,
)


def test_exits_may_be_numbers_or_fractions_of_depth() -> None:
    assert resolve_exits((6, 10), 30) == (6, 10)
    assert resolve_exits((0.5, 0.2), 30) == (6, 15)
    assert resolve_exits((20.0, 0.1), 30) == (3, 20)


@pytest.mark.parametrize("exits", [(), (0,), (30,), (31,), (2.5,), (-1,), (0.001,), (6, 0.2), (0.99,)])
def test_exits_outside_the_model_or_named_twice_are_refused(exits: tuple[float, ...]) -> None:
    with pytest.raises(UserError, match="exit"):
        resolve_exits(exits, 30)


def test_every_exit_gets_its_turn() -> None:
    assert [active_exits((3, 6, 9), 1, step) for step in range(4)] == [(3,), (6,), (9,), (3,)]
    assert [active_exits((3, 6, 9), 2, step) for step in range(3)] == [(3, 6), (3, 9), (6, 9)]
    assert active_exits((3, 6), 5, 7) == (3, 6)


def test_the_gradual_curriculum_starts_at_the_last_exit_and_has_all_by_half_of_the_run() -> None:
    def at(step: int, count: int) -> tuple[int, ...]:
        return active_exits((3, 6, 9, 12), count, step, curriculum="gradual", max_steps=80)

    # 4 exits: one more every 80 / 8 = 10 steps.
    assert [at(step, 4) for step in (0, 9)] == [(12,), (12,)]
    assert [at(step, 4) for step in (10, 19)] == [(9, 12), (9, 12)]
    assert [at(step, 4) for step in (20, 30, 40, 79)] == [(6, 9, 12), *[(3, 6, 9, 12)] * 3]
    # At fewer a step the enabled ones take turns.
    assert {at(step, 1) for step in range(10)} == {(12,)}
    assert {at(step, 1) for step in range(10, 20)} == {(9,), (12,)}
    assert {at(step, 2) for step in range(30, 34)} == {(3, 6), (9, 12)}


@pytest.mark.parametrize("max_steps", [1, 3, 7])
def test_a_gradual_run_of_few_steps_never_lacks_an_exit(max_steps: int) -> None:
    for step in range(max_steps):
        assert active_exits((3, 6, 9, 12), 2, step, curriculum="gradual", max_steps=max_steps)


def test_exits_share_their_part_of_the_loss_evenly_or_by_depth() -> None:
    assert exit_shares((2, 4), 0.5) == pytest.approx((0.5, 0.25, 0.25))
    assert exit_shares((2, 4), 0.6, "linear") == pytest.approx((0.4, 0.2, 0.4))
    assert exit_shares((2, 4), 0.5, "quadratic") == pytest.approx((0.5, 0.1, 0.4))
    assert exit_shares((), 0.5) == (1.0,)
    for weights in ("uniform", "linear", "quadratic"):
        assert sum(exit_shares((1, 5, 7), 0.3, weights)) == pytest.approx(1)


def test_the_mixture_turns_from_kl_to_total_variation_as_acceptance_rises() -> None:
    weights = [mixture_weight(alpha / 10) for alpha in range(11)]
    assert weights[0] == 1 and weights == sorted(weights, reverse=True)
    assert weights[-1] == pytest.approx(0.0498, abs=1e-4)


def test_uniform_dropout_is_p_max_everywhere_and_none_is_none() -> None:
    assert drop_probabilities(3, 0.2, "uniform") == [0.2, 0.2, 0.2]
    for schedule in ("exponential", "uniform"):
        assert drop_probabilities(3, 0.0, schedule) == [0.0, 0.0, 0.0]
        assert draw_dropped(drop_probabilities(3, 0.0, schedule), torch.Generator().manual_seed(0)) == frozenset()


def test_dropout_grows_from_zero_to_p_max_as_in_the_paper() -> None:
    probabilities = drop_probabilities(5, 0.4)
    assert probabilities[0] == 0
    assert probabilities[-1] == pytest.approx(0.4)
    assert probabilities[2] == pytest.approx((2**0.5 - 1) * 0.4)  # e^(2 ln2 / 4) - 1
    assert drop_probabilities(1, 0.4) == [0.0]


def test_dropped_layers_follow_their_probabilities_and_the_generator() -> None:
    generator = torch.Generator().manual_seed(1)
    draws = [draw_dropped([0.0, 0.3, 1.0], generator) for _ in range(2000)]
    assert all(0 not in dropped and 2 in dropped for dropped in draws)
    assert sum(1 in dropped for dropped in draws) / 2000 == pytest.approx(0.3, abs=0.04)
    again = torch.Generator().manual_seed(1)
    assert [draw_dropped([0.0, 0.3, 1.0], again) for _ in range(2000)] == draws


def test_learning_rate_warms_up_and_falls_to_a_tenth() -> None:
    rates = [learning_rate(step, peak=1.0, warmup_steps=4, max_steps=20) for step in range(20)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1.0
    assert rates[-1] == pytest.approx(0.1)
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert learning_rate(0, peak=1.0, warmup_steps=0, max_steps=1) == 1.0
