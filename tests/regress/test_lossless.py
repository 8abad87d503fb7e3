"""The losslessness test passes on the engine as it is, and every planted fault makes it fail."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from selfspec_kernels import accept_matching
from torch import Tensor

from selfspec_tune.config import PromptConfig
from selfspec_tune.decode import round as round_module
from selfspec_tune.decode.drafters import ChooseToken, Draft
from selfspec_tune.decode.drafters.layer_skip import LayerSkipDrafter
from selfspec_tune.decode.engine import Engine
from selfspec_tune.decode.prompts import read_requests
from selfspec_tune.decode.requests import Completion, Request
from selfspec_tune.errors import UserError
from selfspec_tune.model.cache import SharedKVCache
from selfspec_tune.model.decoder import LayeredDecoder, load_decoder
from selfspec_tune.model.load import load_tokenizer
from selfspec_tune.regress import lossless, table

EXITS, LENGTHS = (2, 5), (1, 3)


@pytest.fixture
def requests(checkpoint: Path, prompts: Path) -> list[Request]:
    return read_requests(prompts, load_tokenizer(str(checkpoint)), PromptConfig(raw=True), max_new_tokens=16)[1]


@pytest.fixture
def make_engine(checkpoint: Path) -> Callable[..., Engine]:
    def make(dtype: str = "float32", numerics: str = "exact") -> Engine:
        return Engine(load_decoder(str(checkpoint), dtype=dtype), numerics=numerics, keep_logits=True)

    return make


def check(
    engine: Engine, requests: list[Request], make: type[LayerSkipDrafter] = LayerSkipDrafter, **options: Any
) -> lossless.Lossless:
    drafters = {f"E={exit_layer}": make(engine.decoder, exit_layer) for exit_layer in EXITS}
    return lossless.check_lossless(engine, requests, drafters, LENGTHS, **options)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nothing_differs(make_engine: Callable, requests: list[Request], dtype: str) -> None:
    calls: list[tuple[str, int, int]] = []
    found = check(make_engine(dtype), requests, progress=lambda *call: calls.append(call))
    assert found.passed and found.bitwise_logits and found.first_difference is None
    assert (found.differing_tokens, found.differing_cases, found.ties) == (0, 0, 0)
    assert (found.cases, found.prompts, found.tokens, found.dtype) == (12, 3, 12 * 16, dtype)
    # The test is worth something only where drafts are accepted, and rejected.
    assert 0 < found.accepted < found.drafted
    assert calls == [("losslessness", done, 12) for done in range(1, 13)]


def accepts_one_too_many(drafted: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    chosen = logits.argmax(-1)
    accepted, _ = accept_matching(drafted, chosen)
    accepted = (accepted + 1).clamp(max=drafted.shape[1])
    return accepted, chosen.gather(1, accepted[:, None]).squeeze(1)


def accepts_one_too_few(drafted: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    # Lossless, if slow: it must not be reported.
    chosen = logits.argmax(-1)
    accepted, _ = accept_matching(drafted, chosen)
    accepted = (accepted - 1).clamp(min=0)
    return accepted, chosen.gather(1, accepted[:, None]).squeeze(1)


class ForgetsTheLastEarlyPass(LayerSkipDrafter):
    """Hands the verifier the state of the token before the last drafted one."""

    def propose(self, last: Tensor, cache: SharedKVCache, k: int, choose: ChooseToken, *rest: Any) -> Draft:
        draft = super().propose(last, cache, k, choose, *rest)
        assert draft.hidden is not None
        hidden = torch.cat((draft.hidden[:, :-1], draft.hidden[:, -2:-1]), 1)
        return Draft(draft.tokens, draft.probabilities, hidden, draft.resume_layer)


class RollsBackOneTooFar(LayerSkipDrafter):
    """Drafts one position before the committed end, over the newest accepted token's keys and values."""

    def propose(self, last: Tensor, cache: SharedKVCache, k: int, choose: ChooseToken, *rest: Any) -> Draft:
        cache.committed -= 1
        draft = super().propose(last, cache, k, choose, *rest)
        cache.committed += 1
        return draft


class RollsBackOnePositionShort(LayerSkipDrafter):
    """Leaves the newest rejected position in the cache: drafts one position after the committed end."""

    def propose(self, last: Tensor, cache: SharedKVCache, k: int, choose: ChooseToken, *rest: Any) -> Draft:
        cache.committed += 1
        draft = super().propose(last, cache, k, choose, *rest)
        cache.committed -= 1
        return draft


class SkipsTheFinalNorm(LayerSkipDrafter):
    """Drafts badly; what is drafted must not matter."""

    def propose(self, last: Tensor, cache: SharedKVCache, k: int, choose: ChooseToken, *rest: Any) -> Draft:
        return super().propose(last, cache, k, lambda logits, offset: choose(-logits, offset), *rest)


@pytest.mark.parametrize("numerics", ["exact", "fast"])
def test_accepting_a_wrong_token_is_caught(
    make_engine: Callable, requests: list[Request], numerics: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(round_module, "accept_greedy", accepts_one_too_many)
    found = check(make_engine(numerics=numerics), requests[1:])
    assert not found.passed and found.differing_tokens > 0 and not found.bitwise_logits
    first = found.first_difference
    assert first is not None and not first.tie
    assert first.plain_token != first.speculative_token
    assert first.plain_gap is not None and first.plain_gap > 1e-4


@pytest.mark.parametrize("drafter", [ForgetsTheLastEarlyPass, RollsBackOneTooFar, RollsBackOnePositionShort])
@pytest.mark.parametrize("numerics", ["exact", "fast"])
def test_a_drafter_that_corrupts_the_cache_is_caught(
    make_engine: Callable, requests: list[Request], numerics: str, drafter: type[LayerSkipDrafter]
) -> None:
    found = check(make_engine(numerics=numerics), requests[1:], drafter)
    assert not found.passed and found.differing_tokens > 0
    assert found.first_difference is not None


def test_a_single_wrong_bit_is_caught(make_engine: Callable, requests: list[Request]) -> None:
    engine = make_engine()
    logits = engine.decoder.logits

    def off_by_a_bit(hidden: Tensor, **options: Any) -> Tensor:
        exact: Tensor = logits(hidden, **options)
        if hidden.shape[1] > 1:
            exact[:, 1] = torch.nextafter(exact[:, 1], torch.tensor(torch.inf))
        return exact

    engine.decoder.logits = off_by_a_bit
    found = check(engine, requests[1:])
    assert found.differing_tokens == 0 and not found.bitwise_logits and not found.passed
    first = found.first_difference
    assert first is not None and not first.tie and first.plain_token == first.speculative_token
    assert first.largest_logit_difference is not None and 0 < first.largest_logit_difference < 1e-5


def test_in_fast_numerics_the_first_differing_token_is_shown_with_both_gaps(
    make_engine: Callable, requests: list[Request]
) -> None:
    engine = make_engine(numerics="fast")
    drafter = RollsBackOnePositionShort(engine.decoder, 2)
    found = lossless.check_lossless(engine, requests[1:], {"E=2": drafter}, (3,))
    assert not found.passed
    first = found.first_difference
    assert first is not None and first.plain_token != first.speculative_token
    verdict = {"lossless": found.to_dict()}
    said = table.first_difference(verdict)
    assert said is not None and f"token {first.position}, E=2, 3 draft tokens" in said
    assert f"{first.plain_token} plain (top-2 gap {table.number(first.plain_gap)})" in said
    assert f"{first.speculative_token} speculative (top-2 gap {table.number(first.speculative_gap)})" in said


def test_what_is_slow_but_right_passes(
    make_engine: Callable, requests: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = check(make_engine(), requests[1:], SkipsTheFinalNorm)
    assert bad.passed and bad.accepted == 0
    good = check(make_engine(), requests[1:])
    monkeypatch.setattr(round_module, "accept_greedy", accepts_one_too_few)
    slow = check(make_engine(), requests[1:])
    assert slow.passed and slow.accepted < good.accepted


def completion(tokens: list[int], *logits: list[float]) -> Completion:
    return Completion("p", token_ids=tokens, logits=[torch.tensor(row) for row in logits])


def find(plain: Completion, other: Completion, numerics: str) -> lossless.Lossless:
    """Count one hand-made case."""

    class FakeEngine:
        decoder = type("FakeDecoder", (), {"dtype": torch.float32})

    FakeEngine.numerics = numerics  # type: ignore[attr-defined]
    result = lossless.Lossless(numerics, "float32", 1, ["E=1"], [1])
    difference = lossless.find_difference(FakeEngine, plain, other, "E=1", 1)  # type: ignore[arg-type]
    result.count(plain, other, difference)
    return result


def test_a_tie_passes_in_fast_only() -> None:
    plain = completion([0, 1], [2.0, 1.0, 0.0], [1.0, 1.00005, 0.0])
    other = completion([0, 0], [2.0, 1.0, 0.0], [1.00005, 1.0, 0.0])
    fast, exact = find(plain, other, "fast"), find(plain, other, "exact")
    assert fast.passed and (fast.differing_tokens, fast.ties) == (1, 1)
    assert fast.first_difference is not None and fast.first_difference.position == 1
    assert not exact.passed and exact.differing_tokens == 1


def test_a_difference_that_is_no_tie_fails_in_fast_and_is_the_one_reported() -> None:
    tied = completion([1], [1.0, 1.00005, 0.0]), completion([0], [1.0, 1.0, 0.0])
    clear = completion([1], [1.0, 1.2, 0.0]), completion([0], [1.2, 1.0, 0.0])
    result = find(*tied, "fast")
    difference = find(*clear, "fast").first_difference
    result.count(*clear, difference)
    assert not result.passed and (result.differing_cases, result.ties) == (2, 1)
    assert result.first_difference == difference
    assert difference is not None and difference.plain_gap == pytest.approx(0.2)


def test_a_text_that_ends_elsewhere_differs() -> None:
    longer, shorter = completion([0, 1], [2.0, 1.0], [1.0, 2.0]), completion([0], [2.0, 1.0])
    for numerics in ("exact", "fast"):
        for plain, other in ((longer, shorter), (shorter, longer)):
            found = find(plain, other, numerics)
            assert not found.passed and found.differing_tokens == 1 and not found.bitwise_logits
            first = found.first_difference
            assert first is not None and first.position == 1
            assert {first.plain_token, first.speculative_token} == {1, None}


def test_a_logit_that_is_no_number_does_not_pass() -> None:
    nan = completion([0], [float("nan"), 1.0])
    assert not find(nan, completion([0], [float("nan"), 1.0]), "exact").passed


def test_exits_are_spread_over_the_depth() -> None:
    assert lossless.default_exit_layers(30) == [3, 10, 15, 27]
    assert lossless.default_exit_layers(6) == [1, 2, 3, 5]
    assert lossless.default_exit_layers(2) == [1]


def test_an_impossible_draft_length_is_refused(make_engine: Callable, requests: list[Request]) -> None:
    engine = make_engine(numerics="fast")
    with pytest.raises(UserError, match="out of range"):
        lossless.check_lossless(engine, requests, {"E=2": LayerSkipDrafter(engine.decoder, 2)}, (0,))


def test_an_engine_without_logits_is_refused(checkpoint: Path) -> None:
    engine = Engine(LayeredDecoder(load_decoder(str(checkpoint)).model), numerics="fast")
    with pytest.raises(ValueError, match="keep the logits"):
        lossless.check_lossless(engine, [], {}, (1,))
