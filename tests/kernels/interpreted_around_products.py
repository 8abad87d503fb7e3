"""Norms and gated activations under Triton's interpreter. `test_around_products` runs this file in its own process.

The interpreter is chosen when triton is imported, which another test of the session may have done already.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from selfspec_kernels import ops, reference, rms_norm_kernel, silu_mul_kernel
from selfspec_kernels.rms_norm_kernel import add_rms_norm, rms_norm
from selfspec_kernels.silu_mul_kernel import silu_mul
from tolerances import RMS_NORM, ROUNDED, SILU_MUL, SMALLEST

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 1), (1, 64), (3, 97), (2, 576), (5, 300)]


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of several blocks, whose last is not full."""
    monkeypatch.setattr(rms_norm_kernel, "BLOCK", 64)
    monkeypatch.setattr(silu_mul_kernel, "BLOCK", 64)


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return (2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def amid_garbage(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy that stands in a larger buffer of NaN."""
    buffer = torch.full((tensor.numel() + 512,), float("nan"), dtype=tensor.dtype)
    return buffer[256 : 256 + tensor.numel()].view(tensor.shape).copy_(tensor)


def assert_near(out: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> None:
    """Compare with fp64 results that were not rounded, each relative to itself, NaN and infinity included."""
    tolerance += ROUNDED[out.dtype]
    torch.testing.assert_close(out.double(), wanted, rtol=tolerance, atol=SMALLEST[out.dtype], equal_nan=True)


def normed(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight.double()


def gated(both: torch.Tensor, activation: str) -> torch.Tensor:
    gate, up = both.double().chunk(2, -1)
    if activation == "silu":
        return torch.nn.functional.silu(gate) * up
    return torch.nn.functional.gelu(gate, approximate="tanh") * up


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, size", SHAPES)
def test_norms_of_odd_shapes(rows, size, dtype):
    inputs, weight = amid_garbage(numbers(rows, size, dtype=dtype)), amid_garbage(numbers(size, dtype=dtype, seed=1))
    assert_near(rms_norm(inputs, (weight, 1e-5)), normed(inputs, weight, 1e-5), RMS_NORM)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, size", SHAPES)
def test_a_residual_is_added_and_the_rounded_sum_normed(rows, size, dtype):
    inputs, residual = (amid_garbage(numbers(rows, size, dtype=dtype, seed=seed)) for seed in (0, 1))
    norm = amid_garbage(numbers(size, dtype=dtype, seed=2)), 1e-6
    total, out = add_rms_norm(inputs, residual, norm)
    assert total.dtype == out.dtype == dtype
    # Exact in fp32, so rounding is all there is to it.
    assert_near(total, (inputs.float() + residual.float()).double(), 0.0)
    assert torch.equal(out, rms_norm(total, norm))


def test_epsilon_counts_where_a_row_is_small():
    inputs, weight = 1e-4 * numbers(2, 80), numbers(80, seed=1)
    for epsilon in (1e-6, 1e-2):
        assert_near(rms_norm(inputs, (weight, epsilon)), normed(inputs, weight, epsilon), RMS_NORM)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, size", SHAPES)
def test_gates_of_odd_shapes(rows, size, dtype, activation):
    both = amid_garbage(numbers(rows, 2 * size, dtype=dtype))
    out = silu_mul(both, activation)
    assert out.shape == (rows, size) and out.dtype == dtype
    assert_near(out, gated(both, activation), SILU_MUL)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_saturated_gates(activation):
    gate = torch.tensor([0.0, -0.0, 1e-20, 9.0, -5.0, 30.0, -30.0, 100.0, 1e4, 1e18, 1e30])
    both = torch.cat((gate, torch.full_like(gate, 3.0)))[None]
    assert_near(silu_mul(both, activation), gated(both, activation), SILU_MUL)
    # So far down fp32 has less than the reference's digits, or nothing: what is left is nothing beside the gate.
    for low in (-90.0, -1e4, -1e30):
        assert float(silu_mul(torch.tensor([[low, 3.0]]), activation).abs()) <= 1e-30 * abs(low)


def test_large_and_small_rows_and_zeros():
    inputs, weight = numbers(4, 200), numbers(200, seed=1)
    inputs[0] *= 1e15
    inputs[1] *= 1e-15
    inputs[2] = 0
    assert_near(rms_norm(inputs, (weight, 1e-5)), normed(inputs, weight, 1e-5), RMS_NORM)


def test_a_row_that_is_not_finite_spoils_no_other():
    inputs, residual, norm = numbers(3, 100), numbers(3, 100, seed=1), (numbers(100, seed=2), 1e-5)
    wanted = [*add_rms_norm(inputs, residual, norm), silu_mul(inputs)]
    inputs[1, 70] = float("nan")
    out = [*add_rms_norm(inputs, residual, norm), silu_mul(inputs)]
    assert out[1][1].isnan().all() and out[2][1, 20].isnan()
    for ours, theirs in zip(out, wanted, strict=True):
        assert torch.equal(ours[[0, 2]], theirs[[0, 2]])


def test_bits_of_a_row_do_not_depend_on_how_many_there_are():
    inputs, norm = numbers(9, 200, dtype=torch.bfloat16), (numbers(200, seed=2), 1e-5)
    normed_all, gated_all = rms_norm(inputs, norm), silu_mul(inputs)
    for row in range(9):
        assert torch.equal(rms_norm(inputs[row : row + 1], norm)[0], normed_all[row])
        assert torch.equal(silu_mul(inputs[row : row + 1])[0], gated_all[row])


def test_nothing_is_written_beside_the_results(monkeypatch):
    buffers = []

    def empty(*shape: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        shape = shape[0] if isinstance(shape[0], torch.Size) else shape
        size = math.prod(shape)
        buffers.append(torch.full((size + 512,), 7.0, dtype=dtype, device=device))
        return buffers[-1][256 : 256 + size].view(shape)

    monkeypatch.setattr(torch, "empty", empty)
    inputs, norm = numbers(3, 130), (numbers(130, seed=1), 1e-5)
    add_rms_norm(inputs, inputs, norm), rms_norm(inputs, norm), silu_mul(inputs)
    assert len(buffers) == 4
    for buffer in buffers:
        assert (buffer[:256] == 7).all() and (buffer[-256:] == 7).all() and not (buffer[256:-256] == 7).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_they_stand_around_products_of_full_precision(dtype, monkeypatch):
    """On CPU tensors, told that they are a GPU's and that nothing is compiled for them."""
    monkeypatch.setattr(ops, "on_gpu", lambda tensor: True)
    monkeypatch.setattr(ops, "compiled", lambda tensor: False)
    ran = []
    for module, name in ((rms_norm_kernel, "rms_norm"), (silu_mul_kernel, "silu_mul")):
        genuine = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *rest, name=name, genuine=genuine: ran.append(name) or genuine(*rest))
    weight, both, norm = numbers(10, 64, dtype=dtype), numbers(2, 3, 128, dtype=dtype), (numbers(64, dtype=dtype), 1e-5)
    for case in (
        {"inputs": both[..., :64], "bias": numbers(10, dtype=dtype, seed=5), "norm": norm},
        {"inputs": both, "gated": True, "residual": numbers(2, 3, 10, dtype=dtype, seed=6)},
    ):
        ours, wanted = (ops.few_row_linear(weight=weight, mode=mode, **case) for mode in ("compiled", "reference"))
        # Products of 64 terms of about 2 · 2, and each of their factors rounded once or twice.
        torch.testing.assert_close(ours, wanted, rtol=0.0, atol=64 * (SILU_MUL + 4 * ROUNDED[dtype]))
    assert ran == ["rms_norm", "silu_mul"]


def test_the_reference_is_what_they_are_held_against():
    both, norm = numbers(3, 128), (numbers(128, seed=1), 1e-5)
    for activation in ("silu", "gelu_tanh"):
        # In its own dtype the reference's GELU loses digits that 1 + tanh cancels.
        assert_near(reference.silu_mul(both.double(), activation).float(), gated(both, activation), SILU_MUL)
    total, out = reference.add_rms_norm(both, both, norm)
    assert torch.equal(total, both + both)
    assert_near(out, normed(total, *norm), RMS_NORM)


def test_no_rows_and_what_does_not_go_together():
    norm = numbers(20), 1e-5
    assert rms_norm(torch.empty(0, 20), norm).shape == (0, 20) and silu_mul(torch.empty(0, 20)).shape == (0, 10)
    for bad in (
        lambda: rms_norm(numbers(2, 19), norm),
        lambda: rms_norm(numbers(2, 20).double(), norm),
        lambda: add_rms_norm(numbers(2, 20), numbers(1, 20), norm),
        lambda: add_rms_norm(numbers(2, 20), numbers(2, 20, dtype=torch.bfloat16), norm),
        lambda: silu_mul(numbers(2, 19)),
        lambda: silu_mul(numbers(2, 20).double()),
        lambda: silu_mul(numbers(2, 20), "relu"),
    ):
        with pytest.raises(ValueError):
            bad()
