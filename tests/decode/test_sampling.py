"""Distributions and draws."""

from __future__ import annotations

import pytest
import torch

from selfspec_tune.decode import sampling
from selfspec_tune.decode.sampling import Noise, SamplingParams, distribution, draw, draw_with_gumbel
from selfspec_tune.errors import UserError

LOGITS = torch.tensor([1.0, 3.0, 2.0, 0.0])


@pytest.mark.parametrize(
    "bad", [{"temperature": -1}, {"temperature": float("nan")}, {"top_k": -1}, {"top_p": 0}, {"top_p": 1.1}]
)
def test_bad_parameters_are_user_errors(bad):
    with pytest.raises(UserError):
        SamplingParams(**bad)


def test_temperature():
    torch.testing.assert_close(distribution(LOGITS, SamplingParams(0.5)), (LOGITS * 2).softmax(-1))


def test_top_k_keeps_k_and_ties():
    kept = distribution(LOGITS, SamplingParams(1.0, top_k=2))
    torch.testing.assert_close(kept[[1, 2]], LOGITS[[1, 2]].softmax(-1))
    assert kept[[0, 3]].tolist() == [0, 0]
    assert distribution(torch.tensor([1.0, 1.0, 0.0]), SamplingParams(1.0, top_k=1)).tolist() == [0.5, 0.5, 0]
    torch.testing.assert_close(distribution(LOGITS, SamplingParams(1.0, top_k=99)), LOGITS.softmax(-1))


def test_top_p_keeps_the_smallest_set_that_reaches_p():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    for top_p, kept in ((0.4, 1), (0.5, 1), (0.51, 2), (0.8, 2), (0.81, 3), (1.0, 4)):
        assert (distribution(logits, SamplingParams(1.0, top_p=top_p)) > 0).sum() == kept, top_p
    assert distribution(torch.zeros(2, 4), SamplingParams(1.0, top_p=0.01)).tolist() == [[1, 0, 0, 0]] * 2


def test_draw_inverts_the_distribution_and_never_takes_an_impossible_token():
    p = torch.tensor([0.0, 0.25, 0.0, 0.75, 0.0])
    for uniform, token in ((0.0, 1), (0.2499, 1), (0.25, 3), (0.999999999, 3)):
        assert draw(p, torch.tensor(uniform, dtype=torch.float64)) == token
    assert draw(p, torch.tensor(1.0)) == 3
    assert draw(torch.tensor([1e-30, 0.0]), torch.tensor(0.9)) == 0


def test_gumbel_noise_draws_from_the_distribution():
    """20,000 draws, each frequency within 5 standard deviations: false alarm about 1e-6 per token."""
    p = torch.tensor([0.6, 0.3, 0.1, 0.0])
    noise = Noise(SamplingParams(1.0), "x")
    gumbels = torch.stack([noise.gumbel(position, 4) for position in range(20_000)])
    counts = torch.bincount(draw_with_gumbel(p, gumbels), minlength=4)
    deviation = (20_000 * p * (1 - p)).sqrt()
    assert ((counts - 20_000 * p).abs() <= 5 * deviation).all()


def test_noise_is_keyed():
    def of(seed: int, request: str, position: int) -> list[float]:
        return Noise(SamplingParams(1.0, seed=seed), request).gumbel(position, 3).tolist()

    assert of(0, "a", 5) == of(0, "a", 5)
    assert len({tuple(of(*key)) for key in ((0, "a", 5), (1, "a", 5), (0, "b", 5), (0, "a", 6))}) == 4


def test_bits_do_not_depend_on_the_number_of_rows():
    """With shared noise plain decoding computes one row and verification several: a last bit can change the token."""
    logits = torch.randn(4, 50_000, generator=torch.Generator().manual_seed(0))
    for params in (SamplingParams(0.8), SamplingParams(0.8, top_k=50), SamplingParams(0.8, top_p=0.9)):
        together = distribution(logits, params)
        for row in range(4):
            assert torch.equal(distribution(logits[row : row + 1], params)[0], together[row])


@pytest.mark.parametrize(
    "params",
    [SamplingParams(1.0), SamplingParams(1e-38), SamplingParams(0.8, top_k=2), SamplingParams(0.8, 3, 0.9)],
)
def test_a_token_at_minus_infinity_has_probability_zero_and_is_never_drawn(params):
    """A draft of a reduced vocabulary: fewer tokens are possible than top-k would keep."""
    nothing = float("-inf")
    logits = torch.tensor([[nothing, 1.0, nothing, 0.5, nothing], [nothing, nothing, -80.0, nothing, nothing]])
    found = distribution(logits, params)
    assert (found[logits.isneginf()] == 0).all()
    torch.testing.assert_close(found.sum(-1), torch.ones(2))
    for uniform in (0.0, 0.5, 1.0):
        assert not logits.gather(1, draw(found, torch.tensor([uniform, uniform]))[:, None]).isneginf().any()
    noise = torch.tensor([900.0, 0.1, 900.0, 0.2, 900.0]).double()
    assert not logits.gather(1, draw_with_gumbel(found, noise)[:, None]).isneginf().any()


def test_a_tiny_temperature_is_greedy_not_nan():
    assert distribution(LOGITS, SamplingParams(1e-38)).tolist() == [0, 1, 0, 0]


def many_rows() -> torch.Tensor:
    """Flat rows, which need all tokens, peaked ones, which need few, and ties: logits [8, 3000]."""
    noise = torch.randn(8, 3000, generator=torch.Generator().manual_seed(3))
    scales = torch.tensor([0.0, 0.01, 1.0, 2.0, 4.0, 8.0, 1.0, 30.0])[:, None]
    logits = noise * scales
    # A few values only: the set ends among hundreds of equals, within one sort's reach and beyond it.
    logits[6] = (logits[6] * 2).round() * 2
    return logits


@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.9, 0.999])
@pytest.mark.parametrize("top_k", [0, 500])
def test_a_nucleus_found_among_the_most_probable_is_that_of_a_full_sort(top_p, top_k, monkeypatch):
    params, logits = SamplingParams(1.0, top_k=top_k, top_p=top_p), many_rows()
    found = distribution(logits, params)
    monkeypatch.setattr(sampling, "NUCLEI", ())
    assert torch.equal(found, distribution(logits, params))
    sizes = (found > 0).sum(-1)
    if top_p == 0.9 and not top_k:
        assert (sizes > 1024).any() and (sizes < 64).any() and ((sizes > 64) & (sizes < 1024)).any()


@pytest.mark.parametrize("equals", [3, 63, 64, 65, 200, 1024, 1025])
def test_of_equals_at_the_boundary_the_first_are_kept(equals, monkeypatch):
    """Equals that start before, at and after the end of what is sorted first; half of them are in the nucleus."""
    logits = torch.full((2, 3000), -9.0)
    places = torch.randperm(3000, generator=torch.Generator().manual_seed(equals))[:equals].sort().values
    logits[:, places] = 5.0
    logits[1, 1234] = 9.0
    share = logits.softmax(-1)[:, places[0]].double() * (equals // 2)
    for row, p in ((0, share[0]), (1, share[1] + logits.softmax(-1)[1, 1234].double())):
        params = SamplingParams(1.0, top_p=float(p) - 1e-5)
        found = distribution(logits, params)
        with monkeypatch.context() as patch:
            patch.setattr(sampling, "NUCLEI", ())
            assert torch.equal(found, distribution(logits, params))
        kept = set(found[row].nonzero()[:, 0].tolist()) - {1234}
        expected = [place for place in places.tolist() if place != 1234]
        assert kept == set(expected[: len(kept)]) and abs(len(kept) - equals // 2) <= 1


def test_a_nucleus_does_not_depend_on_the_rows_beside_it():
    logits = many_rows()
    for top_p in (0.3, 0.9):
        params = SamplingParams(0.8, top_p=top_p)
        together = distribution(logits, params)
        for row in range(len(logits)):
            assert torch.equal(distribution(logits[row], params), together[row])
        assert torch.equal(distribution(logits.flip(0), params), together.flip(0))
        assert torch.equal(distribution(logits.view(2, 4, -1), params), together.view(2, 4, -1))
