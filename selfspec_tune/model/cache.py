"""The one KV cache that draft and verify share. Knows nothing of layers' weights, drafts or tokens.

The caller owns positions. `committed` says how many slots of each row hold accepted tokens; rollback is not moving it.
Slots at or beyond a call's last position are stale by definition and are zeroed before any row reads their block.
"""

from __future__ import annotations

import torch
from selfspec_kernels import BLOCK, compact
from torch import Tensor

from selfspec_tune.model.families import Family


class SharedKVCache:
    """Keys and values of all layers, rows of different lengths side by side.

    Args:
        family: layer count and head shapes.
        batch_size: rows B.
        capacity: slots per row wanted at first; rounded up to whole blocks and doubled when outgrown.
        extra_layers: layers of a drafter's own, stored after the model's.

    Attributes:
        expected: slots per row that coming passes reach at most, said by a caller that knows; None: passes look
            themselves, which makes the host wait for the device.
    """

    expected: int | None = None

    def __init__(
        self,
        family: Family,
        batch_size: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        extra_layers: int = 0,
    ) -> None:
        self.family = family
        self.batch_size = batch_size
        self.committed = torch.zeros(batch_size, dtype=torch.long, device=device)
        slots = blocks_for(capacity) * BLOCK
        # [L, 2, Hkv, B, S, D]: a layer's keys (or values) of all rows are one flat run of B·S slots per head.
        shape = (family.num_layers + extra_layers, 2, family.num_kv_heads, batch_size, slots, family.head_size)
        self._storage = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def num_layers(self) -> int:
        """Layers stored: the model's L, then extra ones."""
        return self._storage.shape[0]

    @property
    def capacity(self) -> int:
        """Slots per row, S."""
        return self._storage.shape[4]

    @property
    def keys(self) -> Tensor:
        """[L, B, Hkv, S, D], a view."""
        return self._storage[:, 0].transpose(1, 2)

    @property
    def values(self) -> Tensor:
        """[L, B, Hkv, S, D], a view."""
        return self._storage[:, 1].transpose(1, 2)

    def row(self, index: int) -> SharedKVCache:
        """Return row `index` as a batch-1 cache over the same memory (to prefill one prompt); it must not grow."""
        view = SharedKVCache.__new__(SharedKVCache)
        view.family, view.batch_size = self.family, 1
        view.committed = self.committed[index : index + 1]
        view._storage = self._storage[:, :, :, index : index + 1]
        return view

    def reserve(self, slots: int) -> None:
        """Make room for `slots` slots per row, keeping what is there."""
        if slots <= self.capacity:
            return
        grown = max(blocks_for(slots) * BLOCK, 2 * self.capacity)
        old = self._storage
        self._storage = old.new_zeros(*old.shape[:4], grown, old.shape[5])
        self._storage[..., : old.shape[4], :] = old

    def keep_rows(self, rows: Tensor) -> None:
        """Keep rows `rows`, int64 [n], rising, and drop the others: row `rows[i]` becomes row i. Memory stays taken."""
        compact(self._storage, rows, self.committed)
        self._storage = self._storage[:, :, :, : len(rows)]
        self.batch_size, self.committed = len(rows), self.committed[rows]

    def clear_stale(self, ends: list[int], num_slots: int, start: int, stop: int) -> None:
        """Zero, in layers start..stop, the slots from each row's end up to `num_slots`, which no row may see."""
        for row, end in enumerate(ends):
            if end < num_slots:
                self._storage[start:stop, :, :, row, end:num_slots].zero_()

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write [B, T, Hkv, D] keys and values of one layer at the flat slots [B·T] (row · S + slot)."""
        for part, new in enumerate((keys, values)):
            flat = self._storage[layer, part].flatten(1, 2)
            source = new.to(flat.dtype).permute(2, 0, 1, 3).flatten(1, 2)
            flat.index_copy_(1, slots, source)

    def read(self, layer: int, num_slots: int) -> tuple[Tensor, Tensor]:
        """Return the first `num_slots` keys and values of one layer, [B, Hkv, num_slots, D] views."""
        live = self._storage[layer, :, :, :, :num_slots].transpose(1, 2)
        return live[0], live[1]

    def poison(self, value: float = float("nan")) -> None:
        """Overwrite every slot at or beyond `committed` (a test of rollback)."""
        for row, end in enumerate(self.committed.tolist()):
            self._storage[:, :, :, row, end:] = value


def blocks_for(slots: int) -> int:
    """Whole blocks that hold `slots` slots; at least one."""
    return max(1, -(-slots // BLOCK))
