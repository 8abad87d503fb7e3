"""`packed_linear` under Triton's interpreter. `test_packed_linear` runs this file in a process of its own.

The interpreter is chosen when triton is imported, which another test of the session may have done already.
"""

from __future__ import annotations

import math

import pytest
import torch
from selfspec_kernels import PackedWeight, ops, pack
from selfspec_kernels.packed_linear import packed_linear
from tolerances import PACKED_LINEAR, ROUNDED

KINDS = [(8, 32), (4, 32), (4, 64)]


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def amid_garbage(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy that stands in a larger buffer, before and behind it NaN or, of integers, the largest level."""
    garbage = float("nan") if tensor.dtype.is_floating_point else 127
    buffer = torch.full((tensor.numel() + 512,), garbage, dtype=tensor.dtype)
    copy = buffer[256 : 256 + tensor.numel()].view(tensor.shape)
    return copy.copy_(tensor)


def packed(width: int, size: int, bits: int, group: int) -> PackedWeight:
    weight = pack(numbers(width, size), bits, group)
    return PackedWeight(weight.shape, bits, amid_garbage(weight.data), amid_garbage(weight.scale))


def assert_near(out: torch.Tensor, inputs: torch.Tensor, weight: PackedWeight) -> None:
    wanted = inputs.double() @ weight.dequantised().double().T
    assert out.shape == wanted.shape
    error = (out.double() - wanted).abs() - ROUNDED[out.dtype] * wanted.abs()
    print(f"{list(weight.shape)} {weight.bits} bits, {len(inputs)} rows: {float(error.max() / wanted.abs().max()):.1e}")
    assert error.max() <= PACKED_LINEAR * wanted.abs().max()


@pytest.mark.parametrize("bits, group", KINDS)
@pytest.mark.parametrize(
    "rows, size, width", [(1, 64, 17), (2, 97, 3), (3, 30, 8), (5, 576, 9), (9, 320, 1), (1, 2100, 5)]
)
def test_products_of_odd_shapes(rows, size, width, bits, group):
    weight, inputs = packed(width, size, bits, group), amid_garbage(numbers(rows, size, seed=1))
    assert_near(packed_linear(inputs, weight, torch.float32), inputs, weight)


@pytest.mark.parametrize("bits, group", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wide", [True, False])
def test_inputs_of_16_bits_are_not_rounded_and_results_once(wide, dtype, bits, group):
    weight, inputs = packed(11, 136, bits, group), amid_garbage(numbers(2, 136, dtype=dtype, seed=1))
    assert_near(packed_linear(inputs, weight, torch.float32 if wide else dtype), inputs, weight)


@pytest.mark.parametrize("bits, group", KINDS)
def test_bits_of_a_row_do_not_depend_on_how_many_there_are(bits, group):
    weight, inputs = packed(8, 200, bits, group), numbers(9, 200, dtype=torch.bfloat16, seed=1)
    alone = torch.cat([packed_linear(inputs[row : row + 1], weight, torch.float32) for row in range(9)])
    for count in (2, 3, 4, 5, 9):
        assert torch.equal(packed_linear(inputs[-count:], weight, torch.float32), alone[-count:]), count


@pytest.mark.parametrize("bits, group", KINDS)
def test_a_row_that_is_not_finite_spoils_no_other(bits, group):
    weight, inputs = packed(9, 100, bits, group), numbers(3, 100, seed=1)
    wanted = packed_linear(inputs, weight, torch.float32)
    inputs[1, 70] = float("nan")
    out = packed_linear(inputs, weight, torch.float32)
    assert out[1].isnan().all() and torch.equal(out[[0, 2]], wanted[[0, 2]])


def test_a_head_of_many_rows():
    weight, inputs = packed(203, 64, 4, 32), numbers(1, 64, seed=1)
    assert_near(packed_linear(inputs, weight, torch.float32), inputs, weight)


@pytest.mark.parametrize("bits, group", KINDS)
def test_all_that_stands_around_the_product_is_that_of_the_reference(bits, group, monkeypatch):
    """On CPU tensors, told that they are a GPU's and that nothing is compiled for them."""
    monkeypatch.setattr(ops, "on_gpu", lambda tensor: True)
    monkeypatch.setattr(ops, "compiled", lambda tensor: False)
    weight, both, norm = packed(10, 64, bits, group), numbers(2, 3, 128, seed=3), (numbers(64, seed=4), 1e-5)
    for case in (
        {"inputs": both[..., :64], "bias": numbers(10, seed=5), "norm": norm},
        {"inputs": both, "gated": True, "residual": numbers(2, 3, 10, seed=6)},
    ):
        ours, wanted = (ops.few_row_linear(weight=weight, mode=mode, **case) for mode in ("compiled", "reference"))
        assert not torch.equal(ours, wanted), "another order of sums: it was this product that ran"
        torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-5)


def test_logits_of_16_bit_inputs_are_not_rounded(monkeypatch):
    monkeypatch.setattr(ops, "on_gpu", lambda tensor: True)
    monkeypatch.setattr(ops, "compiled", lambda tensor: False)
    weight, inputs = packed(10, 64, 8, 32), numbers(2, 64, dtype=torch.bfloat16)
    assert_near(ops.few_row_linear(inputs, weight, out_dtype=torch.float32), inputs, weight)


def test_no_rows_and_what_does_not_go_together():
    weight = packed(10, 64, 8, 32)
    assert packed_linear(torch.empty(0, 64), weight, torch.float32).shape == (0, 10)
    for inputs, out_dtype in ((torch.ones(1, 63), torch.float32), (torch.ones(1, 64), torch.float64)):
        with pytest.raises(ValueError):
            packed_linear(inputs, weight, out_dtype)
    with pytest.raises(ValueError):
        packed_linear(torch.ones(1, 64, dtype=torch.int8), weight, torch.float32)


@pytest.mark.parametrize("bits, group", KINDS)
def test_nothing_is_written_beside_the_result(bits, group, monkeypatch):
    """Neither for rows that a tile has more than the call, nor for columns that it has more than the weight."""
    buffers = []

    def empty(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        size = math.prod(shape)
        buffers.append(torch.full((size + 512,), 7.0, dtype=dtype, device=device))
        return buffers[-1][256 : 256 + size].view(shape)

    weight, inputs = packed(9, 64, bits, group), numbers(3, 64, seed=1)
    monkeypatch.setattr(torch, "empty", empty)
    assert_near(packed_linear(inputs, weight, torch.float32), inputs, weight)
    [buffer] = buffers
    assert torch.equal(buffer[:256], torch.full((256,), 7.0)) and torch.equal(buffer[-256:], torch.full((256,), 7.0))
