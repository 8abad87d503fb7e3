"""How many tokens are drafted."""

from __future__ import annotations

from selfspec_tune.decode.policy import PROBE_ROUNDS, DraftPolicy


def test_never_more_than_can_still_be_emitted():
    policy = DraftPolicy(4)
    assert [policy.next(remaining) for remaining in (1, 2, 4, 5, 100)] == [0, 1, 3, 4, 4]


def test_drafting_that_does_not_pay_stops():
    policy = DraftPolicy(4, round_cost=2.0)
    for _ in range(PROBE_ROUNDS):
        assert policy.next(100) == 4
        policy.observe(4, 0)
    assert policy.stopped and policy.next(100) == 0


def test_drafting_that_pays_goes_on():
    policy = DraftPolicy(4, round_cost=2.0)
    for index in range(10 * PROBE_ROUNDS):
        policy.observe(4, 1 + index % 2)
    assert not policy.stopped


def test_without_measured_costs_nothing_is_judged():
    policy = DraftPolicy(4)
    for _ in range(10 * PROBE_ROUNDS):
        policy.observe(4, 0)
    assert policy.next(100) == 4
