"""What an op of the check is: its inputs, its reference, and how far one may be from the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Inputs = dict[str, Any]
Tensors = tuple[Tensor, ...]

TOLERANCES = {
    # fp32 sums of up to 4,096 products in another order than that of fp64.
    "sum": 4e-6,
    # The CPU's packed product rounds each input by up to 1.5e-5 of its block's largest.
    "packed on a CPU": 1e-4,
    # In low precision norm, gating and product are each rounded on the way.
    "sum in low precision": 2e-2,
    # fp32 products and sums of two terms; angles are the same on both sides.
    "rotation": 1e-5,
    # The scale is an fp32 sum of squares, which are all positive; activations are exponentials of small numbers.
    "norm or gate": 1e-5,
    # fp32 sums of a few hundred terms in another order; a cache of 16 bits is the same on both sides.
    "attention": 4e-5,
    # Tokens, counts and moved numbers: no arithmetic that could differ, and no two candidates near each other.
    "the same": 0.0,
    # exp of fp32 logarithms of up to 25, each known to 2e-6, and sums of 32,000 of them.
    "loss": 3e-5,
}
"""By what an op does: the largest error allowed, relative to the largest number of the result."""
ROUNDED = {torch.float64: 0.0, torch.float32: 0.0, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
"""Relative to each number of a result: it is rounded once to its dtype, and the reference's may round the other way."""


@dataclass(frozen=True)
class Case:
    """An op on some inputs.

    Attributes:
        op, reference: take inputs, which they may overwrite, and return all that the op gives.
        inputs: makes them on a device, the same every time.
        tolerance: a key of `TOLERANCES`.
    """

    name: str
    op: Callable[[Inputs], Tensors]
    reference: Callable[[Inputs], Tensors]
    inputs: Callable[[torch.device], Inputs]
    tolerance: str


def numbers(device: torch.device, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Return normal numbers, the same on every device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def error_of(case: Case, device: torch.device) -> float:
    """Return the largest error relative to the largest number of each result, beyond one rounding.

    Raises:
        ValueError: a result is not finite, or of another shape.
    """
    worst = 0.0
    for ours, wanted in zip(case.op(case.inputs(device)), case.reference(case.inputs(device)), strict=True):
        # A reference that is not finite would make any error look like none.
        if ours.shape != wanted.shape or not bool((ours.isfinite() & wanted.isfinite()).all()):
            raise ValueError(f"a result is not finite, or {list(ours.shape)} instead of {list(wanted.shape)}")
        wide = wanted.double()
        error = (ours.double() - wide).abs() - ROUNDED.get(ours.dtype, 0.0) * wide.abs()
        worst = max(worst, float(error.max() / wide.abs().max().clamp_min(1e-30)))
    return worst
