"""How many tokens are drafted."""

from __future__ import annotations

import random

from selfspec_tune.decode.drafters import Source
from selfspec_tune.decode.policy import LEAST_ROUNDS, DraftPolicy

LAYER_SKIP = Source("layer-skip")


def test_never_more_than_can_still_be_emitted():
    policy = DraftPolicy(4)
    planned = [policy.next(remaining, [LAYER_SKIP]) for remaining in (1, 2, 4, 5, 100)]
    assert planned == [None, *((LAYER_SKIP, k) for k in (1, 3, 4, 4))]


def test_drafting_that_does_not_pay_stops():
    policy = DraftPolicy(4, round_cost=2.0)
    for _ in range(LEAST_ROUNDS):
        assert policy.next(100, [LAYER_SKIP]) == (LAYER_SKIP, 4)
        policy.observe(LAYER_SKIP, 4, 0)
    assert policy.stopped and policy.next(100, [LAYER_SKIP]) is None


def test_drafting_that_pays_goes_on():
    """True mean 2.0 at a cost of 1.95: 200 runs of 2,000 rounds. With 3 standard errors at most a few may stop."""
    stops = 0
    for seed in range(200):
        draws, policy = random.Random(seed), DraftPolicy(4, round_cost=1.95)
        for _ in range(2000):
            policy.observe(LAYER_SKIP, 4, draws.choice((0, 0, 1, 1, 1, 3)))
        stops += policy.stopped
    assert stops <= 4


def test_without_measured_costs_nothing_is_judged():
    policy = DraftPolicy(4)
    for _ in range(10 * LEAST_ROUNDS):
        policy.observe(LAYER_SKIP, 4, 0)
    assert policy.next(100, [LAYER_SKIP]) == (LAYER_SKIP, 4)
