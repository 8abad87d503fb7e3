"""`few_row_linear`: the compiled op against fp64 arithmetic, and bits that depend on a row alone."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from selfspec_kernels import PackedWeight, few_row_linear, pack
from tolerances import FEW_ROW_LINEAR, ROUNDED_INPUTS

DTYPES = [torch.float32, torch.bfloat16]
KINDS = ["float32", "bfloat16", "int8", "int4", "int4 in groups of 64"]


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


def weight_of(kind: str, width: int, size: int) -> torch.Tensor | PackedWeight:
    if kind.startswith("int"):
        return pack(numbers(width, size), int(kind[3]), 64 if "64" in kind else 32)
    return numbers(width, size, dtype=getattr(torch, kind))


def inputs_of(kind: str, rows: int, size: int) -> torch.Tensor:
    return numbers(rows, size, dtype=torch.bfloat16 if kind == "bfloat16" else torch.float32, seed=1)


def assert_near(out: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype, tolerance: float | None = None) -> None:
    assert (out.double() - wanted).abs().max() <= (tolerance or FEW_ROW_LINEAR[dtype]) * wanted.abs().max()


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


@pytest.mark.parametrize("kind", KINDS[2:])
@pytest.mark.parametrize("mode", ["compiled", "reference"])
@pytest.mark.parametrize(
    "rows, size, width", [(1, 64, 50), (5, 192, 91), (3, 576, 7), (9, 64, 1), (4, 40, 9), (1, 97, 6)]
)
def test_packed_weights(rows, size, width, mode, kind):
    weight, inputs = weight_of(kind, width, size), inputs_of(kind, rows, size)
    out = few_row_linear(inputs, weight, mode=mode)
    assert_near(out, expected(inputs, weight), torch.float32, ROUNDED_INPUTS if mode == "compiled" else None)


@pytest.mark.parametrize("kind", KINDS[2:])
def test_packed_weights_with_all_that_stands_around_the_product(kind):
    weight, bias, residual = weight_of(kind, 40, 64), numbers(40), numbers(3, 40, seed=2)
    inputs, norm = numbers(3, 128, seed=3), (numbers(64, seed=4), 1e-5)
    for case in (
        {"inputs": inputs[:, :64], "bias": bias, "norm": norm},
        {"inputs": inputs, "gated": True, "residual": residual},
    ):
        assert_near(
            few_row_linear(weight=weight, **case), expected(weight=weight, **case), torch.float32, ROUNDED_INPUTS
        )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size, width", [(64, 129), (192, 5)])
def test_bits_of_a_row_depend_on_that_row_alone(kind, size, width):
    weight, inputs = weight_of(kind, width, size), inputs_of(kind, 17, size)
    norm = numbers(size, dtype=inputs.dtype, seed=2), 1e-5
    alone = torch.cat([few_row_linear(inputs[row : row + 1], weight, norm=norm) for row in range(17)])
    for count in range(2, 18):
        for first in range(18 - count):
            together = few_row_linear(inputs[first : first + count], weight, norm=norm)
            assert torch.equal(together, alone[first : first + count]), (count, first)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_bits_do_not_depend_on_the_number_of_threads(kind, rows):
    inputs, weight = inputs_of(kind, rows, 512), weight_of(kind, 1003, 512)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(few_row_linear(inputs, weight))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*results)


@pytest.mark.parametrize("rows", range(1, 10))
@pytest.mark.parametrize("size", [5, 64, 203])
def test_sums_are_added_in_the_order_that_is_documented(rows, size):
    """A product of bf16 numbers plus an fp32 sum is exact in fp64: rounding that once is a fused multiply-add."""
    inputs, weight = inputs_of("bfloat16", rows, size), weight_of("bfloat16", 23, size)
    products = (inputs[:, None].double() * weight.double()).unbind(-1)
    lanes = [torch.zeros(rows, 23) for _ in range(8)]
    whole = size // 8 * 8
    for position in range(whole):
        lanes[position % 8] = (lanes[position % 8].double() + products[position]).float()
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = [low + high for low, high in zip(lanes[:half], lanes[half:], strict=True)]
    for product in products[whole:]:
        lanes[0] = (lanes[0].double() + product).float()
    assert torch.equal(few_row_linear(inputs, weight, out_dtype=torch.float32), lanes[0])


@pytest.mark.parametrize("kind", KINDS[2:])
@pytest.mark.parametrize("factor", [0.0, 1e-42, 1e-33, 1e-20, 1e30])
def test_packed_products_of_inputs_of_any_size(factor, kind):
    """One block of zeros, of tiny or of huge numbers beside others, and a whole row of them."""
    weight, inputs = weight_of(kind, 40, 192), numbers(3, 192, seed=1)
    inputs[1, 32:64] *= factor
    inputs[2] *= factor
    out, wanted = few_row_linear(inputs, weight), expected(inputs, weight)
    assert_near(out[0], wanted[0], torch.float32, ROUNDED_INPUTS)
    assert_near(out[1], wanted[1], torch.float32, ROUNDED_INPUTS)
    if 0 < factor < 1e-30:
        assert not out[2].any()  # blocks below 1e-30 count as zeros
    else:
        assert_near(out[2], wanted[2], torch.float32, ROUNDED_INPUTS)


@pytest.mark.parametrize("kind", KINDS[2:])
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_packed_products_of_a_row_that_is_not_finite_are_not_numbers(value, kind):
    weight, inputs = weight_of(kind, 40, 192), numbers(3, 192, seed=1)
    wanted = few_row_linear(inputs, weight)
    inputs[1, 70] = value
    out = few_row_linear(inputs, weight)
    assert out[1].isnan().all() and torch.equal(out[[0, 2]], wanted[[0, 2]])


@pytest.mark.parametrize("kind", KINDS[2:])
def test_the_largest_integers_do_not_overflow(kind):
    """All weights at their lowest level and all inputs at one value, of either sign."""
    weight = weight_of(kind, 40, 192)
    weight.data.fill_(-128 if kind == "int8" else -16 * 8)  # int4: both halves of a byte are −8
    for inputs in (torch.full((1, 192), 3.0), torch.full((1, 192), -3.0)):
        assert_near(few_row_linear(inputs, weight), expected(inputs, weight), torch.float32)


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
