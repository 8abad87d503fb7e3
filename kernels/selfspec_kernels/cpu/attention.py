"""`rope_kv_write` and `ragged_attention` on a CPU: every query row is computed by itself, over the slots it sees.

A row reads the slots 0..position in order and nothing else, so its bits cannot depend on the cache's capacity, on stale
slots, on other rows or on how many rows a call has; no block needs to be cleared.
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit, prange

from selfspec_kernels.cpu.formats import FLOAT32
from selfspec_kernels.cpu.linear import columns_bfloat16, columns_float32, normalise
from selfspec_kernels.cpu.memory import bytes_of, exp_row, load_row, pointer, store_row


@njit
def _rotate(head, norm, number_format, eps, cos, sin, scratch):  # type: ignore[no-untyped-def]
    """Norm (where `norm` is not 0) and rotate one fp32 head in place; sin is negated in its first half."""
    half = head.size // 2
    if norm != 0:
        normalise(head, norm, number_format, eps, scratch)
    for i in range(half):
        first, second = head[i], head[i + half]
        head[i] = first * cos[i] + second * sin[i]
        head[i + half] = second * cos[i + half] + first * sin[i + half]


@njit(nogil=True, cache=True, error_model="numpy")
def rope_kv_write(  # type: ignore[no-untyped-def]
    heads,
    number_format,
    query_norm,
    key_norm,
    eps,
    cos,
    sin,
    positions,
    keys,
    values,
    query,
    batch,
    rows,
    written,
    num_heads,
    num_kv_heads,
    size,
    row_stride,
    head_stride,
):
    """Rotate queries and keys of [batch, rows, (H + 2 Hkv) · D] heads; write keys and values at their positions.

    Args:
        heads, keys, values: addresses, numbers in `number_format`; the cache's are [batch, Hkv, slots, D] with the
            strides `row_stride` and `head_stride`, in elements, of the first two dimensions.
        query_norm, key_norm: addresses of per-head RMSNorm weights [D], or 0.
        cos, sin: addresses of fp32 tables [positions, D].
        positions: address of int64 [batch, rows]: rotary position and slot of each row.
        query: address of the fp32 result [batch, rows, H, D].
        written: the first so many rows of each sequence are written; the others are padding.
    """
    bytes_each = bytes_of(number_format)
    head, scratch = np.empty(size, np.float32), np.empty(1, np.float32)
    places = carray(pointer(positions), (batch, rows), np.int64)
    width = num_heads + 2 * num_kv_heads
    for b in range(batch):
        for t in range(rows):
            position = places[b, t]
            cosines = carray(pointer(cos + position * size * 4), (size,), np.float32)
            sines = carray(pointer(sin + position * size * 4), (size,), np.float32)
            for h in range(width):
                kind = 0 if h < num_heads else (1 if h < num_heads + num_kv_heads else 2)
                if kind > 0 and t >= written:
                    break
                load_row(heads + (((b * rows + t) * width + h) * size) * bytes_each, number_format, head)
                if kind < 2:
                    norm = query_norm if kind == 0 else key_norm
                    _rotate(head, norm, number_format, eps, cosines, sines, scratch)
                if kind == 0:
                    store_row(query + (((b * rows + t) * num_heads + h) * size) * 4, FLOAT32, head)
                else:
                    base, kv_head = (keys, h - num_heads) if kind == 1 else (values, h - num_heads - num_kv_heads)
                    element = b * row_stride + kv_head * head_stride + position * size
                    store_row(base + element * bytes_each, number_format, head)


@njit
def _attend(query, keys, values, number_format, slots, group, size, out, out_format):  # type: ignore[no-untyped-def]
    """Attention of scaled fp32 queries [group, size] over the first `slots` keys and values at two addresses."""
    bytes_each = bytes_of(number_format)
    weights = np.empty((group, slots), np.float32)
    arguments = (0, weights.ctypes.data, group, size, 0, slots)
    if number_format == FLOAT32:
        columns_float32(query.ctypes.data, keys, *arguments, size * 4, 0, slots)
    else:
        columns_bfloat16(query.ctypes.data, keys, *arguments, size * 2, 0, slots)
    for g in range(group):
        largest = weights[g, 0]
        for s in range(slots):
            largest = max(largest, weights[g, s])
        for s in range(slots):
            weights[g, s] -= largest
        exp_row(weights[g])
    totals, mixed = np.zeros(group, np.float32), np.zeros((group, size), np.float32)
    value = np.empty(size, np.float32)
    for s in range(slots):
        load_row(values + s * size * bytes_each, number_format, value)
        for g in range(group):
            weight = weights[g, s]
            totals[g] += weight
            for i in range(size):
                mixed[g, i] += weight * value[i]
    for g in range(group):
        for i in range(size):
            mixed[g, i] /= totals[g]
        store_row(out + g * size * bytes_of(out_format), out_format, mixed[g])


@njit
def attention_part(  # type: ignore[no-untyped-def]
    task,
    tasks,
    query,
    scale,
    keys,
    values,
    number_format,
    positions,
    window,
    out,
    out_format,
    batch,
    rows,
    num_heads,
    num_kv_heads,
    size,
    row_stride,
    head_stride,
):
    """Write one of `tasks` parts, of (row, key/value head) pairs, of the attention of fp32 queries [batch, rows, H, D].

    Args:
        keys, values: addresses in `number_format`, with strides as in `rope_kv_write`.
        positions: address of int64 [batch, rows]; a row sees the slots up to its own, the last `window` of them if > 0.
        out: address of [batch, rows, H · D] in `out_format`.
    """
    group = num_heads // num_kv_heads
    places = carray(pointer(positions), (batch * rows,), np.int64)
    bytes_each, out_bytes = bytes_of(number_format), bytes_of(out_format)
    scaled = np.empty((group, size), np.float32)
    for pair in range(task, batch * rows * num_kv_heads, tasks):
        row, kv_head = pair // num_kv_heads, pair % num_kv_heads
        first = (row * num_heads + kv_head * group) * size
        source = carray(pointer(query + first * 4), (group, size), np.float32)
        for g in range(group):
            for i in range(size):
                scaled[g, i] = source[g, i] * np.float32(scale)
        position = places[row]
        start = max(0, position + 1 - window) if window > 0 else 0
        offset = (row // rows * row_stride + kv_head * head_stride + start * size) * bytes_each
        slots, to = position + 1 - start, out + first * out_bytes
        _attend(scaled, keys + offset, values + offset, number_format, slots, group, size, to, out_format)


@njit(nogil=True, cache=True, error_model="numpy")
def ragged_attention_serial(*arguments):  # type: ignore[no-untyped-def]
    """Attention on this thread; arguments as `attention_part` has them from `query` on."""
    attention_part(0, 1, *arguments)


@njit(parallel=True, nogil=True, cache=True, error_model="numpy")
def ragged_attention_parallel(tasks, *arguments):  # type: ignore[no-untyped-def]
    """The same on numba's threads, in `tasks` parts."""
    for task in prange(tasks):
        attention_part(task, tasks, *arguments)
