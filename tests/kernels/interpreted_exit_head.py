"""`exit_head` under Triton's interpreter. `test_exit_head_kernel` runs this file in a process of its own.

The interpreter is chosen when triton is imported, which another test of the session may have done already.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from selfspec_kernels import exit_head_kernel, ops, reference
from selfspec_kernels.exit_head_kernel import exit_head
from tolerances import EXIT_HEAD

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# (rows, size of hidden states, tokens)
SHAPES = [(1, 64, 17), (2, 97, 3), (3, 30, 40), (5, 576, 70), (9, 160, 1), (4, 130, 33)]


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def amid_garbage(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy that stands in a larger buffer of NaN."""
    buffer = torch.full((tensor.numel() + 512,), float("nan"), dtype=tensor.dtype)
    return buffer[256 : 256 + tensor.numel()].view(tensor.shape).copy_(tensor)


def case(rows: int, size: int, width: int, dtype: torch.dtype = torch.float32) -> tuple:
    """Return hidden states, norm and weight."""
    norm = amid_garbage(1 + 0.1 * numbers(size, dtype=dtype, seed=1)), 1e-5
    return amid_garbage(numbers(rows, size, dtype=dtype)), norm, amid_garbage(numbers(width, size, dtype=dtype, seed=2))


def wanted_scores(
    hidden: torch.Tensor, norm: tuple[torch.Tensor, float], weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return logits in fp64 from unrounded norms."""
    x = hidden.double()
    x = x / (x.square().mean(-1, keepdim=True) + norm[1]).sqrt() * norm[0].double()
    logits = x @ weight.double().T
    return logits if bias is None else logits + bias.double()


def assert_chosen(ours: tuple[torch.Tensor, torch.Tensor], wanted: torch.Tensor) -> None:
    """The token's own score, and no other is larger by more than rounding explains."""
    tokens, scores = ours
    assert tokens.dtype == torch.int64 and scores.dtype == torch.float32 and tokens.shape == wanted.shape[:-1]
    own = wanted.gather(-1, tokens[..., None]).squeeze(-1)
    allowed = EXIT_HEAD * wanted.abs().amax(-1)
    print(f"{list(wanted.shape)}: {float(((scores - own).abs() / wanted.abs().amax(-1)).max()):.1e}")
    assert ((scores.double() - own).abs() <= allowed).all()
    assert (wanted.amax(-1) - own <= 2 * allowed).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, size, width", SHAPES)
def test_heads_of_odd_shapes(rows, size, width, dtype):
    hidden, norm, weight = case(rows, size, width, dtype)
    assert_chosen(exit_head(hidden, norm, weight, None, None, None, 1.0), wanted_scores(hidden, norm, weight))


@pytest.mark.parametrize("dtype", DTYPES)
def test_bias_noise_and_temperature(dtype):
    hidden, norm, weight = case(6, 70, 50, dtype)
    bias, gumbel = amid_garbage(3 * numbers(50, dtype=dtype, seed=3)), amid_garbage(3 * numbers(6, 50, seed=4).double())
    logits = wanted_scores(hidden, norm, weight, bias)
    plain = exit_head(hidden, norm, weight, bias, None, None, 1.0)
    assert_chosen(plain, logits)
    for temperature in (0.5, 1.0, 3.0):
        ours = exit_head(hidden, norm, weight, bias, None, gumbel, temperature)
        assert_chosen(ours, logits / temperature + gumbel)
        assert not torch.equal(ours[0], plain[0])


def test_a_reduced_vocabulary_is_named_by_its_ids():
    hidden, norm, weight = case(5, 70, 50)
    ids = torch.arange(50) * 7 + 3
    plain, mapped = (exit_head(hidden, norm, weight, None, each, None, 1.0) for each in (None, ids))
    assert torch.equal(mapped[0], ids[plain[0]]) and torch.equal(mapped[1], plain[1])
    assert len(set(plain[0].tolist())) > 1


def test_the_first_of_equals_is_chosen_within_and_across_tiles():
    hidden, norm, weight = case(3, 64, 120)
    best = exit_head(hidden, norm, weight, None, None, None, 1.0)[0]
    for row, copies in enumerate(([3, 5], [40, 50, 100], [31, 32])):
        weights = weight.clone()
        weights[torch.tensor(copies)] = 3 * weight[best[row]]
        assert exit_head(hidden[row], norm, weights, None, None, None, 1.0)[0] == copies[0]
    assert exit_head(hidden, norm, torch.zeros(120, 64), None, None, None, 1.0)[0].tolist() == [0, 0, 0]


def test_masked_tokens_are_not_chosen():
    hidden, norm, weight = case(3, 64, 120)
    bias = torch.full((120,), float("-inf"))
    assert exit_head(hidden, norm, weight, bias, None, None, 1.0)[0].tolist() == [0, 0, 0]
    bias[70:72] = 0
    tokens, _ = exit_head(hidden, norm, weight, bias, None, None, 1.0)
    assert_chosen((tokens, _), wanted_scores(hidden, norm, weight, bias.clamp_min(-1e3)))
    assert set(tokens.tolist()) <= {70, 71}
    gumbel = torch.zeros(3, 120)
    gumbel[:, :70] = gumbel[:, 72:] = 900.0
    noisy, _ = exit_head(hidden, norm, weight, bias, None, gumbel, 1.0)
    assert torch.equal(noisy, tokens)


def test_bits_of_a_row_do_not_depend_on_how_many_there_are():
    hidden, norm, weight = case(9, 200, 40, torch.bfloat16)
    alone = [exit_head(hidden[row : row + 1], norm, weight, None, None, None, 1.0) for row in range(9)]
    tokens, scores = (torch.cat(each) for each in zip(*alone, strict=True))
    for count in (2, 3, 4, 5, 9):
        ours = exit_head(hidden[-count:], norm, weight, None, None, None, 1.0)
        assert torch.equal(ours[0], tokens[-count:]) and torch.equal(ours[1], scores[-count:]), count


def test_a_row_of_nan_gives_a_token_of_the_head_and_spoils_no_other():
    hidden, norm, weight = case(3, 64, 40)
    wanted = exit_head(hidden, norm, weight, None, None, None, 1.0)
    hidden[1, 7] = float("nan")
    tokens, scores = exit_head(hidden, norm, weight, None, None, None, 1.0)
    assert 0 <= tokens[1] < 40
    assert torch.equal(tokens[[0, 2]], wanted[0][[0, 2]]) and torch.equal(scores[[0, 2]], wanted[1][[0, 2]])


def test_a_vocabulary_of_128256_tokens(monkeypatch):
    """In tiles larger than the shipped ones, which the interpreter would take minutes for."""
    monkeypatch.setattr(exit_head_kernel, "BLOCK_N", 2048)
    monkeypatch.setattr(exit_head_kernel, "BLOCK_K", 16)
    hidden, norm, weight = case(1, 16, 128256)
    assert_chosen(exit_head(hidden, norm, weight, None, None, None, 1.0), wanted_scores(hidden, norm, weight))
    weight[128255] *= 100
    last = exit_head(weight[-1:], norm, weight, None, None, None, 1.0)[0]
    assert last.tolist() == [128255]


def test_nothing_is_written_beside_the_results(monkeypatch):
    buffers = []

    def empty(*shape: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        shape = shape[0] if isinstance(shape[0], torch.Size) else shape
        size = math.prod(shape)
        buffers.append(torch.full((size + 512,), 77, dtype=dtype, device=device))
        return buffers[-1][256 : 256 + size].view(shape)

    hidden, norm, weight = case(3, 64, 40)
    monkeypatch.setattr(torch, "empty", empty)
    assert_chosen(exit_head(hidden, norm, weight, None, None, None, 1.0), wanted_scores(hidden, norm, weight))
    assert len(buffers) == 4
    for buffer in buffers:
        assert (buffer[:256] == 77).all() and (buffer[-256:] == 77).all()


def test_the_op_is_this_one_on_a_gpu_and_the_reference_says_the_same(monkeypatch):
    hidden, norm, weight = case(6, 70, 50)
    bias, gumbel, ids = numbers(50, seed=3), numbers(2, 3, 50, seed=4), torch.arange(50) * 2
    hidden = hidden.view(2, 3, 70)
    options = {"token_ids": ids, "gumbel": gumbel, "temperature": 0.7}
    wanted = ops.exit_head(hidden, norm, weight, bias, **options)
    assert_chosen((wanted[0] // 2, wanted[1]), wanted_scores(hidden, norm, weight, bias) / 0.7 + gumbel)
    monkeypatch.setattr(ops, "on_gpu", lambda tensor: True)
    monkeypatch.setattr(reference, "exit_head", None)
    ours = ops.exit_head(hidden, norm, weight, bias, **options)
    assert torch.equal(ours[0], wanted[0]) and ours[0].shape == (2, 3)
    torch.testing.assert_close(ours[1], wanted[1], rtol=0.0, atol=EXIT_HEAD * float(weight.abs().max()) * 70)


def test_no_rows_and_what_does_not_go_together():
    hidden, norm, weight = case(2, 20, 30)
    assert exit_head(hidden[:0], norm, weight, None, None, None, 1.0)[0].shape == (0,)
    for bad in (
        (hidden[:, :19], norm, weight, None, None, None),
        (hidden.double(), norm, weight, None, None, None),
        (hidden, (norm[0][:19], 1e-5), weight, None, None, None),
        (hidden, norm, weight, torch.zeros(29), None, None),
        (hidden, norm, weight, None, torch.arange(29), None),
        (hidden, norm, weight, None, None, torch.zeros(1, 30)),
    ):
        with pytest.raises(ValueError):
            exit_head(*bad, 1.0)
