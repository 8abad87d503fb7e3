"""The gated activation of an MLP, gate and up side by side, on GPUs in Triton (the extra `cuda`).

A program takes a block of one row. Both activations are the gate times a logistic function: SiLU that of the gate
itself, GELU in its tanh form (arXiv 1606.08415) that of 2 √(2/π) (x + 0.044715 x³), since (1 + tanh u) / 2 is the
logistic function of 2 u. All arithmetic is fp32, and the product is rounded once.

What this file does not know: how fast it is. No GPU has run it so far.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BLOCK = 1024
"""Results of a program."""
NUM_WARPS = 4
GELU_FACTOR = tl.constexpr(2 * math.sqrt(2 / math.pi))


def silu_mul(both: Tensor, activation: str = "silu") -> Tensor:
    """See `selfspec_kernels.silu_mul`.

    Raises:
        ValueError: another dtype than those of `DTYPES`, another activation, or an odd last dimension.
    """
    if both.dtype not in DTYPES or both.shape[-1] % 2 or activation not in ("silu", "gelu_tanh"):
        raise ValueError(f"no gated activation {activation!r} of {both.dtype} {list(both.shape)}")
    both = both.contiguous()
    size = both.shape[-1] // 2
    out = torch.empty(*both.shape[:-1], size, dtype=both.dtype, device=both.device)
    if out.numel() == 0:
        return out
    constants = launch_constants(size, activation)
    grid = (out.numel() // size, triton.cdiv(size, constants["BLOCK"]))
    with torch.cuda.device_of(both):
        silu_mul_kernel[grid](both, out, **constants, num_warps=NUM_WARPS)
    return out


def launch_constants(size: int, activation: str) -> dict[str, int | bool]:
    """Return the kernel's compile-time arguments."""
    return {"SIZE": size, "GELU": activation == "gelu_tanh", "BLOCK": min(BLOCK, triton.next_power_of_2(size))}


@triton.jit
def silu_mul_kernel(both, out, SIZE: tl.constexpr, GELU: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Fill a block of a row of `out` [M, K] from that row of `both` [M, 2 K]."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < SIZE
    gate = tl.load(both + row * 2 * SIZE + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both + row * 2 * SIZE + SIZE + at, mask=inside, other=0.0).to(tl.float32)
    slope = GELU_FACTOR * (gate + 0.044715 * gate * gate * gate) if GELU else gate
    result = gate / (1.0 + tl.exp(-slope)) * up
    tl.store(out + row * SIZE + at, result.to(out.dtype.element_ty), mask=inside)
