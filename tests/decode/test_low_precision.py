"""Quantised copies of the model's own weights as the draft: exact output, exact prefix, no second cache."""

from __future__ import annotations

import pytest
import torch
from selfspec_kernels import PackedWeight, cpu
from tiny import tiny_model

from selfspec_tune.decode.drafters import low_precision
from selfspec_tune.decode.drafters.low_precision import LowPrecisionDrafter
from selfspec_tune.decode.engine import Engine
from selfspec_tune.decode.policy import DraftPolicy
from selfspec_tune.decode.price import draft_costs
from selfspec_tune.decode.requests import Request
from selfspec_tune.decode.sampling import SamplingParams
from selfspec_tune.errors import UserError
from selfspec_tune.model.decoder import LayeredDecoder

GREEDY = SamplingParams()
PROMPTS = [list(range(20, 60)), [7, 8, 9], list(range(100, 230))]


def engine_for(dtype: torch.dtype = torch.float32, batch_size: int = 1, **settings) -> Engine:
    return Engine(LayeredDecoder(tiny_model(**settings).to(dtype)), batch_size=batch_size, keep_logits=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits, exit_layer, group", [(8, None, 32), (4, None, 32), (4, 3, 32), (4, None, 64)])
def test_greedy_equals_plain_bit_for_bit(dtype, bits, exit_layer, group):
    engine = engine_for(dtype, batch_size=3)
    requests = [Request(str(i), prompt, 60 - 10 * i) for i, prompt in enumerate(PROMPTS)]
    plain, _ = engine.generate(requests, GREEDY)
    drafter = LowPrecisionDrafter(engine.decoder, bits, exit_layer=exit_layer, group=group)
    for k in (1, 4, 8):
        drafted, stats = engine.generate(requests, GREEDY, drafter, DraftPolicy(k))
        assert stats.accepted > 0
        for mine, theirs in zip(plain, drafted, strict=True):
            assert mine.token_ids == theirs.token_ids
            assert all(torch.equal(p, q) for p, q in zip(mine.logits, theirs.logits, strict=True))


def test_more_bits_are_accepted_more_often_and_8_nearly_always():
    engine = engine_for()
    fractions = {}
    for bits, head_bits in ((8, 8), (4, 8), (4, 4)):
        drafter = LowPrecisionDrafter(engine.decoder, bits, head_bits)
        stats = [engine.generate([Request("a", p, 60)], GREEDY, drafter, DraftPolicy(4))[1] for p in PROMPTS]
        fractions[bits, head_bits] = sum(s.accepted for s in stats) / sum(s.tested for s in stats)
    assert fractions[4, 4] < fractions[4, 8] < fractions[8, 8] and fractions[8, 8] > 0.9


def test_shared_noise_gives_the_same_text_with_and_without_a_draft():
    engine = engine_for()
    drafter = LowPrecisionDrafter(engine.decoder, 4)
    params = SamplingParams(temperature=0.9, top_p=0.95, seed=3, reproducible=True)
    request = Request("a", PROMPTS[0], 60)
    [plain], _ = engine.generate([request], params)
    [drafted], stats = engine.generate([request], params, drafter, DraftPolicy(4))
    assert plain.token_ids == drafted.token_ids and 0 < stats.accepted < stats.drafted


def test_verification_overwrites_the_drafts_keys_and_values():
    """After a round the committed prefix is what plain decoding wrote, to the bit."""
    engine, caches = engine_for(), []
    engine.after_commit = lambda cache: caches.append((cache.committed.clone(), cache.keys.clone()))
    request = Request("a", PROMPTS[0], 20)
    engine.generate([request], GREEDY)
    committed, plain = caches[-1]
    engine.generate([request], GREEDY, LowPrecisionDrafter(engine.decoder, 4), DraftPolicy(3))
    for count, keys in caches[len(caches) // 2 :]:
        end = int(torch.minimum(count, committed)[0])
        assert torch.equal(keys[..., :end, :], plain[..., :end, :])


def test_the_model_keeps_its_weights_and_the_copies_are_as_small_as_said():
    engine = engine_for()
    before = {name: weight.clone() for name, weight in engine.decoder.model.named_parameters()}
    drafter = LowPrecisionDrafter(engine.decoder, 4, 8)
    assert all(torch.equal(weight, before[name]) for name, weight in engine.decoder.model.named_parameters())
    estimate = low_precision.estimate_bytes(engine.decoder, 4, 8, None)
    assert estimate == drafter.num_bytes
    assert isinstance(drafter.head.weight, PackedWeight) and drafter.head.weight.bits == 8
    own_head = LowPrecisionDrafter(engine.decoder, 4, 16)
    assert own_head.head.weight is engine.decoder.head[0] and own_head.head.num_bytes == 0
    estimate = low_precision.estimate_bytes(engine.decoder, 4, 16, None)
    assert estimate == own_head.num_bytes


def test_a_model_of_any_width_drafts():
    engine = engine_for(intermediate_size=40)
    drafter = LowPrecisionDrafter(engine.decoder, 4)
    assert engine.generate([Request("a", PROMPTS[0], 20)], GREEDY, drafter, DraftPolicy(3))[1].accepted > 0


def test_bad_options_and_machines_are_user_errors(monkeypatch):
    decoder = engine_for().decoder
    for arguments in ((5,), (4, 3), (4, 4, 0), (4, 4, decoder.num_layers + 1)):
        with pytest.raises(UserError):
            LowPrecisionDrafter(decoder, *arguments)
    monkeypatch.setattr(low_precision, "estimate_bytes", lambda *_: 1 << 60)
    with pytest.raises(UserError, match="does not fit the memory"):
        LowPrecisionDrafter(decoder)
    monkeypatch.setattr(cpu, "enabled", False)
    with pytest.raises(UserError, match="no fast product") as refused:
        LowPrecisionDrafter(decoder)
    assert "selfspec[cpu]" in str(refused.value) and "selfspec[cuda]" in str(refused.value)


def test_measured_costs_have_a_verification_for_every_k():
    engine = engine_for()
    costs = draft_costs(engine, LowPrecisionDrafter(engine.decoder, 4), repeats=3)
    assert costs.cost_ratio >= 0 and len(costs.verify_ratio) == 8 and costs.verify_ratio[0] > 0
    assert list(costs.verify_ratio) == sorted(costs.verify_ratio), "more rows never cost less, on a busy machine either"
