"""The test of sampling passes on the engine as it is, and sees every planted fault.

False-alarm probability: 1e-4 per run of the ratio test (seeds are fixed, so a pass stays a pass). What it sees with how
many tokens stands in `sampling.py`; each fault is tested with more than it takes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny import tiny_model
from torch import Tensor

from selfspec_tune.decode import round as round_module
from selfspec_tune.decode.accept import accept_ratio
from selfspec_tune.decode.drafters import Drafter
from selfspec_tune.decode.drafters.hybrid import HybridDrafter
from selfspec_tune.decode.drafters.layer_skip import LayerSkipDrafter
from selfspec_tune.decode.drafters.low_precision import LowPrecisionDrafter
from selfspec_tune.decode.drafters.prompt_lookup import PromptLookupDrafter
from selfspec_tune.decode.engine import Engine
from selfspec_tune.decode.noises import Noises
from selfspec_tune.decode.requests import Completion, Request
from selfspec_tune.decode.sampling import Noise, SamplingParams, distribution, draw
from selfspec_tune.errors import UserError
from selfspec_tune.model.decoder import LayeredDecoder
from selfspec_tune.regress import sampling

PLAIN, TRUNCATED = SamplingParams(1.0), SamplingParams(1.2, top_k=20, top_p=0.9)
LENGTHS = (1, 3)
REQUESTS = [Request(f"p{first}", [first, 2, 3, first, 2], 48) for first in range(4, 8)]


@pytest.fixture(scope="module")
def decoder() -> LayeredDecoder:
    no_end: dict[str, Any] = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    settings = {"vocab_size": 64, "hidden_size": 48, "num_hidden_layers": 3, "initializer_range": 0.25}
    return LayeredDecoder(tiny_model(**settings, **no_end))


def check(decoder: LayeredDecoder, params: SamplingParams, texts: int, drafter: Drafter | None = None, **options: Any):
    engine = Engine(decoder, numerics=options.pop("numerics", "fast"), keep_logits=True)
    drafters = {"draft": drafter or LayerSkipDrafter(decoder, 2)}
    return sampling.check_sampling(engine, REQUESTS, drafters, LENGTHS, params, texts_per_prompt=texts, **options)


def p_values(found: sampling.Sampling) -> dict[str, float | None]:
    return {test.order: test.p_value for test in found.ratio_test}


DRAFTERS: dict[str, Callable[[LayeredDecoder], Drafter]] = {
    "layer-skip, some tokens": lambda decoder: LayerSkipDrafter(decoder, 2, torch.arange(0, 64, 3)),
    "copy": lambda decoder: PromptLookupDrafter(),
    "hybrid": lambda decoder: HybridDrafter(PromptLookupDrafter(), LowPrecisionDrafter(decoder, 4, exit_layer=3)),
}


@pytest.mark.parametrize("params", [PLAIN, TRUNCATED], ids=["plain", "truncated"])
@pytest.mark.parametrize("seed", range(3))
def test_sound_sampling_passes(decoder: LayeredDecoder, params: SamplingParams, seed: int) -> None:
    calls: list[tuple[str, int, int]] = []
    found = check(decoder, replace(params, seed=seed), 4, progress=lambda *call: calls.append(call))
    assert found.passed and found.status == "passed" and found.first_difference is None
    by_probability, by_draft = found.ratio_test
    assert by_probability.tokens == 2 * 4 * 4 * 48
    # Bonus tokens and the first of a text have no draft.
    assert sampling.LEAST_TOKENS < by_draft.tokens < by_probability.tokens
    # The test is worth something only where drafts are accepted, and rejected.
    assert 0 < found.accepted < found.drafted
    for cell in found.shared_noise:
        assert 0 < cell.accepted < cell.drafted and cell.tokens == 4 * 48
        assert (cell.differing_tokens, cell.differing_texts) == (0, 0)
    assert calls[7] == ("sampling with shared noise", 8, 8)
    assert calls[-1] == ("sampling by the ratio test", 32, 32) and len(calls) == 40


@pytest.mark.parametrize("name", DRAFTERS)
def test_sound_sampling_passes_with_other_drafters(decoder: LayeredDecoder, name: str) -> None:
    found = check(decoder, TRUNCATED, 2, DRAFTERS[name](decoder))
    assert found.passed and found.drafted > 0


def test_exact_numerics(decoder: LayeredDecoder) -> None:
    assert check(decoder, TRUNCATED, 2, numerics="exact").passed


def always_accepted(drafted: Tensor, draft: Tensor, target: Tensor, uniform: Tensor, rest: Tensor) -> Any:
    k = drafted.shape[1]
    return torch.full((len(drafted),), k), draw(target[:, k], rest)


def bonus_of_another_row(drafted: Tensor, draft: Tensor, target: Tensor, uniform: Tensor, rest: Tensor) -> Any:
    shifted = torch.cat((target[:, :-1], target[:, -2:-1]), 1) if drafted.shape[1] else target
    return accept_ratio(drafted, draft, shifted, uniform, rest)


def residual_not_clipped(drafted: Tensor, draft: Tensor, target: Tensor, uniform: Tensor, rest: Tensor) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "clamp_min", lambda tensor, low: tensor)
        return accept_ratio(drafted, draft, target, uniform, rest)


def rejection_drawn_from_p(drafted: Tensor, draft: Tensor, target: Tensor, uniform: Tensor, rest: Tensor) -> Any:
    accepted, _ = accept_ratio(drafted, draft, target, uniform, rest)
    return accepted, draw(target[torch.arange(len(drafted)), accepted], rest)


def draft_at_another_temperature(run: Any, logits: Tensor, offset: int) -> tuple[Tensor, Tensor]:
    colder = replace(run.params, temperature=0.6 * run.params.temperature)
    return draw(distribution(logits, colder), run.uniform(1)[:, 0]), distribution(logits, run.params)


def q_before_truncation(run: Any, logits: Tensor, offset: int) -> tuple[Tensor, Tensor]:
    whole = replace(run.params, top_k=0, top_p=1.0)
    return draw(distribution(logits, run.params), run.uniform(1)[:, 0]), distribution(logits, whole)


FAULTS: dict[str, tuple[Callable[..., Any], SamplingParams, int, str]] = {
    "always accepted": (always_accepted, PLAIN, 4, "draft"),
    "bonus of another row": (bonus_of_another_row, PLAIN, 4, "probability"),
    "residual not clipped": (residual_not_clipped, PLAIN, 12, "draft"),
    "rejection drawn from p": (rejection_drawn_from_p, PLAIN, 4, "draft"),
    "draft at another temperature": (draft_at_another_temperature, PLAIN, 4, "probability"),
    "q before truncation": (q_before_truncation, TRUNCATED, 4, "draft"),
}


def plant(monkeypatch: pytest.MonkeyPatch, fault: Callable[..., Any]) -> None:
    if fault in (draft_at_another_temperature, q_before_truncation):
        genuine = round_module.Round._choose

        def chosen(now: round_module.Round, logits: torch.Tensor, offset: int, *, confident: bool) -> Any:
            # Shared noise is left as it is.
            if now.params.reproducible:
                return genuine(now, logits, offset, confident=confident)
            return fault(now, logits, offset)

        monkeypatch.setattr(round_module.Round, "_choose", chosen)
    else:
        monkeypatch.setattr(round_module, "accept_ratio", fault)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_the_ratio_test_is_seen(decoder: LayeredDecoder, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    fault, params, texts, order = FAULTS[name]
    plant(monkeypatch, fault)
    found = check(decoder, params, texts)
    assert found.status == "failed" and not found.passed
    value = p_values(found)[order]
    assert value is not None and value < found.threshold
    assert found.first_difference is None


def test_a_token_that_cannot_occur_is_seen(decoder: LayeredDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, bonus_of_another_row)
    assert check(decoder, TRUNCATED, 1).impossible_tokens > 0
    assert check(decoder, PLAIN, 1).impossible_tokens == 0


def test_noise_of_another_position_is_seen(decoder: LayeredDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = Noises.gumbel
    shifted = lambda noises, offset, size: genuine(noises, offset + (offset == 2), size)  # noqa: E731
    monkeypatch.setattr(Noises, "gumbel", shifted)
    found = check(decoder, PLAIN, 1)
    first = found.first_difference
    assert found.status == "failed" and first is not None and not first.rounding
    assert first.num_draft_tokens == 3 and first.plain_token != first.speculative_token
    one, three = found.shared_noise
    assert one.differing_texts == 0 < three.differing_texts <= three.differing_tokens


def test_rounding_is_excused_in_fast_numerics_only(decoder: LayeredDecoder) -> None:
    engine = Engine(decoder, numerics="fast", keep_logits=True)
    params, cell = replace(PLAIN, reproducible=True), sampling.SharedNoise("draft", 1)
    noise = Noise(params, "p").gumbel(0, 3).float()
    # Equal sums of logit and noise but for a hair, either way round; then clearly the other way round.
    tied = -noise + torch.tensor([0.0, 0.0, -9.0])
    near, far = tied + torch.tensor([0.0, 2e-5, 0.0]), tied + torch.tensor([0.0, 2e-3, 0.0])
    plain = Completion("p", [0], logits=[tied + torch.tensor([2e-5, 0.0, 0.0])])

    def difference(token: int, logits: Tensor) -> sampling.NoiseDifference | None:
        return sampling._first_difference(engine, params, plain, Completion("p", [token], logits=[logits]), cell)

    assert difference(0, near) is None
    rounded, wrong, far_off = difference(1, near), difference(2, near), difference(1, far)
    assert rounded is not None and rounded.rounding
    assert wrong is not None and not wrong.rounding
    assert far_off is not None and not far_off.rounding
    for numerics, status in (("fast", "passed"), ("exact", "failed")):
        result = sampling.Sampling(
            numerics, "float32", 1.0, 0, 1.0, 1, 1, ["draft"], [1],
            [replace(cell, differing_texts=1, rounding=1)], [sampling.RatioTest("draft", "probability")],
        )  # fmt: skip
        assert result.status == status


def test_few_tokens_are_no_failure_and_have_no_p_value(decoder: LayeredDecoder) -> None:
    engine = Engine(decoder, numerics="fast", keep_logits=True)
    drafters = {"draft": LayerSkipDrafter(decoder, 2)}
    found = sampling.check_sampling(engine, REQUESTS[:1], drafters, [2], PLAIN, texts_per_prompt=2)
    assert found.status == "passed"
    assert p_values(found) == {"probability": None, "draft": None}


def test_a_json_object(decoder: LayeredDecoder) -> None:
    found = check(decoder, TRUNCATED, 2).to_dict()
    assert (found["status"], found["passed"], found["threshold"]) == ("passed", True, 5e-5)
    assert (found["temperature"], found["top_k"], found["top_p"]) == (1.2, 20, 0.9)
    assert found["ratio_test"][0].keys() == {"drafter", "order", "tokens", "p_value"}


def test_mass_before_in_both_orders() -> None:
    p, q = torch.tensor([0.1, 0.4, 0.4, 0.1, 0.0]), torch.tensor([0.3, 0.1, 0.4, 0.1, 0.1])
    assert [round(sampling.mass_before(p, token), 6) for token in range(4)] == [0.8, 0.0, 0.4, 0.9]
    # q/p: 3, 1/4, 1, 1 and, where p is 0, last.
    assert [round(sampling.mass_before(p, token, q), 6) for token in range(4)] == [0.0, 0.6, 0.1, 0.5]


def test_p_values_of_chi_square_are_uniform() -> None:
    """Share of 20,000 tests of 400 tokens below 0.01: 200 ± 14 are expected; 5 standard errors are allowed."""
    draws = torch.randint(20, (20_000, 400), generator=torch.Generator().manual_seed(0))
    counts = torch.zeros(20_000, 20).scatter_add_(1, draws, torch.ones(20_000, 400))
    below = sum(sampling.chi_square_p_value(row) < 0.01 for row in counts.int().tolist())
    assert 130 <= below <= 270


def test_what_cannot_be_tested_is_refused(decoder: LayeredDecoder) -> None:
    with pytest.raises(UserError, match="at a temperature"):
        check(decoder, SamplingParams(), 1)
    with pytest.raises(UserError, match="texts_per_prompt"):
        check(decoder, PLAIN, 0)
    engine = Engine(decoder, numerics="fast", keep_logits=True)
    with pytest.raises(UserError, match="num_draft_tokens"):
        drafters = {"draft": LayerSkipDrafter(decoder, 2)}
        sampling.check_sampling(engine, REQUESTS, drafters, [9], PLAIN, texts_per_prompt=1)
    with pytest.raises(ValueError, match="keep the logits"):
        sampling.check_sampling(Engine(decoder, numerics="fast"), [], {}, [1], PLAIN, texts_per_prompt=1)
