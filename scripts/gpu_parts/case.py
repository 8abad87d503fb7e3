"""A case of the part "ops": an op, its reference and inputs for both. Knows no op."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Inputs = dict[str, Any]
Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class Case:
    """An op on some inputs.

    Attributes:
        op, reference: take inputs, which they may overwrite, and return all that the op gives.
        inputs: makes them on a device, the same every time.
        tolerance: a key of `ops.TOLERANCES`.
    """

    name: str
    op: Callable[[Inputs], Tensors]
    reference: Callable[[Inputs], Tensors]
    inputs: Callable[[torch.device], Inputs]
    tolerance: str


def numbers(device: torch.device | str, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Return normal numbers, the same on every device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def described(rows: int, dtype: torch.dtype) -> str:
    """Return what a case's name says of its rows."""
    return f"{rows} {'row' if rows == 1 else 'rows'} of {str(dtype).removeprefix('torch.')}"


def results(op: Callable[..., Any], x: Inputs) -> Tensors:
    """Run an op that overwrites nothing, or its oracle."""
    found = op(**x)
    return found if isinstance(found, tuple) else (found,)
