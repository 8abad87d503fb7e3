"""Weights in 8 or 4 bits, for drafts: 8 bits symmetric by rows, 4 bits with a scale and a minimum by groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 64
"""Weights of a row that products take at a time; rows are filled up to whole blocks."""
GROUPS = (32, 64)
"""How many weights of a row may share a scale and a minimum in 4 bits: halves of a block, or whole ones."""
GROUP = 32
"""How many do unless asked otherwise."""
WEIGHTS_AT_ONCE = 1 << 17
"""Weights quantised at a time."""


@dataclass(frozen=True)
class PackedWeight:
    """A weight [N, K] in low precision.

    Attributes:
        shape: (N, K).
        bits: 8 or 4. P is K rounded up to whole blocks; what fills them meets zeros. A `BLOCK` is multiplied as four
            vectors of 16: vector j has weights 8 j..8 j + 7 of its first half of 32, then those of its second half.
            8: int8 [N, P], vector after vector, with one fp32 scale per row [N]; a weight is level · scale.
            4: uint8 [N, P / 2], for each of the 16 places 2 bytes that hold the levels of vectors 0..3, lowest bits
            first, with a scale and a minimum per group, bf16 [N, P / group, 2]; a weight is minimum + level · scale,
            levels 0..15.
        data, scale: as above, contiguous.
    """

    shape: tuple[int, int]
    bits: int
    data: Tensor
    scale: Tensor

    @property
    def group(self) -> int:
        """Weights of a row that share a scale."""
        return self.shape[1] if self.bits == 8 else 2 * self.data.shape[1] // self.scale.shape[1]

    @property
    def num_bytes(self) -> int:
        """Memory taken."""
        return self.data.nbytes + self.scale.nbytes

    def dequantised(self) -> Tensor:
        """Return the weights as fp32 [N, K]."""
        rows, size = self.shape
        if self.bits == 8:
            levels = self.data.view(rows, -1, 4, 2, 8).transpose(2, 3).flatten(1)
            return levels[:, :size].float() * self.scale[:, None]
        pairs = self.data.view(rows, -1, 2, 8, 2)
        levels = torch.stack((pairs & 15, pairs >> 4), -1).flatten(4).permute(0, 1, 2, 4, 3)
        scale, minimum = self.scale.float().unbind(-1)
        levels = levels.reshape(*scale.shape, self.group).float()
        return torch.addcmul(minimum[..., None], levels, scale[..., None]).flatten(1)[:, :size]


@dataclass(frozen=True)
class LayerWeights:
    """What a pre-norm decoder layer with grouped-query attention and a gated SiLU MLP computes with.

    Attributes:
        cache_layer: where its keys and values stand in the cache.
        qkv, out, gate_up, down: (weight, bias or None) of its products.
        input_norm, mlp_norm: RMSNorms, weight and epsilon.
        head_norms: those of query and key heads, with one epsilon.
        scale: of attention scores.
        window: attention window, or None.
    """

    cache_layer: int
    qkv: tuple[Tensor | PackedWeight, Tensor | None]
    out: tuple[Tensor | PackedWeight, Tensor | None]
    gate_up: tuple[Tensor | PackedWeight, Tensor | None]
    down: tuple[Tensor | PackedWeight, Tensor | None]
    input_norm: tuple[Tensor, float]
    mlp_norm: tuple[Tensor, float]
    head_norms: tuple[tuple[Tensor, float], tuple[Tensor, float]] | None
    scale: float
    window: int | None


def packed_bytes(shape: Sequence[int], bits: int, group: int = GROUP) -> int:
    """Return the memory that a weight [N, K] will take: levels, and 4 bytes per row or group."""
    rows, size = shape[0], -(-shape[1] // BLOCK) * BLOCK
    return rows * (size * bits // 8 + 4 * (1 if bits == 8 else size // group))


def pack(weight: Tensor, bits: int, group: int = GROUP) -> PackedWeight:
    """Quantise [N, K] to 8 or 4 bits, each scale chosen for the least squared error among a few.

    Args:
        group: weights that share a scale and a minimum in 4 bits, one of `GROUPS`.

    Raises:
        ValueError: no such group.
    """
    if bits == 4 and group not in GROUPS:
        raise ValueError(f"no group of {group} weights, only of {GROUPS}")
    # By so many rows that a part and what is computed from it stay in a CPU's cache.
    shape = (weight.shape[0], weight.shape[1])
    if shape[1] % BLOCK:
        weight = torch.cat((weight, weight[:, -1:].expand(-1, -shape[1] % BLOCK)), 1)
    parts = weight.split(max(1, WEIGHTS_AT_ONCE // shape[1]))
    data, scale = zip(
        *(_pack_rows(part.float()) if bits == 8 else _pack_groups(part.float(), group) for part in parts), strict=True
    )
    return PackedWeight(shape, bits, torch.cat(data), torch.cat(scale))


def _pack_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return levels −128..127 [N, P], ordered, and scales [N].

    The largest magnitude is tried at the upper and at the lower end (which has one level more), and shrunk a little:
    clipping one weight is often the smaller error.
    """
    extreme = weight.gather(-1, weight.abs().argmax(-1, keepdim=True))

    def levels(scale: Tensor) -> Tensor:
        return (weight / scale).round_().clamp_(-128, 127)

    tried = [torch.where(extreme == 0, 1.0, extreme / divisor) for divisor in (127, -128, 127 * 1.12, -128 * 1.12)]
    errors = [(levels(scale).mul_(scale) - weight).square_().sum(-1, keepdim=True) for scale in tried]
    best = torch.cat(tried, -1).gather(-1, torch.cat(errors, -1).argmin(-1, keepdim=True))
    ordered = levels(best).to(torch.int8).view(len(weight), -1, 2, 4, 8).transpose(2, 3)
    return ordered.reshape(weight.shape), best.squeeze(-1)


def _pack_groups(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Return packed levels [N, P / 2] and (scale, minimum) pairs [N, P / group, 2].

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
    quarters = levels.to(torch.uint8).view(rows, -1, 2, 4, 8).unbind(3)
    pairs = torch.stack((quarters[0] | quarters[1] << 4, quarters[2] | quarters[3] << 4), -1)
    return pairs.view(rows, size // 2), torch.cat((scale, minimum), -1).bfloat16()
