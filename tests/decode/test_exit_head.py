"""Drafting with a head after exit E: the output is plain decoding's, and the head never reads a hole in its own cache.

A head at the last exit that was not trained is a copy of the last layer, so its drafts are what the target says: every
one must be accepted, however rounds, plain steps and other drafters' rounds alternate. One stale slot would show.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import tiny_model

from selfspec_tune.artifact import EXIT_HEAD_FILE, fingerprint
from selfspec_tune.decode.drafters import Draft
from selfspec_tune.decode.drafters.exit_head import ExitHeadDrafter
from selfspec_tune.decode.engine import Engine
from selfspec_tune.decode.policy import DraftPolicy
from selfspec_tune.decode.requests import Completion, Request
from selfspec_tune.decode.sampling import SamplingParams
from selfspec_tune.errors import UserError
from selfspec_tune.model.cache import SharedKVCache
from selfspec_tune.model.decoder import LayeredDecoder
from selfspec_tune.model.exit_head import ExitHead, HeadFacts, load_exit_head, read_facts, save_exit_head

GREEDY = SamplingParams()
# The head is not padded to certified row counts, and runs here in calls of other sizes: fp32, a few layers deep.
TOLERANCE = {"rtol": 0.0, "atol": 2e-4}


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(255, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def make(
    exit_layer: int = 2,
    *,
    dtype: torch.dtype = torch.float32,
    numerics: str = "exact",
    batch_size: int = 1,
    fused: bool = True,
    drafter: type[ExitHeadDrafter] = ExitHeadDrafter,
    **settings: Any,
) -> tuple[Engine, ExitHeadDrafter]:
    """An engine over a tiny model, and a drafter whose head is untrained: a copy of layer E and the final norm."""
    model = tiny_model(settings.pop("model_type", "llama"), late=settings.pop("late", 0.3), **settings).to(dtype)
    decoder = LayeredDecoder(model, fused=fused)
    made = drafter(decoder, ExitHead(model, exit_layer, dtype))
    return Engine(decoder, numerics=numerics, batch_size=batch_size, keep_logits=True), made


def differences(plain: Completion, other: Completion) -> list[int]:
    """Positions whose token or logits differ in any bit."""
    assert len(plain.token_ids) == len(other.token_ids)
    pairs = zip(plain.token_ids, other.token_ids, plain.logits, other.logits, strict=True)
    return [i for i, (a, b, p, q) in enumerate(pairs) if a != b or not torch.equal(p, q)]


class Mixed(DraftPolicy):
    """k = 3, a plain step, k = 1, k = 3, ..."""

    def next(self, remaining: int, sources: Any) -> Any:
        self._rounds += 1
        k = min((3, 0, 1)[self._rounds % 3], remaining - 1)
        return (sources[0], k) if k > 0 else None


class Alternating(ExitHeadDrafter):
    """In every second round it drafts as a copying drafter does: tokens from nowhere, no hidden states."""

    rounds = 0

    def propose(self, last: torch.Tensor, cache: SharedKVCache, k: int, choose: Any, source: Any, *rest: Any) -> Draft:
        self.rounds += 1
        if self.rounds % 2:
            return super().propose(last, cache, k, choose, source, *rest)
        return Draft(last[:, None].expand(-1, k).contiguous(), None, None, 0)


REQUESTS = [Request("a", prompt(110), 60), Request("b", prompt(9, 1), 60)]


@pytest.mark.usefixtures("both_ops")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("exit_layer", [1, 3, 5])
def test_exact_numerics_give_the_bits_of_plain_decoding(dtype: torch.dtype, exit_layer: int) -> None:
    engine, drafter = make(exit_layer, dtype=dtype)
    plain = engine.generate(REQUESTS[:1], GREEDY)[0][0]
    for k in (1, 4):
        completions, stats = engine.generate(REQUESTS[:1], GREEDY, drafter, DraftPolicy(k))
        assert differences(plain, completions[0]) == []
        assert stats.accepted > 0 and stats.drafter == "exit-head" and stats.exit_layer == exit_layer


@pytest.mark.parametrize("numerics", ["exact", "fast"])
def test_a_batch_of_ragged_rows_decodes_as_plain(numerics: str) -> None:
    engine, drafter = make(batch_size=2, numerics=numerics)
    plain = engine.generate(REQUESTS, GREEDY)[0]
    for policy in (DraftPolicy(3), Mixed(3)):
        completions, stats = engine.generate(REQUESTS, GREEDY, drafter, policy)
        assert stats.accepted > 0
        for one, other in zip(plain, completions, strict=True):
            assert one.token_ids == other.token_ids
            assert numerics == "fast" or differences(one, other) == []
    # One request in two rows: the idle row must not disturb the other.
    assert engine.generate(REQUESTS[:1], GREEDY, drafter, DraftPolicy(3))[0][0].token_ids == plain[0].token_ids


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(
    "family",
    [
        {},
        {"model_type": "qwen3"},
        {"model_type": "mistral", "sliding_window": 40},
        {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 40, "max_window_layers": 3},
    ],
)
@pytest.mark.parametrize("policy", [DraftPolicy, Mixed])
def test_a_copy_of_the_last_layer_is_never_rejected(family: dict, policy: type[DraftPolicy], fused: bool) -> None:
    engine, drafter = make(5, late=1.0, fused=fused, **family)
    request = Request("a", prompt(100), 80)
    stats = engine.generate([request], GREEDY, drafter, policy(3))[1]
    assert stats.drafted > 30 and stats.accepted == stats.drafted


def full_pass(drafter: ExitHeadDrafter, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The head's keys and values [Hkv, T, D] from one pass over a whole text."""
    decoder, exit_layer = drafter.decoder, drafter.exit_layer
    assert exit_layer is not None
    cache = decoder.new_cache(1, len(tokens))
    positions = torch.arange(len(tokens))[None]
    hidden = decoder.embed(torch.tensor([tokens]))
    with torch.inference_mode():
        hidden = decoder.run_layers(hidden, positions, cache, 0, exit_layer, pad=False)
        decoder.run_layers(hidden, positions, cache, drafter.layer, drafter.layer + 1, pad=False)
    return cache.keys[drafter.layer, 0, :, : len(tokens)], cache.values[drafter.layer, 0, :, : len(tokens)]


def holes(engine: Engine, drafter: ExitHeadDrafter, policy: DraftPolicy, requests: list[Request]) -> list[int]:
    """Decode, poisoning stale slots, and return the positions at which the head's cache is not that of a full pass."""
    engine.after_commit = lambda cache: cache.poison()
    completions = engine.generate(requests, GREEDY, drafter, policy)[0]
    cache = engine._cache
    assert cache is not None
    wrong = []
    for row, (request, completion) in enumerate(zip(requests, completions, strict=True)):
        # All but the newest token are in the cache; a finished row's drafts may be behind them.
        tokens = request.prompt_ids + completion.token_ids[:-1]
        expected = full_pass(drafter, tokens)
        found = cache.keys[drafter.layer, row], cache.values[drafter.layer, row]
        for position in range(len(tokens)):
            pairs = [(f[:, position], e[:, position]) for f, e in zip(found, expected, strict=True)]
            if not all(torch.allclose(f, e, **TOLERANCE) for f, e in pairs):
                wrong.append(position)
    return wrong


@pytest.mark.usefixtures("both_ops")
@pytest.mark.parametrize("drafter", [ExitHeadDrafter, Alternating])
@pytest.mark.parametrize("policy", [DraftPolicy, Mixed])
def test_the_heads_cache_is_that_of_one_full_pass(drafter: type[ExitHeadDrafter], policy: type[DraftPolicy]) -> None:
    engine, made = make(3, batch_size=2, drafter=drafter)
    assert holes(engine, made, policy(3), REQUESTS) == []


def test_drafts_are_what_the_head_says_with_its_own_layer_and_norm() -> None:
    engine, _ = make(batch_size=1)
    decoder = engine.decoder
    head = ExitHead(decoder.model, 3, torch.float32)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * parameter.abs().mean())
    proposed: list[tuple[int, int]] = []

    class Recording(ExitHeadDrafter):
        def propose(self, last: Any, cache: SharedKVCache, k: int, *rest: Any) -> Draft:
            draft = super().propose(last, cache, k, *rest)
            proposed.append((int(cache.committed[0]), int(draft.tokens[0, 0])))
            return draft

    drafter = Recording(decoder, head)
    tokens = REQUESTS[0].prompt_ids + engine.generate(REQUESTS[:1], GREEDY, drafter, Mixed(3))[0][0].token_ids
    cache, positions = decoder.new_cache(1, len(tokens)), torch.arange(len(tokens))[None]
    decoder.tap = None
    with torch.inference_mode():
        hidden = decoder.run_layers(decoder.embed(torch.tensor([tokens])), positions, cache, 0, 3, pad=False)
        hidden = decoder.run_layers(hidden, positions, cache, drafter.layer, drafter.layer + 1, pad=False)
        logits = torch.nn.functional.linear(head.norm(hidden[0]), decoder.model.lm_head.weight)
    assert len(proposed) > 10
    for position, token in proposed:
        # The best, or so close to it that rounding may decide.
        assert logits[position, token] >= logits[position].max() - 1e-3


class TestBrokenDraftersLeaveHoles:
    """Each of these drafts correctly at first sight: the output is exact whatever the head reads."""

    def test_without_the_tap(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ExitHeadDrafter, "start", lambda self, texts: None)
        assert holes(*make(3), DraftPolicy(3), REQUESTS[:1])

    def test_without_the_pass_of_the_last_drafted_token(self, monkeypatch: pytest.MonkeyPatch) -> None:
        genuine = ExitHeadDrafter.propose

        def propose(self: ExitHeadDrafter, last: Any, cache: SharedKVCache, k: int, *rest: Any) -> Draft:
            draft = genuine(self, last, cache, k, *rest)
            cache._storage[self.layer, :, :, 0, int(cache.committed[0]) + k] = 0
            return draft

        monkeypatch.setattr(ExitHeadDrafter, "propose", propose)
        assert holes(*make(5, late=1.0), DraftPolicy(3), REQUESTS[:1])


def test_shared_noise_samples_the_same_text_with_and_without_the_head() -> None:
    engine, drafter = make(batch_size=2)
    params = SamplingParams(temperature=0.9, top_k=40, seed=3, reproducible=True)
    plain = engine.generate(REQUESTS, params)[0]
    completions, stats = engine.generate(REQUESTS, params, drafter, DraftPolicy(3))
    assert [c.token_ids for c in plain] == [c.token_ids for c in completions] and stats.accepted > 0
    ratio = SamplingParams(temperature=0.9, seed=3)
    assert engine.generate(REQUESTS, ratio, drafter, DraftPolicy(3))[1].accepted > 0


def test_a_head_made_after_the_first_request_finds_room_in_the_cache() -> None:
    model = tiny_model()
    engine = Engine(LayeredDecoder(model))
    request = Request("a", prompt(30), 20)
    plain = engine.generate([request], GREEDY)[0][0]
    drafter = ExitHeadDrafter(engine.decoder, ExitHead(model, 3, torch.float32))
    drafted, stats = engine.generate([request], GREEDY, drafter, DraftPolicy(3))
    assert stats.rounds > 0 and drafted[0].token_ids == plain.token_ids


def test_the_heads_layer_is_behind_the_models_in_the_one_cache() -> None:
    engine, drafter = make()
    assert drafter.layer == engine.decoder.num_layers == 6
    cache = engine.decoder.new_cache(2, 10)
    assert cache.num_layers == 7 and cache.row(1).num_layers == 7
    assert cache.row(1).keys[6].data_ptr() == cache.keys[6, 1].data_ptr()


@pytest.fixture
def with_head(save_tiny: Callable[..., Path]) -> Path:
    """A checkpoint with an untrained head for exit 2 beside it."""
    from transformers import AutoModelForCausalLM

    directory = save_tiny("headed", late=0.3)
    model = AutoModelForCausalLM.from_pretrained(directory)
    facts = HeadFacts(2, fingerprint(directory), "kl", 7, {"seed": 1})
    save_exit_head(directory, ExitHead(model, 2, torch.float32), facts, torch.float32)
    return directory


def test_a_head_is_read_back_with_its_facts(with_head: Path) -> None:
    facts = read_facts(with_head)
    assert (facts.exit_layer, facts.loss, facts.steps, facts.config) == (2, "kl", 7, {"seed": 1})
    decoder = LayeredDecoder(tiny_model(late=0.3))
    drafter = ExitHeadDrafter.beside(with_head, decoder)
    assert drafter.exit_layer == 2
    plain, _ = Engine(decoder).generate(REQUESTS[:1], GREEDY)
    completions, stats = Engine(decoder).generate(REQUESTS[:1], GREEDY, drafter, DraftPolicy(3))
    assert plain[0].token_ids == completions[0].token_ids and stats.accepted > 0


def refused(checkpoint: Path, model: Any = None) -> str:
    with pytest.raises(UserError) as caught:
        load_exit_head(checkpoint, model or tiny_model(late=0.3))
    assert "selfspec train --method exit-head" in str(caught.value)
    return str(caught.value)


def test_a_head_for_other_weights_is_refused(with_head: Path) -> None:
    weights = load_file(with_head / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] + 1
    save_file(weights, with_head / "model.safetensors", metadata={"format": "pt"})
    assert "other weights" in refused(with_head)


def test_a_missing_or_broken_head_is_refused(with_head: Path) -> None:
    path = with_head / EXIT_HEAD_FILE
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    assert "cannot be read" in refused(with_head)
    save_file({"norm.weight": torch.ones(3)}, path, metadata={"format": "pt"})
    assert "cannot be read" in refused(with_head)
    path.unlink()
    assert "has no exit head" in refused(with_head)


def test_a_head_of_another_schema_place_or_shape_is_refused(with_head: Path) -> None:
    def rewrite(facts: HeadFacts, hidden_size: int = 96) -> None:
        model = tiny_model(late=0.3, hidden_size=hidden_size)
        save_exit_head(with_head, ExitHead(model, 2, torch.float32), facts, torch.float32)

    mark = fingerprint(with_head)
    rewrite(HeadFacts(2, mark, "kl", 7, {}, schema_version=2))
    assert "schema" in refused(with_head)
    rewrite(HeadFacts(6, mark, "kl", 7, {}))
    assert "no place" in refused(with_head)
    rewrite(HeadFacts(2, mark, "kl", 7, {}), hidden_size=48)
    assert "does not fit" in refused(with_head)
