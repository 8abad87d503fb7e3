"""Attention of a few rows per sequence over the shared cache on GPUs, in Triton (the extra `cuda`).

The cache is read in fixed blocks of `BLOCK` slots. A program takes one block, one key/value head and a tile of `ROWS`
query rows, walks along the block a few slots at a time with a running softmax (arXiv 2205.14135), and leaves fp32 sums.
A second kernel merges a row's blocks (arXiv 2311.01282). Tiles have one shape whatever a call's number of rows, every
slot has its place in them, and a row's merge ends at the row's own block: its bits depend on its query and the slots
it sees and on nothing else in the call. Products are fp32 (`ieee`), each a chain over its terms in order.

Grids depend on shapes alone: a program whose block no row of its tile may see, as `positions` say on the device,
returns at once. So a captured CUDA graph serves any live length.

What this file does not know: how fast it is. Tiles were chosen by counting registers, and no GPU has run them so far.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from selfspec_kernels.reference import BLOCK

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Of the cache and of results. Queries are fp32."""
MULTIPLE = 16
"""Head sizes must be multiples of it, so that vectors of the cache start at multiples of 16 bytes and more."""
ROWS = 8
"""Query rows of a tile, of one key/value head. Constant: a product of another shape may have other bits."""
LARGE = 256
"""Head size from which a program handles 16 slots of a block at a time instead of 32, and 128 numbers of their keys
instead of 16: what keeps its numbers in the registers of all cards."""
NUM_WARPS = 4
MERGED = 16
"""Blocks that a merge loads at a time."""


def ragged_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """See `selfspec_kernels.ragged_attention`.

    Raises:
        ValueError: other dtypes than `DTYPES`, caches that are not whole blocks of whole vectors, or shapes or devices
            that do not go together.
    """
    _check(query, keys, values, positions, sinks, out_dtype)
    batch, rows, num_heads, size = query.shape
    num_kv_heads, num_blocks = keys.shape[1], keys.shape[2] // BLOCK
    query, positions = query.contiguous(), positions.contiguous()
    out = torch.empty(query.shape, dtype=out_dtype, device=query.device)
    if out.numel() == 0:
        return out
    # Of every row and block: Σ weight · value, the largest score, and Σ weight, weights relative to that score.
    mixed = torch.empty(batch * rows * num_heads, num_blocks, size, dtype=torch.float32, device=query.device)
    peaks, totals = torch.empty(2, batch * rows * num_heads, num_blocks, dtype=torch.float32, device=query.device)
    strides = [stride // size for stride in keys.stride()[:2]]
    programs = batch * num_kv_heads * triton.cdiv(rows * num_heads // num_kv_heads, ROWS)
    with torch.cuda.device_of(query):
        block_kernel[(programs, num_blocks)](
            query,
            keys,
            values,
            positions,
            mixed,
            peaks,
            totals,
            scale,
            rows,
            num_blocks,
            *strides,
            **block_constants(num_heads, num_kv_heads, size, window, soft_cap),
            num_warps=NUM_WARPS,
        )
        merge_kernel[(batch * rows * num_heads,)](
            mixed,
            peaks,
            totals,
            positions,
            query if sinks is None else sinks.contiguous(),
            out,
            num_blocks,
            **merge_constants(num_heads, size, window, sinks),
            num_warps=NUM_WARPS,
        )
    return out


def _check(
    query: Tensor, keys: Tensor, values: Tensor, positions: Tensor, sinks: Tensor | None, out_dtype: torch.dtype
) -> None:
    if query.dtype != torch.float32 or keys.dtype not in DTYPES or out_dtype not in DTYPES:
        raise ValueError(f"no attention of {query.dtype} queries over {keys.dtype} with results in {out_dtype}")
    batch, num_kv_heads, slots, size = keys.shape
    if size % MULTIPLE or slots % BLOCK or any(stride % size for stride in keys.stride()[:2]):
        raise ValueError(f"no attention over a cache {list(keys.shape)} with strides {keys.stride()}")
    if keys.stride()[2:] != (size, 1) or (values.shape, values.dtype) != (keys.shape, keys.dtype):
        raise ValueError(f"values {list(values.shape)} of {values.dtype}, but keys {list(keys.shape)} of {keys.dtype}")
    if values.stride() != keys.stride():
        raise ValueError(f"values with strides {values.stride()}, but keys with {keys.stride()}")
    num_heads = query.shape[2]
    if query.shape != (*positions.shape, num_heads, size) or len(query) != batch or num_heads % num_kv_heads:
        raise ValueError(
            f"queries {list(query.shape)} at positions {list(positions.shape)} over a cache {list(keys.shape)}"
        )
    if sinks is not None and sinks.shape != (num_heads,):
        raise ValueError(f"sinks {list(sinks.shape)} for {num_heads} heads")
    others = [keys, values, positions, *([] if sinks is None else [sinks])]
    if any(other.device != query.device for other in others):
        raise ValueError(f"queries on {query.device}, but others on {[str(other.device) for other in others]}")


def block_constants(
    num_heads: int, num_kv_heads: int, size: int, window: int | None, soft_cap: float | None
) -> dict[str, Any]:
    """Return the compile-time arguments of `block_kernel`."""
    return {
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP": num_heads // num_kv_heads,
        "SIZE": size,
        "WIDTH": triton.next_power_of_2(size),
        "WINDOW": window or 0,
        "SOFT_CAP": soft_cap or 0.0,
        "BLOCK": BLOCK,
        "ROWS": ROWS,
        "SLOTS": 16 if size >= LARGE else 32,
        "DEPTH": math.gcd(size, 128 if size >= LARGE else MULTIPLE),
    }


def merge_constants(num_heads: int, size: int, window: int | None, sinks: Tensor | None) -> dict[str, Any]:
    """Return the compile-time arguments of `merge_kernel`."""
    return {
        "NUM_HEADS": num_heads,
        "SIZE": size,
        "WIDTH": triton.next_power_of_2(size),
        "WINDOW": window or 0,
        "SINKS": sinks is not None,
        "BLOCK": BLOCK,
        "MERGED": MERGED,
    }


# What stands in positions, and numbers that differ from call to call, must not choose another compiled kernel: its
# bits might be others.
@triton.jit(
    do_not_specialize=["rows", "num_blocks", "sequence_stride", "head_stride"],
    do_not_specialize_on_alignment=["positions"],
)
def block_kernel(  # type: ignore[no-untyped-def]
    query,
    keys,
    values,
    positions,
    mixed,
    peaks,
    totals,
    scale,
    rows,
    num_blocks,
    sequence_stride,
    head_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    SLOTS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Fill mixed [B·T·H, blocks, D], peaks and totals [B·T·H, blocks] for `ROWS` of the T·G rows of a head, one block.

    Strides of the cache are counted in vectors of D numbers.
    """
    program = tl.program_id(0)
    block = tl.program_id(1)
    tiles = tl.cdiv(rows * GROUP, ROWS)
    head = program // tiles % NUM_KV_HEADS
    sequence = (program // tiles // NUM_KV_HEADS).to(tl.int64)
    member = program % tiles * ROWS + tl.arange(0, ROWS)
    live = member < rows * GROUP
    place = sequence * rows + member // GROUP
    # Rows that a tile has more than the call see nothing.
    position = tl.load(positions + place, mask=live, other=-1).to(tl.int32)
    last = tl.max(position, 0)
    first = 0
    if WINDOW:
        first = tl.min(tl.where(live, position, 2147483647), 0) - WINDOW + 1
    if (block * BLOCK > last) | ((block + 1) * BLOCK <= first):
        return

    row = (place * NUM_KV_HEADS + head) * GROUP + member % GROUP
    cache = (sequence * sequence_stride + head * head_stride.to(tl.int64) + block * BLOCK) * SIZE
    column = tl.arange(0, WIDTH)
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS, WIDTH), tl.float32)
    for start in range(0, BLOCK, SLOTS):
        at = start + tl.arange(0, SLOTS)
        slot = block * BLOCK + at
        # What no row sees is not even read: it may be NaN.
        seen = (slot <= last) & (slot >= first)
        scores = tl.zeros((ROWS, SLOTS), tl.float32)
        for part in tl.static_range(0, SIZE, DEPTH):
            depth = part + tl.arange(0, DEPTH)
            q = tl.load(query + row[:, None] * SIZE + depth[None, :], mask=live[:, None], other=0.0) * scale
            k = tl.load(keys + cache + at[None, :] * SIZE + depth[:, None], mask=seen[None, :], other=0.0)
            scores = tl.dot(q, k.to(tl.float32), scores, input_precision="ieee")
        if SOFT_CAP != 0:
            scores = SOFT_CAP * (1.0 - 2.0 / (tl.exp(scores * (2.0 / SOFT_CAP)) + 1.0))  # cap · tanh
        visible = slot[None, :] <= position[:, None]
        if WINDOW:
            visible &= slot[None, :] > position[:, None] - WINDOW
        scores = tl.where(visible, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp(scores - shift[:, None])
        factor = tl.exp(peak - shift)
        total = total * factor + tl.sum(weights, 1)
        inside = seen[:, None] & (column < SIZE)[None, :]
        v = tl.load(values + cache + at[:, None] * SIZE + column[None, :], mask=inside, other=0.0)
        sums = tl.dot(weights, v.to(tl.float32), sums * factor[:, None], input_precision="ieee")
        peak = new_peak

    result = row * num_blocks + block
    tl.store(peaks + result, peak, mask=live)
    tl.store(totals + result, total, mask=live)
    inside = live[:, None] & (column < SIZE)[None, :]
    tl.store(mixed + result[:, None] * SIZE + column[None, :], sums, mask=inside)


@triton.jit(do_not_specialize=["num_blocks"], do_not_specialize_on_alignment=["positions"])
def merge_kernel(  # type: ignore[no-untyped-def]
    mixed,
    peaks,
    totals,
    positions,
    sinks,
    out,
    num_blocks,
    NUM_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    BLOCK: tl.constexpr,
    MERGED: tl.constexpr,
):
    """Add up the blocks of one row of out [B·T·H, D], `MERGED` at a time, from the first that it sees to its own."""
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + row // NUM_HEADS).to(tl.int32)
    first = 0
    if WINDOW:
        first = tl.maximum(position - WINDOW + 1, 0) // BLOCK
    stop = position // BLOCK + 1
    column = tl.arange(0, WIDTH)
    # A sink is a score without a value, as if of a block before the first.
    peak = float("-inf")
    total = 0.0
    if SINKS:
        peak = tl.load(sinks + row % NUM_HEADS).to(tl.float32)
        total = 1.0
    sums = tl.zeros((WIDTH,), tl.float32)
    start = first
    while start < stop:
        block = row * num_blocks + start + tl.arange(0, MERGED)
        there = start + tl.arange(0, MERGED) < stop
        block_peaks = tl.load(peaks + block, mask=there, other=float("-inf"))
        block_totals = tl.load(totals + block, mask=there, other=0.0)
        new_peak = tl.maximum(peak, tl.max(block_peaks, 0))
        factor = tl.exp(peak - new_peak)
        factors = tl.exp(block_peaks - new_peak)
        inside = there[:, None] & (column < SIZE)[None, :]
        sums_here = tl.load(mixed + block[:, None] * SIZE + column[None, :], mask=inside, other=0.0)
        total = total * factor + tl.sum(factors * block_totals, 0)
        sums = sums * factor + tl.sum(factors[:, None] * sums_here, 0)
        peak = new_peak
        start += MERGED
    tl.store(out + row * SIZE + column, (sums / total).to(out.dtype.element_ty), mask=column < SIZE)
