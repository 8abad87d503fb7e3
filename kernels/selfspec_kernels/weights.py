"""Weights in 8 or 4 bits, for drafts: symmetric, scales in fp32."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 32
"""Weights of a row that products take at a time: a row must be whole blocks."""
GROUPS = (32, 64)
"""How many weights of a row may share a scale in 4 bits: multiples of `BLOCK`."""
GROUP = 32
"""How many do unless asked otherwise."""


@dataclass(frozen=True)
class PackedWeight:
    """A weight [N, K] in low precision.

    Attributes:
        shape: (N, K).
        bits: 8: int8 [N, K] with one scale per row [N]. 4: int8 [N, K / 2] with one scale per group [N, K / group];
            byte j of a block is weight j + 8 in its low half and weight j + 16 in its high half, sign included.
        data, scale: as above, contiguous.
    """

    shape: tuple[int, int]
    bits: int
    data: Tensor
    scale: Tensor

    @property
    def group(self) -> int:
        """Weights of a row that share a scale."""
        return self.shape[0] * self.shape[1] // self.scale.numel()

    @property
    def num_bytes(self) -> int:
        """Memory taken."""
        return self.data.numel() + 4 * self.scale.numel()

    def dequantised(self) -> Tensor:
        """Return the weights as fp32 [N, K]."""
        rows, size = self.shape
        if self.bits == 8:
            return self.data.float() * self.scale[:, None]
        packed = self.data.view(rows, size // BLOCK, BLOCK // 2)
        values = torch.cat(((packed & 15) - 8, packed >> 4), -1).float()
        return (values.view(*self.scale.shape, -1) * self.scale[..., None]).view(rows, size)


def packable(weight: Tensor, bits: int, group: int = GROUP) -> str:
    """Return why a weight cannot be packed, or ""."""
    multiple = group if bits == 4 else BLOCK
    if weight.shape[1] % multiple:
        return f"its {weight.shape[1]} inputs are no multiple of {multiple}"
    return ""


def pack(weight: Tensor, bits: int, group: int = GROUP) -> PackedWeight:
    """Quantise [N, K] to 8 or 4 bits, each scale chosen for the least squared error among a few.

    Args:
        group: weights that share a scale in 4 bits, one of `GROUPS`.

    Raises:
        ValueError: the shape cannot be packed (see `packable`), or no such group.
    """
    if packable(weight, bits, group):
        raise ValueError(packable(weight, bits, group))
    if bits == 4 and group not in GROUPS:
        raise ValueError(f"no group of {group} weights, only of {GROUPS}")
    rows, size = weight.shape
    limit = 2 ** (bits - 1) - 1
    groups = weight.float().view(rows, -1, group if bits == 4 else size)
    scale, levels = _best_scale(groups, limit)
    if bits == 8:
        return PackedWeight((rows, size), 8, levels.to(torch.int8).view(rows, size), scale.view(rows).contiguous())
    low, high = levels.to(torch.int8).view(rows, size // BLOCK, 2, BLOCK // 2).unbind(2)
    packed = (low + 8) | (high << 4)
    return PackedWeight((rows, size), 4, packed.reshape(rows, size // 2), scale.view(rows, -1).contiguous())


def _best_scale(groups: Tensor, limit: int) -> tuple[Tensor, Tensor]:
    """Return scales [N, G] and levels [N, G, size] in −limit − 1..limit.

    The largest magnitude is tried at the upper and at the lower end (which has one level more), and shrunk a little:
    clipping one weight is often the smaller error.
    """
    extreme = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    best_error = torch.full_like(extreme, float("inf"))
    best_scale, best_levels = torch.ones_like(extreme), torch.zeros_like(groups)
    for divisor in (limit, -(limit + 1), limit * 1.12, -(limit + 1) * 1.12):
        scale = extreme / divisor
        scale = torch.where(scale == 0, torch.ones_like(scale), scale)
        levels = (groups / scale).round().clamp(-limit - 1, limit)
        error = (levels * scale - groups).square().sum(-1, keepdim=True)
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best_scale = torch.where(better, scale, best_scale)
        best_levels = torch.where(better, levels, best_levels)
    return best_scale.squeeze(-1), best_levels
