"""One call's view of the cache: which rows stand where, what they write, what they may see.

`Step` is made once per pass and shared by its layers. The same object serves our fused layers and, through
transformers' attention interface, transformers' own layer modules.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from selfspec_kernels import BLOCK, Mode, Norm, block_attention, cpu, ragged_attention, rope_kv_write, visibility_bias
from torch import Tensor

from selfspec_tune.model.cache import SharedKVCache, blocks_for

INTERFACE_NAME = "selfspec"


class Step:
    """Positions, write slots and visibility of one pass over layers start..stop.

    Args:
        cache: the shared cache; grown here when the rows outgrow it.
        positions: [B, T] rotary positions, which are also the slots; padding rows repeat a real row's position.
        num_written: of the T rows, how many (the first ones) write their keys and values; padding rows write nothing.
        rotary: (cos, sin) tables, fp32 [max positions, D]; sin is negated in its first half.
        exact: fixed blocks (bits independent of capacity, length and neighbours) or one product over the live span.
            Compiled attention is exact and the fastest, and serves both.
        mode: arithmetic of the pass, see `selfspec_kernels.ops.Mode`.
    """

    def __init__(
        self,
        cache: SharedKVCache,
        positions: Tensor,
        num_written: int,
        rotary: tuple[Tensor, Tensor],
        *,
        exact: bool,
        mode: Mode,
        start: int,
        stop: int,
    ) -> None:
        self.cache, self.positions, self.exact, self.mode = cache, positions.contiguous(), exact, mode
        self.num_written = num_written
        self._make_room(start, stop)
        self.rotary = rotary
        self._biases: dict[int | None, Tensor] = {}
        self._all_visible = positions.shape == (1, 1)

    def _make_room(self, start: int, stop: int) -> None:
        """Reserve the slots that are written; of what is not compiled, clear those that are read and no row may see."""
        cache = self.cache
        if self.mode == "compiled" and cache.expected is not None:
            cache.reserve(cache.expected)
            return
        ends = [int(end) + 1 for end in self.positions[:, : self.num_written].amax(1).tolist()]
        live = max(ends)
        cache.reserve(live)
        self.num_slots = blocks_for(live) * BLOCK if self.exact else live
        if self.mode != "compiled":
            cache.clear_stale(ends, self.num_slots, start, stop)

    def run(self, table: cpu.LayerTable, hidden: Tensor, start: int, stop: int, num_heads: int) -> Tensor:
        """Run layers start..stop of a compiled stack on [B, T, d] hidden states; returns new ones."""
        cache = self.cache
        arguments = (cache.keys, cache.values, self.positions, self.num_written, self.rotary, num_heads)
        return table.run(hidden, start, stop, *arguments)

    def rotate_and_write(self, layer: int, heads: Tensor, num_heads: int, norms: tuple[Norm, Norm] | None) -> Tensor:
        """Rotate queries and keys of [B, T, (H + 2 Hkv) · D], write keys and values; return queries [B, T, H, D]."""
        keys, values = self.cache.read(layer, self.cache.capacity)
        return rope_kv_write(
            heads, keys, values, self.positions, self.num_written, self.rotary, num_heads, norms, mode=self.mode
        )

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write the real rows' keys and values [B, T, Hkv, D] into one layer of the cache."""
        written = self.num_written
        self.cache.write(layer, self._slots, keys[:, :written], values[:, :written])

    def attend(self, layer: int, query: Tensor, scale: float, window: int | None, dtype: torch.dtype) -> Tensor:
        """Attention of rotated queries [B, T, H, D] over one layer of the cache → [B, T, H·D] in `dtype`."""
        if self.mode == "compiled":
            keys, values = self.cache.read(layer, self.cache.capacity)
            mixed = ragged_attention(query, keys, values, self.positions, scale, window=window, out_dtype=dtype)
            return mixed.flatten(2)
        keys, values = self.cache.read(layer, self.num_slots)
        if self.exact:
            return block_attention(query, keys, values, self._bias(window), scale).flatten(2).to(dtype)
        mask = None if self._all_visible and window is None else self._bias(window)
        if mask is not None:
            mask = mask.to(dtype)
        out = F.scaled_dot_product_attention(
            query.to(dtype).transpose(1, 2), keys, values, attn_mask=mask, scale=scale, enable_gqa=True
        )
        return out.transpose(1, 2).flatten(2)

    @cached_property
    def _slots(self) -> Tensor:
        """Flat slots [B · T] that the real rows write."""
        rows = torch.arange(self.cache.batch_size, device=self.positions.device)[:, None]
        return (rows * self.cache.capacity + self.positions[:, : self.num_written]).flatten()

    def _bias(self, window: int | None) -> Tensor:
        if window not in self._biases:
            family = self.cache.family
            if self.exact:
                bias = visibility_bias(
                    self.positions, self.num_slots // BLOCK, family.num_heads // family.num_kv_heads, window
                )
            else:
                bias = _span_bias(self.positions, self.num_slots, window)
            self._biases[window] = bias
        return self._biases[window]


def rotary_tables(rotary: Any, num_positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return fp32 (cos, sin) [num_positions, D] from a transformers rotary module, sin signed for `Step.rotate`."""
    positions = torch.arange(num_positions, device=device)[None]
    cos, sin = rotary(torch.zeros(1, device=device), positions)
    half = sin.shape[-1] // 2
    return cos[0].float(), torch.cat((-sin[0, :, :half], sin[0, :, half:]), -1).float()


def interface_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **extra: Any
) -> tuple[Tensor, None]:
    """What transformers' attention modules call: query [B, H, T, D]; keys and values are read from the step's cache."""
    step: Step = extra["selfspec_step"]
    window = extra.get("sliding_window")
    mixed = step.attend(module.layer_idx, query.transpose(1, 2), scaling, window, query.dtype)
    return mixed.unflatten(-1, (query.shape[1], query.shape[3])), None


class InterfaceCache:
    """The duck-typed cache transformers' layers update: it writes through to the step and counts its calls."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.updates = 0

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write [B, Hkv, T, D] keys and values of one layer."""
        self.updates += 1
        self.step.write(layer_idx, keys.transpose(1, 2), values.transpose(1, 2))
        return keys, values


def register_interface() -> None:
    """Make `attn_implementation="selfspec"` known to transformers."""
    from transformers import AttentionInterface

    AttentionInterface.register(INTERFACE_NAME, interface_attention)


def _span_bias(positions: Tensor, num_slots: int, window: int | None) -> Tensor:
    """[B, 1, T, num_slots] additive mask over the live span."""
    slots = torch.arange(num_slots, device=positions.device)
    hidden = slots > positions[..., None]
    if window is not None:
        hidden |= slots <= positions[..., None] - window
    return torch.zeros(hidden.shape, device=positions.device).masked_fill_(hidden, float("-inf"))[:, None]
