"""Sums over prompts, how sure they are, and what is kept of a prompt on disk."""

from __future__ import annotations

import json

import pytest
import torch

from selfspec_tune.sweep.tally import RESAMPLES, Profile, PromptTally, interval


def tally(
    name: str, accepted: list[float], rounds: list[list[float]], tokens: list[list[float]], **others: object
) -> PromptTally:
    """A prompt of 10 positions unless told otherwise."""
    values = {"domain": "", "num_tokens": 11, "context": 20.0, "positions": 10, "own": 10.0} | others
    return PromptTally(name, accepted=accepted, rounds=rounds, tokens=tokens, **values)  # type: ignore[arg-type]


def two_prompts() -> Profile:
    """Two exits, k = 1 and 2; the second prompt is thrice as long and of another domain."""
    first = tally("a", [2.0, 8.0], [[8.0, 6.0], [7.0, 4.0]], [[10.0, 10.0], [10.0, 9.0]], domain="code")
    second = tally(
        "b",
        [18.0, 27.0],
        [[20.0, 17.0], [15.0, 12.0]],
        [[30.0, 30.0], [29.0, 30.0]],
        domain="chat",
        num_tokens=31,
        context=60.0,
        positions=30,
        own=29.0,
        generate_seconds=1.5,
        profile_seconds=0.5,
    )
    return Profile(3, [first, second])


def test_a_profile_is_the_sum_of_its_prompts_not_their_mean() -> None:
    profile = two_prompts()
    assert profile.alpha == pytest.approx({1: 20 / 40, 2: 35 / 40})
    assert profile.tokens_per_round == pytest.approx(
        {(1, 1): 40 / 28, (2, 1): 40 / 23, (1, 2): 39 / 22, (2, 2): 39 / 16}
    )
    assert (profile.num_prompts, profile.num_tokens, profile.positions) == (2, 42, 40)
    assert profile.own == 39 / 40
    assert (profile.generate_seconds, profile.profile_seconds) == (1.5, 0.5)


def test_context_is_the_mean_over_positions() -> None:
    assert two_prompts().context == (10 * 20 + 30 * 60) / 40


def test_domains() -> None:
    profile = Profile(3, [*two_prompts().tallies, tally("c", [1.0, 1.0], [[9.0, 9.0]] * 2, [[10.0, 10.0]] * 2)])
    assert profile.domains == ["chat", "code"]
    assert profile.of_domain("code").alpha == pytest.approx({1: 0.2, 2: 0.8})
    assert [one.prompt for one in profile.of_domain("chat").tallies] == ["b"]
    assert Profile(3, [tally("c", [1.0], [[9.0]], [[10.0]])]).domains == []


def test_a_tally_survives_json() -> None:
    for one in two_prompts().tallies:
        assert PromptTally(**json.loads(json.dumps(one.to_dict()))) == one


def test_interval_leaves_as_much_out_on_either_side() -> None:
    values = list(range(400))[::-1]
    low, high = interval(values, 199.5, 1000)
    assert (low, high) == pytest.approx((10, 389), abs=1) and low < 10 and high > 389
    few = interval(values, 199.5, 5)
    assert few[0] < -90 and few[1] > 490, "five units are widened to Student's quantile and more"


def test_resamples_are_the_same_for_every_cell_and_every_call() -> None:
    # Exit 2 of every prompt has twice the tokens of exit 1, so it must have in every resample of prompts.
    rounds, draw = torch.linspace(2, 9, 12).tolist(), torch.Generator().manual_seed(1)
    tokens = torch.randint(9, 30, (12,), generator=draw).tolist()
    prompts = [tally(str(n), [1.0, 1.0], [[rounds[n]] * 2], [[tokens[n], 2 * tokens[n]]]) for n in range(12)]
    samples = Profile(3, prompts).tokens_samples()
    assert samples == Profile(3, prompts).tokens_samples()
    assert set(samples) == {(1, 1), (2, 1)} and len(samples[1, 1]) == RESAMPLES
    assert samples[2, 1] == pytest.approx([2 * value for value in samples[1, 1]])
    assert len(set(samples[1, 1])) > RESAMPLES / 2
    assert min(samples[1, 1]) < Profile(3, prompts).tokens_per_round[1, 1] < max(samples[1, 1])


def test_one_prompt_says_nothing_of_the_spread() -> None:
    profile = Profile(3, two_prompts().tallies[:1])
    assert profile.alpha_intervals() == {1: (0.0, 1.0), 2: (0.0, 1.0)}


def test_intervals_cover_the_truth_as_often_as_they_say() -> None:
    """Of 300 sets of 80 prompts, each with a mean acceptance of its own, nine tenths and more must cover the truth.

    Percentile intervals of 80 prompts cover about 94 %; the count then lies in 90 % to 98 % but with probability 0.7 %
    (fixed seeds, so it either does or does not). Drawing tokens instead of prompts would cover far less, as the test
    shows too: tokens of one prompt stand or fall together.
    """
    generator, sets, count, positions = torch.Generator().manual_seed(2), 300, 80, 40
    covered = naive = 0
    for _ in range(sets):
        rates = torch.rand(count, generator=generator, dtype=torch.float64)  # mean 1/2
        stood = torch.rand(count, positions, generator=generator, dtype=torch.float64) < rates[:, None]
        accepted = stood.sum(-1).double().tolist()
        prompts = [
            tally(str(n), [a], [[positions - a / 2]], [[float(positions)]], positions=positions)
            for n, a in enumerate(accepted)
        ]
        profile = Profile(2, prompts)
        low, high = profile.alpha_intervals()[1]
        covered += low <= 0.5 <= high
        # τ's truth: positions/(positions − positions/4).
        low, high = interval(profile.tokens_samples()[1, 1], profile.tokens_per_round[1, 1], count)
        covered += low <= 4 / 3 <= high
        naive += abs(profile.alpha[1] - 0.5) < 1.96 * 0.5 / (count * positions) ** 0.5
    assert 0.90 <= covered / sets / 2 <= 0.98
    assert naive / sets < 0.6
