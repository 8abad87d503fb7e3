"""`few_row_linear`: the compiled op against fp64 arithmetic, and bits that depend on a row alone."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from selfspec_kernels import PackedWeight, few_row_linear, pack

# Relative to the largest result: fp32 sums in another order; in bf16 the reference rounds up to three times on the way.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}
DTYPES = [torch.float32, torch.bfloat16]


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def expected(inputs, weight, bias=None, norm=None, gated=False, residual=None):
    """The op in fp64."""
    wide = weight.dequantised().double() if isinstance(weight, PackedWeight) else weight.double()
    inputs = inputs.double()
    if norm is not None:
        inputs = F.rms_norm(inputs, norm[0].shape, norm[0].double(), norm[1])
    if gated:
        gate, up = inputs.chunk(2, -1)
        inputs = F.silu(gate) * up
    out = inputs @ wide.T
    out = out if bias is None else out + bias.double()
    return out if residual is None else out + residual.double()


def assert_near(out: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    assert (out.double() - wanted).abs().max() <= TOLERANCE[dtype] * wanted.abs().max()


@pytest.mark.parametrize("mode", ["compiled", "reference", "wide"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, size, width", [(1, 64, 50), (2, 30, 7), (3, 7, 1), (5, 576, 961), (9, 40, 5)])
def test_with_all_that_stands_around_the_product(rows, size, width, dtype, mode):
    weight, bias = numbers(width, size, dtype=dtype), numbers(width, dtype=dtype, seed=1)
    residual, norm = numbers(rows, width, dtype=dtype, seed=2), (numbers(size, dtype=dtype, seed=3), 1e-5)
    inputs, both = numbers(rows, size, dtype=dtype, seed=4), numbers(rows, 2 * size, dtype=dtype, seed=5)
    cases = [
        {"inputs": inputs},
        {"inputs": inputs, "bias": bias, "norm": norm},
        {"inputs": both, "gated": True, "residual": residual},
    ]
    for case in cases:
        out = few_row_linear(weight=weight, mode=mode, **case)
        assert out.dtype == dtype and out.shape == (rows, width)
        assert_near(out, expected(weight=weight, **case), dtype)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("mode", ["compiled", "reference"])
def test_packed_weights(bits, mode):
    weight = pack(numbers(90, 96), bits)
    inputs = numbers(5, 96, seed=1)
    assert_near(few_row_linear(inputs, weight, mode=mode), expected(inputs, weight), torch.float32)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "int4"])
def test_bits_of_a_row_depend_on_that_row_alone(kind):
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    weight = numbers(129, 64, dtype=dtype)
    weight = pack(weight, int(kind[3:])) if kind.startswith("int") else weight
    inputs, norm = numbers(9, 64, dtype=dtype, seed=1), (numbers(64, dtype=dtype, seed=2), 1e-5)
    alone = torch.cat([few_row_linear(inputs[row : row + 1], weight, norm=norm) for row in range(9)])
    for count in range(2, 10):
        for first in range(10 - count):
            together = few_row_linear(inputs[first : first + count], weight, norm=norm)
            assert torch.equal(together, alone[first : first + count]), (count, first)


def test_bits_do_not_depend_on_the_number_of_threads():
    inputs, weight = numbers(3, 512), numbers(1000, 512, seed=1)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(few_row_linear(inputs, weight))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*results)


def test_gating_at_the_ends_of_the_number_range():
    """silu must be 0 · up and gate · up far out, and no overflow may turn into NaN."""
    gates = torch.tensor([-1e30, -200.0, -88.0, -1e-30, 0.0, 88.0, 200.0, 1e30])
    out = few_row_linear(torch.cat((gates, torch.ones(8)))[None], torch.eye(8), gated=True)[0]
    torch.testing.assert_close(out, F.silu(gates), rtol=1e-6, atol=1e-30)


def test_logits_of_bf16_inputs_are_not_rounded():
    inputs, weight = numbers(2, 64, dtype=torch.bfloat16), numbers(50, 64, dtype=torch.bfloat16, seed=1)
    out = few_row_linear(inputs, weight, out_dtype=torch.float32)
    assert_near(out, expected(inputs, weight), torch.float32)
    assert not torch.equal(out, out.bfloat16().float())


def test_small_and_odd_shapes():
    for rows, size, width in itertools.product((1, 4, 7), (1, 8, 9), (1, 2, 3, 4, 5)):
        inputs, weight = numbers(rows, size), numbers(width, size, seed=1)
        assert_near(few_row_linear(inputs, weight), expected(inputs, weight), torch.float32)
