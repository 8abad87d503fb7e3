"""The profile against real decoding, against transformers' hidden states, and its recursion against brute force."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import tiny_model

from selfspec_tune.decode.drafters.layer_skip import LayerSkipDrafter
from selfspec_tune.decode.engine import Engine
from selfspec_tune.decode.policy import DraftPolicy
from selfspec_tune.decode.requests import Request
from selfspec_tune.decode.sampling import SamplingParams, distribution
from selfspec_tune.errors import UserError
from selfspec_tune.model.cache import SharedKVCache
from selfspec_tune.model.decoder import LayeredDecoder
from selfspec_tune.sweep import profile
from selfspec_tune.sweep.head import ProfileHead
from selfspec_tune.sweep.profile import Prompt

GREEDY = SamplingParams()
SAMPLED = {
    "cool": SamplingParams(temperature=0.7, seed=11),
    "plain": SamplingParams(temperature=1.0, seed=11),
    "top-p": SamplingParams(temperature=1.0, top_p=0.9, seed=11),
    "top-k and top-p": SamplingParams(temperature=0.9, top_k=40, top_p=0.95, seed=11),
}
NUM_LAYERS = 8
MakeRequests = Callable[[int, int], list[Request]]
Prefilled = Callable[[LayeredDecoder, list[int]], SharedKVCache]


def make_deep() -> Any:
    """Eight layers in fp32 without an end token; its head is scaled up, so that some drafts are hopeless."""
    sizes = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "head_dim": 8}
    model = tiny_model(num_hidden_layers=NUM_LAYERS, late=0.4, eos_token_id=None, pad_token_id=None, **sizes)
    model.lm_head.weight.data.mul_(3)
    return model


@pytest.fixture(scope="module")
def deep() -> LayeredDecoder:
    return LayeredDecoder(make_deep())


@pytest.fixture(scope="module")
def deep_reference() -> Any:
    """The same weights as a transformers model that nothing else drives."""
    return make_deep()


def accept(decoder: LayeredDecoder, cache: SharedKVCache, text: list[int], params: SamplingParams) -> Any:
    return profile.acceptance(decoder, cache, text, params, ProfileHead(decoder))


def as_prompts(requests: list[Request]) -> list[Prompt]:
    return [Prompt(request) for request in requests]


def reference_logits(reference: Any, prompt_ids: list[int], text: list[int]) -> torch.Tensor:
    """Logits [L, n - 1, V] that every exit, and last the model itself, has for the tokens of a text but the first."""
    first = len(prompt_ids)
    with torch.inference_mode():
        states = reference(torch.tensor([prompt_ids + text]), output_hidden_states=True).hidden_states
        # transformers' last entry is normed already, those before are not.
        normed = [reference.model.norm(state) for state in states[1:-1]] + [states[-1]]
        return torch.stack([reference.lm_head(state)[0, first:-1] for state in normed])


def play(stands: list[bool], k: int, budget: int) -> tuple[int, int]:
    """Rounds and their tokens for a text whose drafts stand or not, written as the engine's loop runs."""
    start = rounds = tokens = 0
    while start < len(stands):
        drafted = min(k, budget - start - 1)
        if drafted == 0:
            start += 1
            continue
        accepted = 0
        while accepted < drafted and start + accepted < len(stands) and stands[start + accepted]:
            accepted += 1
        emitted = min(accepted + 1, len(stands) - start)
        rounds, tokens, start = rounds + 1, tokens + emitted, start + emitted
    return rounds, tokens


@pytest.mark.parametrize("k", [1, 2, 3, 8])
@pytest.mark.parametrize("left", [0, 1, 5], ids=lambda left: f"ends {left} before the budget")
def test_replay_of_zeros_and_ones_is_the_engine_loop(k: int, left: int) -> None:
    draw = random.Random(k)
    for length in (1, 2, 7, 23):
        patterns = [[draw.random() < p for _ in range(length)] for p in (0.0, 0.4, 0.8, 1.0)]
        rounds, tokens = profile.replay(torch.tensor(patterns).double(), k, length + left)
        expected = [play(pattern, k, length + left) for pattern in patterns]
        assert list(zip(rounds.tolist(), tokens.tolist(), strict=True)) == expected


@pytest.mark.parametrize(("k", "left"), [(1, 0), (2, 0), (2, 3), (4, 1)])
def test_replay_of_probabilities_is_the_mean_over_all_outcomes(k: int, left: int) -> None:
    weights = [0.9, 0.2, 0.6, 1.0, 0.5, 0.0, 0.7]
    budget = len(weights) + left
    expected = [0.0, 0.0]
    for stands in itertools.product([False, True], repeat=len(weights)):
        chance = math.prod(w if stand else 1 - w for w, stand in zip(weights, stands, strict=True))
        for index, value in enumerate(play(list(stands), k, budget)):
            expected[index] += chance * value
    rounds, tokens = profile.replay(torch.tensor([weights], dtype=torch.float64), k, budget)
    assert [rounds.item(), tokens.item()] == pytest.approx(expected, rel=1e-12)


def test_rounds_do_not_start_everywhere() -> None:
    # Two tokens that stand, then one that does not, again and again: every round emits 3. Starting at all positions
    # alike would give (3 + 2 + 1)/3 = 2.
    weights = torch.tensor([[1.0, 1.0, 0.0] * 10], dtype=torch.float64)
    rounds, tokens = profile.replay(weights, 4, 100)
    assert (rounds.item(), tokens.item()) == (10, 30)


def real_counts(engine: Engine, request: Request, exit_layer: int, k: int) -> tuple[int, int]:
    """Rounds of really decoding, and the tokens they emitted."""
    _, stats = engine.generate([request], GREEDY, LayerSkipDrafter(engine.decoder, exit_layer), DraftPolicy(k))
    return stats.rounds, stats.emitted - stats.from_prefill - stats.plain_steps


def test_greedy_profile_is_exactly_what_decoding_does(
    both_ops: None, deep: LayeredDecoder, make_requests: MakeRequests
) -> None:
    # In the reference arithmetic prompts are generated one by one, which fewer cells tell.
    exits, ks = (
        ((1, 5), (1, 4)) if deep.mode(1, many_rows=False) == "reference" else (range(1, NUM_LAYERS), (1, 2, 4, 8))
    )
    engine, requests = Engine(deep, numerics="fast"), make_requests(6, 34)
    found = profile.profile_exits(engine, as_prompts(requests), GREEDY, 8)
    assert (found.num_prompts, found.num_tokens, found.positions, found.own) == (6, 6 * 34, 6 * 33, 1.0)
    assert set(found.tokens_per_round) == {(e, k) for e in range(1, NUM_LAYERS) for k in range(1, 9)}
    assert 0.1 < found.alpha[1] < found.alpha[7] < 1, "these exits agree too seldom or too often to test anything"
    for exit_layer in exits:
        for k in ks:
            counts = [real_counts(engine, request, exit_layer, k) for request in requests]
            for tally, expected in zip(found.tallies, counts, strict=True):
                assert (tally.rounds[k - 1][exit_layer - 1], tally.tokens[k - 1][exit_layer - 1]) == expected
            rounds, tokens = map(sum, zip(*counts, strict=True))
            assert found.tokens_per_round[exit_layer, k] == tokens / rounds, (exit_layer, k)


def test_prompts_are_generated_together_where_their_bits_allow(
    both_ops: None, deep: LayeredDecoder, request: pytest.FixtureRequest
) -> None:
    together = profile.Profiler(Engine(deep, numerics="fast"), GREEDY, 2, "generated").together
    assert together == (profile.TOGETHER if deep.mode(1, many_rows=False) == "compiled" else 1)


def test_texts_cut_by_end_tokens_in_one_batch(deep: LayeredDecoder, make_requests: MakeRequests) -> None:
    requests = make_requests(4, 30)
    plain = Engine(deep, numerics="fast")
    texts = [plain.generate([request], GREEDY)[0][0].token_ids for request in requests]
    engine = Engine(deep, numerics="fast", end_tokens=(texts[0][9], texts[1][17]))
    found = profile.profile_exits(engine, as_prompts(requests), GREEDY, 6)
    lengths = [len(engine.generate([request], GREEDY)[0][0].token_ids) for request in requests]
    assert len(set(lengths)) > 1 and any(2 < length < 30 for length in lengths)
    assert {tally.prompt: tally.num_tokens for tally in found.tallies} == {
        request.id: length for request, length in zip(requests, lengths, strict=True) if length > 1
    }
    by_id = {request.id: request for request in requests}
    for exit_layer, k in [(2, 3), (4, 6), (7, 6)]:
        for tally in found.tallies:
            rounds, tokens = real_counts(engine, by_id[tally.prompt], exit_layer, k)
            assert tally.rounds[k - 1][exit_layer - 1] == rounds
            # The engine cuts what is emitted at the end token, as the profile does.
            assert tally.tokens[k - 1][exit_layer - 1] == tokens


def test_greedy_acceptance_against_the_hidden_states_of_transformers(
    deep: LayeredDecoder, make_requests: MakeRequests, prefilled: Prefilled, deep_reference: Any
) -> None:
    request = make_requests(4, 90)[-1]
    [text], _ = Engine(deep, numerics="fast").generate([request], GREEDY)
    weights, own = accept(deep, prefilled(deep, request.prompt_ids), text.token_ids, GREEDY)
    logits = reference_logits(deep_reference, request.prompt_ids, text.token_ids)
    expected = (logits.argmax(-1) == torch.tensor(text.token_ids[1:])).double()
    assert (weights.shape, weights.dtype, own) == ((7, 89), torch.float64, 89.0)
    assert torch.equal(weights, expected[:-1])


@pytest.mark.parametrize("params", SAMPLED.values(), ids=SAMPLED.keys())
def test_sampled_acceptance_against_the_hidden_states_of_transformers(
    params: SamplingParams, deep: LayeredDecoder, make_requests: MakeRequests, prefilled: Prefilled, deep_reference: Any
) -> None:
    """Number by number: within rounding, and within what the profile says it leaves out.

    A weight below LEAST_WEIGHT may be 0. Under top-p alone one may come from bounds that are 1 % apart, so it is at
    most 0.5 % off, and a little more as the two means are of different kinds.
    """
    request = make_requests(4, 90)[-1]
    [text], _ = Engine(deep, numerics="fast").generate([request], params)
    weights, own = accept(deep, prefilled(deep, request.prompt_ids), text.token_ids, params)
    logits = reference_logits(deep_reference, request.prompt_ids, text.token_ids)
    chosen = torch.tensor(text.token_ids[1:]).expand(NUM_LAYERS, -1)[..., None]
    found = distribution(logits, params).double().gather(-1, chosen)[..., 0]
    expected = (found[:-1] / found[-1]).clamp_max(1)
    assert (weights.shape, own) == ((7, 89), 89.0)
    small = expected < profile.LEAST_WEIGHT
    assert small.any() or params == SAMPLED["plain"], "nothing to leave out"
    assert small.sum() < small.numel() / 2 and 0.1 < expected.mean() < 0.9, "too easy to test anything"
    assert (weights[small] <= profile.LEAST_WEIGHT * 1.01).all()
    relative = 0.006 if params.top_p < 1 and not params.top_k else 1e-4
    torch.testing.assert_close(weights[~small], expected[~small], atol=1e-5, rtol=relative)


def test_bounds_under_top_p_are_used_and_others_computed(
    deep: LayeredDecoder, make_requests: MakeRequests, prefilled: Prefilled, monkeypatch: pytest.MonkeyPatch
) -> None:
    params, request, sorted_rows = SAMPLED["top-p"], make_requests(4, 60)[-1], []
    [text], _ = Engine(deep, numerics="fast").generate([request], params)

    def spy(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
        sorted_rows.append(len(logits))
        return distribution(logits, params)

    monkeypatch.setattr(profile, "distribution", spy)
    accept(deep, prefilled(deep, request.prompt_ids), text.token_ids, params)
    assert 59 <= sum(sorted_rows) < 59 * NUM_LAYERS * 0.8, "every row was sorted"


@pytest.mark.parametrize("params", [GREEDY, *SAMPLED.values()], ids=["greedy", *SAMPLED])
def test_chunks_change_nothing(
    params: SamplingParams, deep: LayeredDecoder, prefilled: Prefilled, monkeypatch: pytest.MonkeyPatch
) -> None:
    from selfspec_tune.sweep import head

    prompt, text = [4, 90, 17], [5, 9, 77, 3, 100, 41, 12, 8, 64, 33, 2]
    whole, _ = accept(deep, prefilled(deep, prompt), text, params)
    monkeypatch.setattr(profile, "HEAD_CHUNK", 3)
    monkeypatch.setattr(profile, "PREFILL_CHUNK", 4)
    monkeypatch.setattr(head, "ROW_CHUNK", 5)
    monkeypatch.setattr(head, "VOCAB_CHUNK", 11)
    parts, _ = accept(deep, prefilled(deep, prompt), text, params)
    torch.testing.assert_close(parts, whole, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["cool", "plain", "top-p"])
def test_sampled_profile_predicts_the_rounds_of_sampling(
    name: str, deep: LayeredDecoder, make_requests: MakeRequests
) -> None:
    """τ of real sampled decoding lies in the 99 % interval of the computed one.

    Both are ratios of sums over texts drawn apart, so the interval of their difference holds the variance of either
    (delta method). A right implementation leaves it with probability 1 % per cell, 9 % that any of the 9 here does; the
    seeds are fixed, so it either does or does not.
    """
    [request], count, params = make_requests(1, 16), 100, SAMPLED[name]
    engine = Engine(deep, numerics="fast")
    texts = [Prompt(Request(f"text {number}", request.prompt_ids, 16)) for number in range(count)]
    found = profile.profile_exits(engine, texts, params, 8)
    for exit_layer, k in [(2, 1), (4, 3), (7, 8)]:
        drafter, played = LayerSkipDrafter(deep, exit_layer), []
        for number in range(count):
            other = Request(f"round {number}", request.prompt_ids, 16)
            _, stats = engine.generate([other], params, drafter, DraftPolicy(k))
            played.append((stats.rounds, stats.emitted - stats.from_prefill - stats.plain_steps))
        computed = [(t.rounds[k - 1][exit_layer - 1], t.tokens[k - 1][exit_layer - 1]) for t in found.tallies]
        (real, real_variance), (tau, variance) = ratio(played), ratio(computed)
        assert tau == pytest.approx(found.tokens_per_round[exit_layer, k])
        half = 2.576 * math.sqrt(variance + real_variance)
        assert half < 0.12 * tau, "too wide to tell anything"
        assert abs(real - tau) < half, (exit_layer, k, real, tau, half)


def ratio(pairs: Any) -> tuple[float, float]:
    """Σ tokens / Σ rounds of (rounds, tokens), and its variance by the delta method."""
    rounds, tokens = torch.tensor(pairs, dtype=torch.float64).T
    value = tokens.sum() / rounds.sum()
    residuals = (tokens - value * rounds) / rounds.mean()
    return value.item(), (residuals.square().sum() / (len(rounds) - 1) / len(rounds)).item()


ANSWERS = [(5, 9, 77, 3, 100, 41), (12, 8, 64), (33, 2, 90, 90, 7, 1, 55, 8, 19), (9,), (70, 71, 72, 73)]


@pytest.mark.parametrize(
    "params", [GREEDY, SAMPLED["top-p"], SAMPLED["top-k and top-p"]], ids=["greedy", "top-p", "top-k and top-p"]
)
def test_a_reference_answer_is_profiled_without_generating(
    params: SamplingParams,
    deep: LayeredDecoder,
    make_requests: MakeRequests,
    deep_reference: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests = make_requests(len(ANSWERS), 24)
    prompts = [Prompt(request, "", answer) for request, answer in zip(requests, ANSWERS, strict=True)]
    engine = Engine(deep, numerics="fast")
    monkeypatch.setattr(Engine, "generate", lambda *_, **__: pytest.fail("text was generated"))
    # Whoever used the decoder before may have left it in any state.
    monkeypatch.setattr(deep, "tap", "of another drafter")
    found = profile.profile_exits(engine, prompts, params, 4, "reference")
    assert [tally.prompt for tally in found.tallies] == [r.id for r in requests if r.id != requests[3].id]
    kept = [prompt for prompt in prompts if len(prompt.answer_ids or ()) > 1]
    for tally, prompt in zip(found.tallies, kept, strict=True):
        answer = list(prompt.answer_ids or ())
        logits = reference_logits(deep_reference, prompt.request.prompt_ids, answer)
        if params.greedy:
            expected = (logits[:-1].argmax(-1) == logits[-1].argmax(-1)).double()
        else:
            p = distribution(logits, params).double()
            expected = torch.minimum(p[:-1], p[-1]).sum(-1)
        assert tally.num_tokens == len(answer) and tally.positions == tally.own == len(answer) - 1
        torch.testing.assert_close(torch.tensor(tally.accepted).double(), expected.sum(-1), atol=1e-4, rtol=1e-4)
        rounds, _ = profile.replay(expected, 3, 23)
        torch.testing.assert_close(torch.tensor(tally.rounds[2]).double(), rounds, atol=1e-4, rtol=1e-4)


def test_texts_without_a_second_token_are_a_user_error(deep: LayeredDecoder, make_requests: MakeRequests) -> None:
    engine = Engine(deep, numerics="fast", end_tokens=tuple(range(128)))
    with pytest.raises(UserError, match="too short to profile"):
        profile.profile_exits(engine, as_prompts(make_requests(2, 24)), GREEDY, 2)


def test_near_ties_of_bf16_fall_as_when_decoding(make_requests: MakeRequests) -> None:
    """The compiled ops give every row of a call the bits it has when decoded, so the profile is exact in bf16 too."""
    decoder = LayeredDecoder(tiny_model(late=0.3, eos_token_id=None, pad_token_id=None).bfloat16())
    engine, requests = Engine(decoder), make_requests(3, 40)
    found = profile.profile_exits(engine, as_prompts(requests), GREEDY, 4)
    assert found.own == 1.0
    for exit_layer, k in [(1, 2), (3, 1), (4, 4), (5, 3)]:
        stats = [
            engine.generate([r], GREEDY, LayerSkipDrafter(decoder, exit_layer), DraftPolicy(k))[1] for r in requests
        ]
        rounds = sum(each.rounds for each in stats)
        tokens = sum(each.accepted + each.rounds for each in stats)
        assert found.tokens_per_round[exit_layer, k] == tokens / rounds, (exit_layer, k)
