"""The cache's rows moved together in place on GPUs, in Triton (the extra `cuda`).

A program takes the same few slots of the same head in all rows, and moves one kept row after the other, the first ones
first. Kept rows only move to the front, so a row is read before another takes its place, and no two programs touch the
same memory. How far a row's slots are worth moving is read on the device.

What this file does not know: who left, and how fast it is. No GPU has run it so far.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

NUMBERS = 4096
"""Numbers of a row that a program moves at a time."""
NUM_WARPS = 4


def compact(storage: Tensor, rows: Tensor, committed: Tensor) -> None:
    """See `selfspec_kernels.compact`.

    Raises:
        ValueError: storage that is neither contiguous nor the first rows of such, or other shapes or devices.
    """
    layers, parts, num_kv_heads, batch, slots, size = storage.shape
    # Of one head of a layer's keys or values: what `storage[:, :, :, :n]` leaves as it is.
    head_stride = storage.stride(2)
    layer_strides = (parts * num_kv_heads * head_stride, num_kv_heads * head_stride)
    if storage.stride() != (*layer_strides, head_stride, slots * size, size, 1):
        raise ValueError(f"no moves within storage {list(storage.shape)} with strides {storage.stride()}")
    if rows.ndim != 1 or committed.shape != (batch,):
        raise ValueError(f"rows {list(rows.shape)} and committed slots {list(committed.shape)} of {batch} rows")
    if rows.device != storage.device or committed.device != storage.device:
        raise ValueError(f"storage on {storage.device}, but rows on {rows.device} and committed on {committed.device}")
    if storage.numel() == 0 or len(rows) == 0:
        return
    grid = (layers * parts * num_kv_heads, triton.cdiv(slots * size, NUMBERS))
    with torch.cuda.device_of(storage):
        compact_kernel[grid](
            storage,
            rows.contiguous(),
            committed.contiguous(),
            len(rows),
            head_stride,
            slots * size,
            SIZE=size,
            NUMBERS=NUMBERS,
            num_warps=NUM_WARPS,
        )


@triton.jit
def compact_kernel(  # type: ignore[no-untyped-def]
    storage,
    rows,
    committed,
    num_rows,
    head_stride,
    row_stride,
    SIZE: tl.constexpr,
    NUMBERS: tl.constexpr,
):
    """Move `NUMBERS` numbers of the rows `rows` [n] of storage [heads, B, S · D] to the places 0..n-1."""
    head = storage + tl.program_id(0).to(tl.int64) * head_stride
    number = tl.program_id(1) * NUMBERS + tl.arange(0, NUMBERS)
    place = 0
    target = head
    while place < num_rows:
        row = tl.load(rows + place)
        moved = (number < tl.load(committed + row) * SIZE) & (row != place)
        moving = tl.load(head + row * row_stride + number, mask=moved)
        # A thread may store what another has loaded: none runs ahead.
        tl.debug_barrier()
        tl.store(target + number, moving, mask=moved)
        place += 1
        target += row_stride
