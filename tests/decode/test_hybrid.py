"""Copying and layer skip in one run: who is asked, who learns what, and that output stays as it was."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from tiny import tiny_model

from selfspec_tune.decode.drafters import Draft, Drafter, Source
from selfspec_tune.decode.drafters.hybrid import HybridDrafter
from selfspec_tune.decode.drafters.layer_skip import LayerSkipDrafter
from selfspec_tune.decode.drafters.prompt_lookup import PromptLookupDrafter
from selfspec_tune.decode.engine import Engine
from selfspec_tune.decode.policy import DraftPolicy
from selfspec_tune.decode.requests import Request
from selfspec_tune.decode.sampling import SamplingParams
from selfspec_tune.model.decoder import LayeredDecoder


class Recorder(Drafter):
    """Notes its calls and proposes one token."""

    def __init__(self, name: str, token: int, offers: int = 1, exit_layer: int | None = None) -> None:
        self.name, self.token, self.exit_layer = name, token, exit_layer
        self.offers = [Source(name, str(number)) for number in range(offers)]
        self.calls: list = []

    def start(self, texts):
        self.calls.append(("start", texts))

    def extend(self, row, tokens):
        self.calls.append(("extend", row, tokens))

    def sources(self):
        return self.offers

    def propose(self, last, cache, k, choose, source, enough=None):
        self.calls.append(("propose", k, source.quality, enough()))
        return Draft(torch.full((1, k), self.token), None, None, 0)


def test_both_learn_and_the_one_that_offered_proposes():
    copy, other = Recorder("copy", 1, offers=2), Recorder("layer-skip", 2, exit_layer=3)
    hybrid = HybridDrafter(copy, other)
    assert (hybrid.name, hybrid.exit_layer) == ("hybrid", 3)
    assert hybrid.sources() == [Source("copy", "0"), Source("copy", "1"), Source("layer-skip", "0")]
    hybrid.start([[1], [2]])
    hybrid.extend(1, [5, 6])
    assert copy.calls == other.calls == [("start", [[1], [2]]), ("extend", 1, [5, 6])]
    drafts = [
        hybrid.propose(torch.tensor([0]), None, k, None, source, lambda: True).tokens.tolist()
        for k, source in ((2, copy.offers[1]), (3, other.offers[0]))
    ]
    assert drafts == [[[1, 1]], [[2, 2, 2]]]
    assert copy.calls[2:] == [("propose", 2, "1", True)]
    assert other.calls[2:] == [("propose", 3, "0", True)]


def test_without_a_match_only_the_other_is_offered():
    copy, other = Recorder("copy", 1, offers=0), Recorder("layer-skip", 2)
    assert HybridDrafter(copy, other).sources() == [Source("layer-skip", "0")]


def test_two_drafters_of_one_name_are_refused():
    with pytest.raises(ValueError, match="copy"):
        HybridDrafter(Recorder("copy", 1), Recorder("copy", 2))


class Alternating(DraftPolicy):
    """Takes the first source in two rounds of three, the last in the third, and counts per drafter."""

    def __init__(self, k: int) -> None:
        super().__init__(k)
        self.accepted: Counter[str] = Counter()
        self.rejected: Counter[str] = Counter()
        self.switches = 0
        self.asked = 0
        self.previous = ""

    def next(self, remaining, sources):
        self.asked += 1
        planned = super().next(remaining, sources[:1] if self.asked % 3 else sources[-1:])
        if planned:
            self.switches += planned[0].drafter != self.previous
            self.previous = planned[0].drafter
        return planned

    def observe(self, source, k, accepted):
        self.accepted[source.drafter] += accepted
        self.rejected[source.drafter] += accepted < k


VOCAB = 16
"""So few tokens that a random model repeats itself, now and then as it did before."""


def small_decoder(dtype: torch.dtype = torch.float32) -> LayeredDecoder:
    return LayeredDecoder(tiny_model(late=0.3, vocab_size=VOCAB, eos_token_id=None, pad_token_id=None).to(dtype))


def repetitive(row: int) -> list[int]:
    """A prompt in which a piece comes again."""
    piece = [(37 * row + 11 * number) % 255 % VOCAB for number in range(15)]
    return [*piece, 8, *piece, 9 + row, *piece[:5]] * (row + 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch", [1, 3])
def test_greedy_text_and_logits_equal_plain_decoding_however_the_drafters_alternate(dtype, batch):
    decoder = small_decoder(dtype)
    engine = Engine(decoder, batch_size=batch, keep_logits=True)
    requests = [Request(str(row), repetitive(row), 200 - 30 * row) for row in range(batch)]
    plain, _ = engine.generate(requests, SamplingParams())
    policy = Alternating(5)
    drafter = HybridDrafter(PromptLookupDrafter(), LayerSkipDrafter(decoder, 3))
    mixed, stats = engine.generate(requests, SamplingParams(), drafter, policy)
    assert (stats.drafter, stats.exit_layer) == ("hybrid", 3)
    for name in ("copy", "layer-skip"):
        assert policy.accepted[name] > 0 and policy.rejected[name] > 0
    assert policy.switches > 10
    for one, other in zip(plain, mixed, strict=True):
        assert one.token_ids == other.token_ids
        assert all(map(torch.equal, one.logits, other.logits))


def test_shared_noise_gives_the_same_text_however_the_drafters_alternate():
    decoder = small_decoder()
    engine = Engine(decoder, batch_size=2)
    params = SamplingParams(0.7, top_k=8, seed=4, reproducible=True)
    requests = [Request(str(row), repetitive(row), 150) for row in range(2)]
    plain, _ = engine.generate(requests, params)
    policy = Alternating(5)
    drafter = HybridDrafter(PromptLookupDrafter(), LayerSkipDrafter(decoder, 3))
    mixed, _ = engine.generate(requests, params, drafter, policy)
    assert policy.accepted["copy"] > 0 and policy.accepted["layer-skip"] > 0
    assert [completion.token_ids for completion in mixed] == [completion.token_ids for completion in plain]
