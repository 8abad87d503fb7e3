"""`rope_kv_write` and `ragged_attention` on a CPU: every query row has its own sums, over the slots it sees.

A row's result is made of the slots 0..position in order and nothing else, so its bits cannot depend on the cache's
capacity, on stale slots, on other rows or on how many rows a call has; no block needs to be cleared.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit

from selfspec_kernels.cpu.formats import FLOAT32
from selfspec_kernels.cpu.lanes import LANES, MixTile, make_tile
from selfspec_kernels.cpu.linear import columns_bfloat16, columns_float32, normalise
from selfspec_kernels.cpu.memory import bytes_of, compile_op, exp_row, load_row, pointer, store_row

ROWS_AT_ONCE = 4
"""Rows whose queries are computed together; their scores must fit a cache."""


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


@compile_op(4, 19)
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


def _make_mix(number_format: str) -> Any:
    tile_4x2, tile_2x4, tile_1x4, tile_1x1 = (
        make_tile(MixTile, number_format, rows, columns) for rows, columns in ((4, 2), (2, 4), (1, 4), (1, 1))
    )

    @njit
    def mix(x, x_stride, w, w_stride, out, rows, size, width, bytes_each):  # type: ignore[no-untyped-def]
        whole = width // (4 * LANES) * 4 * LANES
        for block in range(0, whole, 4 * LANES):
            row = 0
            while row + 4 <= rows:
                for first in range(block, block + 4 * LANES, 2 * LANES):
                    weights, outputs = x + row * x_stride * 4, out + (row * width + first) * 4
                    tile_4x2(weights, w + first * bytes_each, 0, outputs, size, x_stride, w_stride, 0, width)
                row += 4
            while row < rows:
                weights, outputs = x + row * x_stride * 4, out + (row * width + block) * 4
                if row + 2 <= rows:
                    tile_2x4(weights, w + block * bytes_each, 0, outputs, size, x_stride, w_stride, 0, width)
                else:
                    tile_1x4(weights, w + block * bytes_each, 0, outputs, size, x_stride, w_stride, 0, width)
                row += 2
        for first in range(whole, width, LANES):
            for row in range(rows):
                weights, outputs = x + row * x_stride * 4, out + (row * width + first) * 4
                tile_1x1(weights, w + first * bytes_each, 0, outputs, size, x_stride, w_stride, 0, width)

    return mix


_mix_float32 = _make_mix("float32")
"""`mix(x, x_stride, w, w_stride, out, rows, size, width, bytes_each)`: out [rows, width] += x [rows, size] · w, of fp32
weights with `x_stride` elements between rows, `size` rows of w with `w_stride` bytes between them, `width` whole
`LANES`; each number of out is one chain in order of w's rows."""
_mix_bfloat16 = _make_mix("bfloat16")


@njit
def _softmax(row):  # type: ignore[no-untyped-def]
    """Replace fp32 scores by exp(score − largest) and return their sum; lane l adds up numbers l, l + LANES, …"""
    lanes = np.full(LANES, row[0], np.float32)
    whole = row.size // LANES * LANES
    for s in range(0, whole, LANES):
        for lane in range(LANES):
            score = row[s + lane]
            lanes[lane] = score if score > lanes[lane] else lanes[lane]
    largest = lanes[0]
    for lane in range(LANES):
        largest = max(largest, lanes[lane])
    for s in range(whole, row.size):
        largest = max(largest, row[s])
    for s in range(row.size):
        row[s] -= largest
    exp_row(row)
    lanes[:] = np.float32(0.0)
    for s in range(0, whole, LANES):
        for lane in range(LANES):
            lanes[lane] += row[s + lane]
    total = np.float32(0.0)
    for lane in range(LANES):
        total += lanes[lane]
    for s in range(whole, row.size):
        total += row[s]
    return total


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
    """Write one of `tasks` parts of the attention of fp32 queries [batch, rows, H, D], D a multiple of `LANES`.

    A unit of work is a key/value head and up to `ROWS_AT_ONCE` rows of a sequence: a key or value is widened once for
    all queries that see it. Their bits do not depend on that: each score and each sum has its own chain.

    Args:
        keys, values: addresses in `number_format`, with strides as in `rope_kv_write`.
        positions: address of int64 [batch, rows]; a row sees the slots up to its own, the last `window` of them if > 0.
        out: address of [batch, rows, H · D] in `out_format`.
    """
    group, parts = num_heads // num_kv_heads, (rows + ROWS_AT_ONCE - 1) // ROWS_AT_ONCE
    places = carray(pointer(positions), (batch, rows), np.int64)
    bytes_each, out_bytes, float32 = bytes_of(number_format), bytes_of(out_format), number_format == FLOAT32
    stride = size * bytes_each
    first, last = np.empty(ROWS_AT_ONCE, np.int64), np.empty(ROWS_AT_ONCE, np.int64)
    # Made here, as numba frees an array after the last line that names it, whoever has its address.
    scaled = np.empty((ROWS_AT_ONCE * group, size), np.float32)
    for unit in range(task, batch * parts * num_kv_heads, tasks):
        b, part, kv_head = unit // num_kv_heads // parts, unit // num_kv_heads % parts, unit % num_kv_heads
        begin = part * ROWS_AT_ONCE
        count = min(ROWS_AT_ONCE, rows - begin)
        lowest, start, stop, highest = np.int64(2**62), np.int64(0), np.int64(2**62), np.int64(0)
        mixed = np.zeros((count * group, size), np.float32)
        for t in range(count):
            position = places[b, begin + t]
            first[t], last[t] = max(0, position + 1 - window) if window > 0 else 0, position + 1
            lowest, highest = min(lowest, first[t]), max(highest, last[t])
            start, stop = max(start, first[t]), min(stop, last[t])
            at = query + ((b * rows + begin + t) * num_heads + kv_head * group) * size * 4
            source = carray(pointer(at), (group, size), np.float32)
            for g in range(group):
                for i in range(size):
                    scaled[t * group + g, i] = source[g, i] * np.float32(scale)
        stop = max(start, stop)
        offset = (b * row_stride + kv_head * head_stride) * bytes_each
        span = highest - lowest
        weights, totals = np.empty((count * group, span), np.float32), np.empty(count * group, np.float32)
        scores = (0, weights.ctypes.data, count * group, size, 0, span, stride, 0, span)
        if float32:
            columns_float32(scaled.ctypes.data, keys + offset + lowest * stride, *scores)
        else:
            columns_bfloat16(scaled.ctypes.data, keys + offset + lowest * stride, *scores)
        for q in range(count * group):
            totals[q] = _softmax(weights[q, first[q // group] - lowest : last[q // group] - lowest])
        # Slots that only some rows see come before and after those that all see, in order for every row.
        for stage in range(3):
            for t in range(1 if stage == 1 else count):
                low, high, several = start, stop, count * group
                if stage != 1:
                    several = group
                    low = first[t] if stage == 0 else max(stop, first[t])
                    high = min(start, last[t]) if stage == 0 else last[t]
                if high > low:
                    x, o = weights[t * group :, low - lowest :].ctypes.data, mixed[t * group :].ctypes.data
                    arguments = (stride, o, several, high - low, size, bytes_each)
                    if float32:
                        _mix_float32(x, span, values + offset + low * stride, *arguments)
                    else:
                        _mix_bfloat16(x, span, values + offset + low * stride, *arguments)
        for q in range(count * group):
            for i in range(size):
                mixed[q, i] /= totals[q]
            head = (b * rows + begin + q // group) * num_heads + kv_head * group + q % group
            store_row(out + head * size * out_bytes, out_format, mixed[q])


@compile_op(2, 17)
def ragged_attention(  # type: ignore[no-untyped-def]
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
    """Attention on this thread; arguments as `attention_part` has them."""
    shape = (batch, rows, num_heads, num_kv_heads, size, row_stride, head_stride)
    attention_part(0, 1, query, scale, keys, values, number_format, positions, window, out, out_format, *shape)
