"""Weights in 8 or 4 bits, for drafts: 8 bits symmetric by rows, 4 bits with a scale and a minimum by groups."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 32
"""Weights of a row that products take at a time: a row must be whole blocks."""
GROUPS = (32, 64)
"""How many weights of a row may share a scale and a minimum in 4 bits: multiples of `BLOCK`."""
GROUP = 32
"""How many do unless asked otherwise."""
WEIGHTS_AT_ONCE = 1 << 17
"""Weights quantised at a time."""


@dataclass(frozen=True)
class PackedWeight:
    """A weight [N, K] in low precision.

    Attributes:
        shape: (N, K).
        bits: 8 or 4.
            8: int8 [N, K] with one fp32 scale per row [N]; a weight is level · scale.
            4: uint8 [N, K / 2], byte j of a block is level j in its low half and level j + 16 in its high half, with a
            scale and a minimum per group, bf16 [N, K / group, 2]; a weight is minimum + level · scale, levels 0..15.
        data, scale: as above, contiguous.
    """

    shape: tuple[int, int]
    bits: int
    data: Tensor
    scale: Tensor

    @property
    def group(self) -> int:
        """Weights of a row that share a scale."""
        return self.shape[1] // (1 if self.bits == 8 else self.scale.shape[1])

    @property
    def num_bytes(self) -> int:
        """Memory taken."""
        return self.data.nbytes + self.scale.nbytes

    def dequantised(self) -> Tensor:
        """Return the weights as fp32 [N, K]."""
        rows, size = self.shape
        if self.bits == 8:
            return self.data.float() * self.scale[:, None]
        packed = self.data.view(rows, size // BLOCK, BLOCK // 2)
        levels = torch.cat((packed & 15, packed >> 4), -1).view(rows, -1, self.group).float()
        scale, minimum = self.scale.float().unbind(-1)
        return torch.addcmul(minimum[..., None], levels, scale[..., None]).view(rows, size)


def packable(weight: Tensor, bits: int, group: int = GROUP) -> str:
    """Return why a weight cannot be packed, or ""."""
    multiple = group if bits == 4 else BLOCK
    if weight.shape[1] % multiple:
        return f"its {weight.shape[1]} inputs are no multiple of {multiple}"
    return ""


def pack(weight: Tensor, bits: int, group: int = GROUP) -> PackedWeight:
    """Quantise [N, K] to 8 or 4 bits, each scale chosen for the least squared error among a few.

    Args:
        group: weights that share a scale and a minimum in 4 bits, one of `GROUPS`.

    Raises:
        ValueError: the shape cannot be packed (see `packable`), or no such group.
    """
    if packable(weight, bits, group):
        raise ValueError(packable(weight, bits, group))
    if bits == 4 and group not in GROUPS:
        raise ValueError(f"no group of {group} weights, only of {GROUPS}")
    # By so many rows that a part and what is computed from it stay in a CPU's cache.
    parts = weight.split(max(1, WEIGHTS_AT_ONCE // weight.shape[1]))
    data, scale = zip(
        *(_pack_rows(part.float()) if bits == 8 else _pack_groups(part.float(), group) for part in parts), strict=True
    )
    return PackedWeight((weight.shape[0], weight.shape[1]), bits, torch.cat(data), torch.cat(scale))


def _pack_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return levels −128..127 [N, K] and scales [N].

    The largest magnitude is tried at the upper and at the lower end (which has one level more), and shrunk a little:
    clipping one weight is often the smaller error.
    """
    extreme = weight.gather(-1, weight.abs().argmax(-1, keepdim=True))

    def levels(scale: Tensor) -> Tensor:
        return (weight / scale).round_().clamp_(-128, 127)

    tried = [torch.where(extreme == 0, 1.0, extreme / divisor) for divisor in (127, -128, 127 * 1.12, -128 * 1.12)]
    errors = [(levels(scale).mul_(scale) - weight).square_().sum(-1, keepdim=True) for scale in tried]
    best = torch.cat(tried, -1).gather(-1, torch.cat(errors, -1).argmin(-1, keepdim=True))
    return levels(best).to(torch.int8), best.squeeze(-1)


def _pack_groups(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Return packed levels [N, K / 2] and (scale, minimum) pairs [N, K / group, 2].

    Tried are a group's whole range, and the line that fits best through the levels this gives. Scale and minimum are
    rounded before levels are taken, so that their few digits cost little.
    """
    rows, size = weight.shape
    groups = weight.view(rows, -1, group)
    mean, smallest, largest = (
        groups.mean(-1, keepdim=True),
        groups.amin(-1, keepdim=True),
        groups.amax(-1, keepdim=True),
    )

    def fit(scale: Tensor, minimum: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        scale, minimum = scale.bfloat16().float(), minimum.bfloat16().float()
        levels = ((groups - minimum) / torch.where(scale == 0, 1.0, scale)).round_().clamp_(0, 15)
        error = torch.addcmul(minimum - groups, levels, scale).square_().sum(-1, keepdim=True)
        return scale, minimum, levels, error

    whole = fit((largest - smallest) / 15, smallest)
    deviation = whole[2] - whole[2].mean(-1, keepdim=True)
    spread = deviation.square().sum(-1, keepdim=True)
    scale = (deviation * groups).sum(-1, keepdim=True) / torch.where(spread == 0, 1.0, spread)
    line = fit(scale, mean - scale * whole[2].mean(-1, keepdim=True))
    scale, minimum, levels = (torch.where(line[3] < whole[3], a, b) for a, b in zip(line[:3], whole[:3], strict=True))
    low, high = levels.to(torch.uint8).view(rows, size // BLOCK, 2, BLOCK // 2).unbind(2)
    return (low | high << 4).reshape(rows, size // 2), torch.cat((scale, minimum), -1).bfloat16()
