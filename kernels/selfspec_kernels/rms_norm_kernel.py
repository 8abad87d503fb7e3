"""RMSNorm of rows (arXiv 1910.07467), with a residual added first or not, on GPUs in Triton (the extra `cuda`).

A program takes one row and walks along it in blocks: once for the mean of its squares, once for the result. All
arithmetic is fp32, and results are rounded once; with a residual the norm is that of the *rounded* sum, as it is where
the sum goes to memory before it is normed. Nothing of a row's arithmetic depends on how many rows there are.

What this file does not know: how fast it is. No GPU has run it so far.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Of inputs, residual and weight."""
BLOCK = 4096
"""Numbers of a row that a program handles at a time; fewer where a row is shorter."""
NUM_WARPS = 8


def rms_norm(inputs: Tensor, norm: tuple[Tensor, float]) -> Tensor:
    """See `selfspec_kernels.rms_norm`.

    Raises:
        ValueError: other dtypes than `DTYPES`, or sizes or devices that do not go together.
    """
    return _launch(inputs, None, norm)[1]


def add_rms_norm(inputs: Tensor, residual: Tensor, norm: tuple[Tensor, float]) -> tuple[Tensor, Tensor]:
    """See `selfspec_kernels.add_rms_norm`; raises as `rms_norm` does."""
    return _launch(inputs, residual, norm)


def _launch(inputs: Tensor, residual: Tensor | None, norm: tuple[Tensor, float]) -> tuple[Tensor, Tensor]:
    """Return the sum (without a residual the inputs) and its norm."""
    weight, epsilon = norm
    adds = residual is not None
    other = inputs if residual is None else residual
    for each in (inputs, other, weight):
        if each.dtype not in DTYPES or each.device != inputs.device:
            raise ValueError(f"no norm of {each.dtype} on {each.device} with inputs on {inputs.device}")
    if weight.shape != inputs.shape[-1:] or other.shape != inputs.shape or other.dtype != inputs.dtype:
        raise ValueError(f"weight {list(weight.shape)} and residual {list(other.shape)} for {list(inputs.shape)}")
    inputs, other, weight = inputs.contiguous(), other.contiguous(), weight.contiguous()
    out = torch.empty(inputs.shape, dtype=inputs.dtype, device=inputs.device)
    total = torch.empty(inputs.shape, dtype=inputs.dtype, device=inputs.device) if adds else inputs
    if out.numel() == 0:
        return total, out
    constants = launch_constants(inputs.shape[-1], adds=adds)
    with torch.cuda.device_of(inputs):
        rms_norm_kernel[(out.numel() // inputs.shape[-1],)](
            inputs, other, weight, epsilon, total, out, **constants, num_warps=NUM_WARPS
        )
    return total, out


def launch_constants(size: int, *, adds: bool) -> dict[str, int | bool]:
    """Return the kernel's compile-time arguments."""
    return {"SIZE": size, "ADD": adds, "BLOCK": min(BLOCK, triton.next_power_of_2(size))}


@triton.jit
def rms_norm_kernel(  # type: ignore[no-untyped-def]
    inputs,
    residual,
    weight,
    epsilon,
    total,
    out,
    SIZE: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Fill one row of `out` [M, K]; with `ADD` also one of `total` [M, K], the sum of `inputs` and `residual`."""
    start = tl.program_id(0).to(tl.int64) * SIZE
    lane = tl.arange(0, BLOCK)
    squares = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, SIZE, BLOCK):
        at = first + lane
        x = load_sum(inputs + start, residual + start, at, SIZE, ADD)
        if ADD:
            tl.store(total + start + at, x.to(total.dtype.element_ty), mask=at < SIZE)
        squares += x * x
    scale = tl.rsqrt(tl.sum(squares, 0) / SIZE + epsilon)
    for first in range(0, SIZE, BLOCK):
        at = first + lane
        x = load_sum(inputs + start, residual + start, at, SIZE, ADD)
        factor = tl.load(weight + at, mask=at < SIZE, other=0.0).to(tl.float32)
        tl.store(out + start + at, (x * scale * factor).to(out.dtype.element_ty), mask=at < SIZE)


@triton.jit
def load_sum(inputs, residual, at, SIZE: tl.constexpr, ADD: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load part of a row: fp32, with `ADD` its sum with the residual's rounded to their dtype; zeros beyond its end."""
    x = tl.load(inputs + at, mask=at < SIZE, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(residual + at, mask=at < SIZE, other=0.0).to(tl.float32)
        x = x.to(inputs.dtype.element_ty).to(tl.float32)
    return x
