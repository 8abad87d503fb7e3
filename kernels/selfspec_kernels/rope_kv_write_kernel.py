"""Rotation of queries and keys, and the write of keys and values into the cache, on GPUs, in Triton (the extra `cuda`).

A program takes one head of one row: a query's is rotated and left in fp32, a key's is rotated and rounded into the
cache, a value's is copied there. One launch does it all. Arithmetic is fp32, also of the norm of heads, so that a
number is rounded once, on its way into the cache. A row's bits depend on that row alone.

What this file does not know: what attention makes of it (see `ragged_attention_kernel`), and how fast it is. No GPU has
run it so far.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Of heads and cache, each its own."""
NUM_WARPS = 1
"""A head is small."""


def rope_kv_write(
    heads: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    written: int,
    rotary: tuple[Tensor, Tensor],
    num_heads: int,
    norms: tuple[tuple[Tensor, float], tuple[Tensor, float]] | None,
) -> Tensor:
    """See `selfspec_kernels.rope_kv_write`.

    Raises:
        ValueError: other dtypes than `DTYPES`, views that are not of whole vectors, or shapes or devices that do not go
            together.
    """
    _check(heads, keys, values, positions, rotary, num_heads)
    batch, rows = positions.shape
    num_kv_heads, size = keys.shape[1], keys.shape[3]
    query = torch.empty(batch, rows, num_heads, size, dtype=torch.float32, device=heads.device)
    if query.numel() == 0:
        return query
    heads = heads.contiguous()
    (query_norm, query_eps), (key_norm, key_eps) = norms or ((heads, 0.0), (heads, 0.0))
    strides = [stride // size for stride in keys.stride()[:2]]
    programs = batch * rows * (num_heads + 2 * num_kv_heads)
    with torch.cuda.device_of(heads):
        rope_kv_write_kernel[(programs,)](
            heads,
            keys,
            values,
            positions.contiguous(),
            *(table.contiguous() for table in rotary),
            query_norm,
            key_norm,
            query,
            query_eps,
            key_eps,
            rows,
            written,
            *strides,
            **launch_constants(num_heads, num_kv_heads, size, normed=norms is not None),
            num_warps=NUM_WARPS,
        )
    return query


def _check(
    heads: Tensor, keys: Tensor, values: Tensor, positions: Tensor, rotary: tuple[Tensor, Tensor], num_heads: int
) -> None:
    if heads.dtype not in DTYPES or keys.dtype not in DTYPES or any(table.dtype != torch.float32 for table in rotary):
        raise ValueError(f"no rotation of {heads.dtype} with tables of {rotary[0].dtype} into {keys.dtype}")
    batch, num_kv_heads, _, size = keys.shape
    if size % 2 or keys.stride()[2:] != (size, 1) or any(stride % size for stride in keys.stride()[:2]):
        raise ValueError(f"no writes into a cache {list(keys.shape)} with strides {keys.stride()}")
    if (values.shape, values.dtype, values.stride()) != (keys.shape, keys.dtype, keys.stride()):
        raise ValueError(f"values {list(values.shape)} of {values.dtype}, but keys {list(keys.shape)} of {keys.dtype}")
    if heads.shape != (*positions.shape, (num_heads + 2 * num_kv_heads) * size) or len(heads) != batch:
        raise ValueError(f"heads {list(heads.shape)} at {list(positions.shape)} for a cache {list(keys.shape)}")
    if any(table.shape[1:] != (size,) for table in rotary):
        raise ValueError(f"rotary tables {[list(table.shape) for table in rotary]} for heads of {size}")
    if any(other.device != heads.device for other in (keys, values, positions, *rotary)):
        raise ValueError(f"heads on {heads.device}, but cache on {keys.device} and positions on {positions.device}")


def launch_constants(num_heads: int, num_kv_heads: int, size: int, *, normed: bool) -> dict[str, Any]:
    """Return the kernel's compile-time arguments."""
    return {
        "NUM_HEADS": num_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "SIZE": size,
        "WIDTH": triton.next_power_of_2(size // 2),
        "NORMED": normed,
    }


# Where positions stand, and numbers that differ from call to call, must not choose another compiled kernel: its bits
# might be others.
@triton.jit(
    do_not_specialize=["rows", "written", "sequence_stride", "head_stride"],
    do_not_specialize_on_alignment=["positions"],
)
def rope_kv_write_kernel(  # type: ignore[no-untyped-def]
    heads,
    keys,
    values,
    positions,
    cos,
    sin,
    query_norm,
    key_norm,
    query,
    query_eps,
    key_eps,
    rows,
    written,
    sequence_stride,
    head_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    NORMED: tl.constexpr,
):
    """Take one head of heads [B, T, H + 2 Hkv, D] to query [B, T, H, D] or to the cache, both halves side by side.

    Strides of the cache are counted in vectors of D numbers.
    """
    program = tl.program_id(0).to(tl.int64)
    row = program // (NUM_HEADS + 2 * NUM_KV_HEADS)
    head = program % (NUM_HEADS + 2 * NUM_KV_HEADS)
    if (head >= NUM_HEADS) & (row % rows >= written):
        return
    HALF: tl.constexpr = SIZE // 2
    lane = tl.arange(0, WIDTH)
    inside = lane < HALF
    first = tl.load(heads + program * SIZE + lane, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(heads + program * SIZE + HALF + lane, mask=inside, other=0.0).to(tl.float32)
    position = tl.load(positions + row)

    if head < NUM_HEADS + NUM_KV_HEADS:
        if NORMED:
            norm = query_norm
            eps = query_eps
            if head >= NUM_HEADS:
                norm = key_norm
                eps = key_eps
            factor = tl.rsqrt(tl.sum(first * first + second * second, 0) / SIZE + eps)
            first = first * factor * tl.load(norm + lane, mask=inside, other=0.0).to(tl.float32)
            second = second * factor * tl.load(norm + HALF + lane, mask=inside, other=0.0).to(tl.float32)
        at = position * SIZE + lane
        turned = first * tl.load(cos + at, mask=inside, other=0.0)
        turned += second * tl.load(sin + at, mask=inside, other=0.0)
        second = second * tl.load(cos + at + HALF, mask=inside, other=0.0)
        second += first * tl.load(sin + at + HALF, mask=inside, other=0.0)
        first = turned

    if head < NUM_HEADS:
        result = query + (row * NUM_HEADS + head) * SIZE + lane
        tl.store(result, first, mask=inside)
        tl.store(result + HALF, second, mask=inside)
    else:
        # Keys come before values.
        part = keys
        if head >= NUM_HEADS + NUM_KV_HEADS:
            part = values
        vector = row // rows * sequence_stride + (head - NUM_HEADS) % NUM_KV_HEADS * head_stride + position
        place = part + vector * SIZE + lane
        tl.store(place, first.to(keys.dtype.element_ty), mask=inside)
        tl.store(place + HALF, second.to(keys.dtype.element_ty), mask=inside)
