"""The profile's head against whole logits: argmaxes with their ties, masses of softmax, and rows given up early."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import tiny_model
from torch import Tensor

from selfspec_tune.model.decoder import LayeredDecoder
from selfspec_tune.sweep import head as head_module
from selfspec_tune.sweep.head import ProfileHead

WIDTH, VOCAB = 32, 101


@pytest.fixture(scope="module")
def decoder() -> LayeredDecoder:
    sizes = {"vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 32, "num_attention_heads": 4}
    return LayeredDecoder(tiny_model(num_hidden_layers=1, head_dim=8, eos_token_id=None, pad_token_id=None, **sizes))


@pytest.fixture(params=[None, (11, 25), (100, 64)], ids=["whole", "11 by 25", "one token left"])
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes of which none divides 101 tokens and 60 rows."""
    if request.param:
        monkeypatch.setattr(head_module, "VOCAB_CHUNK", request.param[0])
        monkeypatch.setattr(head_module, "ROW_CHUNK", request.param[1])


def whole_numbers(*shape: int, seed: int) -> Tensor:
    """Small whole numbers: their products and sums are exact, so equals are equal in every order of summation."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).float()


def with_head(decoder: LayeredDecoder, weight: Tensor, bias: Tensor | None, monkeypatch: Any) -> ProfileHead:
    monkeypatch.setattr(decoder, "head", (weight, bias))
    return ProfileHead(decoder)


@pytest.mark.parametrize("with_bias", [False, True], ids=["no bias", "bias"])
def test_a_token_is_chosen_exactly_if_it_is_the_first_argmax(
    with_bias: bool, decoder: LayeredDecoder, chunks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = whole_numbers(VOCAB, WIDTH, seed=1)
    weight[50:] = weight[torch.randint(0, 50, (VOCAB - 50,), generator=torch.Generator().manual_seed(2))]
    bias = whole_numbers(VOCAB, seed=3) if with_bias else None
    head, rows = with_head(decoder, weight, bias, monkeypatch), whole_numbers(60, WIDTH, seed=4)
    logits = torch.nn.functional.linear(rows, weight, bias)
    first = logits.argmax(-1)
    assert ((logits == logits.amax(-1, keepdim=True)).sum(-1) > 1).sum() > 5, "too few ties to test anything"
    for token in range(0, VOCAB, 2):
        tokens = torch.full_like(first, token)
        assert torch.equal(head.choose(rows, tokens), first == tokens), token


def test_choosing_gives_rows_up_once_they_are_beaten(decoder: LayeredDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, rows = whole_numbers(VOCAB, WIDTH, seed=1), whole_numbers(60, WIDTH, seed=4)
    head, sizes = with_head(decoder, weight, None, monkeypatch), recorded(monkeypatch, 10)
    head.choose(rows, torch.nn.functional.linear(rows, weight).argmin(-1))
    assert sizes == [60]


def recorded(monkeypatch: pytest.MonkeyPatch, chunk: int) -> list[int]:
    """Walk the vocabulary in chunks; return a list that is filled with the rows of every product."""
    monkeypatch.setattr(head_module, "VOCAB_CHUNK", chunk)
    sizes, logits = [], ProfileHead.logits

    def spy(self: ProfileHead, rows: Tensor, *where: Any) -> Tensor:
        sizes.append(len(rows))
        return logits(self, rows, *where)

    monkeypatch.setattr(ProfileHead, "logits", spy)
    return sizes


@pytest.mark.parametrize("temperature", [0.05, 0.7, 1.0, 3.0])
@pytest.mark.parametrize("scale", [1.0, 300.0], ids=["usual logits", "huge logits"])
def test_masses_are_those_of_softmax(
    temperature: float, scale: float, decoder: LayeredDecoder, chunks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(5)
    weight, bias = torch.randn(VOCAB, WIDTH, generator=generator) / 4, torch.randn(VOCAB, generator=generator)
    rows = torch.randn(60, WIDTH, generator=generator) * scale
    head = with_head(decoder, weight, bias, monkeypatch)
    logits = torch.nn.functional.linear(rows.double(), weight.double(), bias.double())
    likely, any_token = logits.topk(3, dim=-1).indices, torch.randint(0, VOCAB, (60, 2), generator=generator)
    # fp32 logits are off by a few of their last bits, which a low temperature makes large.
    off = 8 * 2**-24 * logits.abs().max().item() / temperature
    for tokens in torch.cat([likely, any_token], 1).T:
        q, above = exact_masses(logits, tokens, temperature)
        found_q, found_above = head.masses(rows, tokens, temperature, torch.zeros(60), VOCAB)
        assert found_q.isfinite().all() and found_above.isfinite().all()
        torch.testing.assert_close(found_q.double(), q, rtol=2 * off + 1e-5, atol=1e-37)
        torch.testing.assert_close(found_above.double(), above, rtol=2 * off + 1e-5, atol=1e-37)


def exact_masses(logits: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """q(token) and the probability of all tokens above it, in fp64."""
    own, q = logits.gather(1, tokens[:, None]), (logits / temperature).softmax(-1)
    return q.gather(1, tokens[:, None])[:, 0], q.masked_fill(logits <= own, 0).sum(-1)


def test_rows_are_given_up_exactly_if_too_unlikely_or_too_many_are_above(
    decoder: LayeredDecoder, chunks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(6)
    weight = torch.randn(VOCAB, WIDTH, generator=generator) / 4
    rows, tokens = torch.randn(60, WIDTH, generator=generator), torch.randint(0, VOCAB, (60,), generator=generator)
    head = with_head(decoder, weight, None, monkeypatch)
    logits = torch.nn.functional.linear(rows.double(), weight.double())
    q, above = exact_masses(logits, tokens, 0.8)
    rank = (logits > logits.gather(1, tokens[:, None])).sum(-1)
    least = q * torch.where(torch.arange(60) % 2 == 0, 0.99, 1.01)
    for most_above in (VOCAB, 50, *rank[:8:2].tolist()):
        found = head.masses(rows, tokens, 0.8, least.float(), most_above)
        kept = (q >= least) & (rank < most_above)
        assert most_above < 50 or 5 < kept.sum() < 55
        for value, expected in zip(found, (q, above), strict=True):
            assert (value[~kept] == 0).all()
            torch.testing.assert_close(value[kept].double(), expected[kept], rtol=1e-4, atol=1e-6)


def test_masses_of_hopeless_rows_cost_few_products(decoder: LayeredDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(VOCAB, WIDTH, generator=torch.Generator().manual_seed(7))
    rows, tokens = weight[:60], torch.full((60,), 100)
    head, sizes = with_head(decoder, weight, None, monkeypatch), recorded(monkeypatch, 10)
    # Row n is all but certain of token n, so of 60 rows the ten of a chunk are given up with it.
    head.masses(rows, tokens, 1.0, torch.full((60,), 1e-2), VOCAB)
    assert sizes[0] == 60 and sizes[-1] < 60 and sum(sizes) < 60 * 7


@pytest.mark.parametrize("ops", ["compiled", "reference"])
def test_the_wide_head_of_a_cpu_is_the_narrow_one(
    ops: str, save_tiny: Callable[..., Any], request: pytest.FixtureRequest
) -> None:
    if ops == "reference":
        request.getfixturevalue("reference_ops")
    from selfspec_tune.model.decoder import load_decoder

    decoder = load_decoder(str(save_tiny("wide", dtype=torch.bfloat16)))
    hidden = torch.randn(200, decoder.family.hidden_size, generator=torch.Generator().manual_seed(1)).bfloat16()
    head = ProfileHead(decoder)
    with torch.inference_mode():
        narrow = torch.cat([decoder.logits(row[None, None], pad=False)[0] for row in hidden])
        wide = head.logits(head.rows(hidden))
    assert narrow.dtype == wide.dtype == torch.float32
    # One rounding step apart at most, and that seldom: only the order of the fp32 sums differs.
    torch.testing.assert_close(wide, narrow, rtol=2**-7, atol=1e-3)
    assert (wide.argmax(-1) == narrow.argmax(-1)).float().mean() > 0.98
