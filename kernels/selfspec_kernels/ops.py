"""Which implementation of an op runs: the compiled one where there is one for the tensors, else the reference."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from selfspec_kernels import cpu, reference
from selfspec_kernels.weights import PackedWeight

Mode = Literal["compiled", "reference", "wide"]
"""wide: the reference with products in fp32, for many rows of bf16 on CPUs that only emulate bf16."""

Norm = tuple[Tensor, float]
"""Weight and epsilon of an RMSNorm."""


def compiled(tensor: Tensor) -> bool:
    """Whether compiled ops run for tensors of this device and dtype."""
    return cpu.runs(tensor)


def few_row_linear(
    inputs: Tensor,
    weight: Tensor | PackedWeight,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    gated: bool = False,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    mode: Mode = "compiled",
) -> Tensor:
    """A linear layer and what stands around it in a decoder, for the few rows of a decoding step.

    Args:
        inputs: [..., K]; with `gated` [..., 2 K], gate and up side by side, of which silu(gate) · up goes in.
        weight: [N, K], full precision or packed; the compiled product with a packed one rounds its inputs to 16 bits by
            blocks, and a row with an infinity or NaN gives NaN.
        bias: [N].
        norm: RMSNorm of the inputs (arXiv 1910.07467).
        residual: [..., N] added to the product.
        out_dtype: of the result; default: that of the inputs.
        mode: which arithmetic; "compiled" is "reference" where nothing is compiled for such tensors.

    Returns:
        [..., N].
    """
    out_dtype = out_dtype or inputs.dtype
    if mode == "compiled" and compiled(inputs):
        return cpu.few_row_linear(inputs, weight, bias, norm, gated, residual, out_dtype)
    return reference.few_row_linear(inputs, weight, bias, norm, gated, residual, out_dtype, widen=mode == "wide")


def rope_kv_write(
    heads: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    written: int,
    rotary: tuple[Tensor, Tensor],
    num_heads: int,
    norms: tuple[Norm, Norm] | None = None,
    *,
    mode: Mode = "compiled",
) -> Tensor:
    """Rotate queries and keys (arXiv 2104.09864, half-split layout) and write keys and values into the cache.

    Args:
        heads: [B, T, (H + 2 Hkv) · D]: queries, keys, values of every row.
        keys, values: [B, Hkv, S, D] views of one layer of the cache.
        positions: [B, T], rotary positions, which are also the slots written.
        written: the first so many of the T rows are written; the others are padding.
        rotary: (cos, sin) tables, fp32 [positions, D], sin negated in its first half.
        norms: RMSNorm of each query and key head, for families that have it.

    Returns:
        Rotated queries, fp32 [B, T, H, D].
    """
    implementation = cpu if mode == "compiled" and compiled(heads) else reference
    return implementation.rope_kv_write(heads, keys, values, positions, written, rotary, num_heads, norms)
