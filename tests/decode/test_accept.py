"""Acceptance: exact cases, and the chi-square test that sampled output follows the target distribution.

False-alarm probability of each chi-square test: 1e-6 per case (seeds are fixed, so a pass stays a pass).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from selfspec_kernels import accept_matching
from tiny import tiny_model

from selfspec_tune.decode import accept
from selfspec_tune.decode import round as round_module
from selfspec_tune.decode.accept import accept_ratio
from selfspec_tune.decode.drafters import Drafter
from selfspec_tune.decode.drafters.exit_head import ExitHeadDrafter
from selfspec_tune.decode.drafters.hybrid import HybridDrafter
from selfspec_tune.decode.drafters.layer_skip import LayerSkipDrafter
from selfspec_tune.decode.drafters.low_precision import LowPrecisionDrafter
from selfspec_tune.decode.drafters.prompt_lookup import PromptLookupDrafter
from selfspec_tune.decode.engine import Engine
from selfspec_tune.decode.policy import DraftPolicy
from selfspec_tune.decode.requests import Request
from selfspec_tune.decode.sampling import SamplingParams, distribution, draw
from selfspec_tune.model.decoder import LayeredDecoder
from selfspec_tune.model.exit_head import ExitHead

DRAWS = 120_000
FALSE_ALARM = 1e-6


def test_longest_matching_prefix():
    drafted = torch.tensor([[1, 2, 3], [1, 9, 3], [9, 2, 3]])
    chosen = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4]])
    accepted, following = accept_matching(drafted, chosen)
    assert accepted.tolist() == [3, 1, 0]
    assert following.tolist() == [4, 2, 1]


def test_nothing_drafted_takes_the_targets_token():
    target = torch.tensor([[[0.0, 1.0]]])
    empty = torch.zeros(1, 0, dtype=torch.long)
    assert accept_matching(empty, torch.tensor([[1]]))[1].tolist() == [1]
    accepted, following = accept_ratio(empty, torch.zeros(1, 0, 2), target, torch.zeros(1, 0), torch.tensor([0.5]))
    assert (accepted.tolist(), following.tolist()) == ([0], [1])


def test_a_token_the_target_cannot_choose_is_never_accepted():
    target = torch.tensor([[[0.0, 1.0], [0.5, 0.5]]])
    draft = torch.tensor([[[1.0, 0.0]]])
    accepted, following = accept_ratio(torch.tensor([[0]]), draft, target, torch.zeros(1, 1), torch.zeros(1))
    assert (accepted.tolist(), following.tolist()) == ([0], [1])


def test_the_last_number_is_that_of_the_token_after():
    target, draft = torch.tensor([[[0.25, 0.75], [0.5, 0.5]]]), torch.tensor([[[0.5, 0.5]]])
    low, high = torch.tensor([0.1]), torch.tensor([0.9])
    accepted, following = accept_ratio(torch.tensor([[0]]), draft, target, low[:, None], high)
    assert (accepted.tolist(), following.tolist()) == ([1], [1])
    accepted, following = accept_ratio(torch.tensor([[0]]), draft, target, high[:, None], low)
    assert (accepted.tolist(), following.tolist()) == ([0], [1])


def test_equal_distributions_always_accept():
    target = torch.rand(50, 2, 7, generator=torch.Generator().manual_seed(0)).softmax(-1)
    drafted = torch.randint(7, (50, 1))
    uniform = torch.full((50, 1), 1 - 1e-12, dtype=torch.float64)
    accepted, _ = accept_ratio(drafted, target[:, :1], target, uniform, torch.zeros(50))
    assert accepted.tolist() == [1] * 50


def chi_square_passes(counts: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether observed counts [V] fit the distribution `expected` [V]; tokens of probability 0 must not occur."""
    possible = expected > 0
    if counts[~possible].any():
        return False
    scaled = expected[possible] * counts.sum()
    statistic = ((counts[possible] - scaled) ** 2 / scaled).sum()
    freedom = (possible.sum() - 1).double() / 2
    return bool(torch.special.gammaincc(freedom, statistic / 2) > FALSE_ALARM)


def round_outputs(
    target_logits: torch.Tensor,
    draft_logits: torch.Tensor,
    params: SamplingParams,
    draft_params: SamplingParams | None = None,
    q_params: SamplingParams | None = None,
    q_logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """First token of `DRAWS` rounds of k = 2 at a fixed context, as the engine computes it.

    `draft_params`: what the draft token is drawn with; `q_params`, `q_logits`: what q is reported as. The first two
    default to `params`, the last to `draft_logits`.
    """
    generator = torch.Generator().manual_seed(7)
    p = distribution(target_logits, params).expand(DRAWS, 3, -1)
    drawn_from = distribution(draft_logits, draft_params or params)
    reported = draft_logits if q_logits is None else q_logits
    q = distribution(reported, q_params or params).expand(DRAWS, 2, -1)
    uniform = torch.rand(DRAWS, 5, generator=generator, dtype=torch.float64)
    drafted = torch.stack([draw(drawn_from.expand(DRAWS, -1), uniform[:, i]) for i in range(2)], 1)
    accepted, following = accept.accept_ratio(drafted, q, p, uniform[:, 2:4], uniform[:, 4])
    return torch.where(accepted > 0, drafted[:, 0], following)


TARGET = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -1.5, 1.2, 0.7])
WHOLE = TARGET.roll(3) + 0.3 * TARGET
DRAFTS = {
    "never": torch.tensor([-60.0, -60.0, -60.0, -60.0, 0.0, 1.0, 2.0, 3.0, -60.0, -60.0]),
    "sometimes": WHOLE,
    "always": TARGET,
    # A draft vocabulary of 4 of the 10 tokens, fewer than top-k keeps.
    "some tokens": WHOLE.where(torch.isin(torch.arange(10), torch.tensor([1, 3, 4, 8])), float("-inf")),
}
PARAMS = [SamplingParams(1.0), SamplingParams(0.7, top_k=6), SamplingParams(1.3, top_k=8, top_p=0.8)]


def fits(params: SamplingParams, draft: str, **faults: Any) -> bool:
    tokens = round_outputs(TARGET, DRAFTS[draft], params, **faults)
    counts = torch.bincount(tokens, minlength=len(TARGET)).double()
    return chi_square_passes(counts, distribution(TARGET, params).double())


@pytest.mark.parametrize("params", PARAMS, ids=["t1", "t0.7-k6", "t1.3-k8-p0.8"])
@pytest.mark.parametrize("draft", list(DRAFTS))
def test_output_follows_the_target_distribution(draft, params):
    assert fits(params, draft)


class TestFaultsTheChiSquareTestMustCatch:
    def test_q_taken_before_truncation(self):
        params = SamplingParams(1.3, top_k=8, top_p=0.8)
        assert not fits(params, "sometimes", q_params=SamplingParams(1.3))

    def test_draft_at_another_temperature(self):
        assert not fits(SamplingParams(1.0), "sometimes", draft_params=SamplingParams(0.6))

    def test_q_of_the_whole_vocabulary_for_a_draft_of_some_tokens(self):
        assert not fits(SamplingParams(1.0), "some tokens", q_logits=WHOLE)

    def test_residual_not_clipped_at_zero(self, monkeypatch):
        genuine = torch.Tensor.clamp_min
        unclipped = lambda tensor, low: tensor if low == 0 else genuine(tensor, low)  # noqa: E731
        monkeypatch.setattr(torch.Tensor, "clamp_min", unclipped)
        assert not fits(SamplingParams(1.0), "sometimes")


SOME = torch.tensor([0, 2, 3, 7])
SAMPLED: dict[str, Callable[[LayeredDecoder], Drafter]] = {
    "layer-skip": lambda decoder: LayerSkipDrafter(decoder, 2),
    "layer-skip, some tokens": lambda decoder: LayerSkipDrafter(decoder, 2, SOME),
    "exit-head": lambda decoder: ExitHeadDrafter(decoder, ExitHead(decoder.model, 3, decoder.dtype)),
    "low-precision": lambda decoder: LowPrecisionDrafter(decoder, 4),
    "copy": lambda decoder: PromptLookupDrafter(),
    "hybrid": lambda decoder: HybridDrafter(PromptLookupDrafter(), LowPrecisionDrafter(decoder, 4, exit_layer=3)),
}


@pytest.mark.parametrize("name", SAMPLED)
def test_two_token_sequences_of_the_engine_follow_the_target(name):
    """The whole engine, 4,000 requests in batches: joint distribution of the first two tokens of a tiny model.

    The prompt repeats itself, so that there is something to copy after some first tokens.
    """
    batch, batches, prompt = 200, 20, [1, 2, 3, 1, 2, 4, 1, 2]
    decoder = LayeredDecoder(
        tiny_model(late=0.6, vocab_size=12, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    )
    params, drafter = SamplingParams(0.9, top_k=5), SAMPLED[name](decoder)
    engine = Engine(decoder, numerics="fast", batch_size=batch)
    counts = torch.zeros(12, 12, dtype=torch.double)
    accepted = 0
    for index in range(batches):
        requests = [Request(f"{index}-{row}", prompt, 3) for row in range(batch)]
        completions, stats = engine.generate(requests, params, drafter, DraftPolicy(2))
        accepted += stats.accepted
        for completion in completions:
            counts[completion.token_ids[0], completion.token_ids[1]] += 1
    assert 0 < accepted < 2 * batch * batches
    with torch.inference_mode():
        sequences = torch.tensor([[*prompt, token] for token in range(12)])
        logits = decoder.model(sequences, attention_mask=torch.ones_like(sequences)).logits
    first = distribution(logits[0, len(prompt) - 1], params).double()
    second = distribution(logits[:, len(prompt)], params).double()
    assert chi_square_passes(counts.flatten(), (first[:, None] * second).flatten())


def test_rounds_use_these_functions():
    assert round_module.accept_ratio is accept_ratio
