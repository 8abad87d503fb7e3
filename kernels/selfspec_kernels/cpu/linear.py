"""`few_row_linear` on a CPU: up to some twenty rows against a weight matrix that is read once, whatever its format."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit

from selfspec_kernels.cpu.formats import BFLOAT16, FLOAT32, INT4, INT8
from selfspec_kernels.cpu.integers import IntegerTile, to_records
from selfspec_kernels.cpu.lanes import FloatTile, Tile, make_tile
from selfspec_kernels.cpu.memory import bytes_of, compile_op, exp_row, load_row, pointer, store_row
from selfspec_kernels.weights import BLOCK


def _make_columns(kind: type[Tile], weight_format: str) -> Any:
    tile_4x2, tile_2x4, tile_1x4, tile_1x1 = (
        make_tile(kind, weight_format, rows, columns) for rows, columns in ((4, 2), (2, 4), (1, 4), (1, 1))
    )

    @njit
    def columns(x, w, scale, out, rows, size, start, stop, w_stride, scale_stride, out_stride):  # type: ignore[no-untyped-def]
        whole = start + (stop - start) // 4 * 4
        for block in range(start, whole, 4):
            row = 0
            while row + 4 <= rows:
                inputs = x + row * size * 4
                for first in range(block, block + 4, 2):
                    weights, scales, outputs = w + first * w_stride, scale + first * scale_stride, out + first * 4
                    outputs += row * out_stride * 4
                    tile_4x2(inputs, weights, scales, outputs, size, size, w_stride, scale_stride, out_stride)
                row += 4
            weights, scales = w + block * w_stride, scale + block * scale_stride
            while row < rows:
                inputs, outputs = x + row * size * 4, out + (row * out_stride + block) * 4
                if row + 2 <= rows:
                    tile_2x4(inputs, weights, scales, outputs, size, size, w_stride, scale_stride, out_stride)
                else:
                    tile_1x4(inputs, weights, scales, outputs, size, size, w_stride, scale_stride, out_stride)
                row += 2
        for first in range(whole, stop):
            weights, scales, outputs = w + first * w_stride, scale + first * scale_stride, out + first * 4
            for row in range(rows):
                inputs, output = x + row * size * 4, outputs + row * out_stride * 4
                tile_1x1(inputs, weights, scales, output, size, size, w_stride, scale_stride, out_stride)

    return columns


columns_float32 = _make_columns(FloatTile, "float32")
"""`columns(x, w, scale, out, rows, size, start, stop, w_stride, scale_stride, out_stride)`: out[:, start:stop] of a
product of fp32 rows [rows, size] at address x with the rows of w; strides as in `lanes.make_tile`."""
columns_bfloat16 = _make_columns(FloatTile, "bfloat16")
_columns_int8 = _make_columns(IntegerTile, "int8")
_columns_int4 = _make_columns(IntegerTile, "int4")


@njit
def normalise(row, norm, number_format, eps, scratch):  # type: ignore[no-untyped-def]
    """RMSNorm of an fp32 row, in place."""
    address, square = row.ctypes.data, scratch[0:1]
    columns_float32(address, address, 0, square.ctypes.data, 1, row.size, 0, 1, 0, 0, 0)
    factor = np.float32(1.0) / np.sqrt(square[0] / np.float32(row.size) + np.float32(eps))
    weight = np.empty(row.size, np.float32)
    load_row(norm, number_format, weight)
    for i in range(row.size):
        row[i] = row[i] * factor * weight[i]


@njit
def _gate(row, gate_up, number_format):  # type: ignore[no-untyped-def]
    """Fill an fp32 row with silu(gate) · up from 2 · row.size numbers at address `gate_up`."""
    both = np.empty(2 * row.size, np.float32)
    load_row(gate_up, number_format, both)
    for i in range(row.size):
        row[i] = -both[i]
    exp_row(row)
    for i in range(row.size):
        silu = both[i] / (np.float32(1.0) + row[i]) if both[i] > np.float32(-87.0) else np.float32(0.0)
        row[i] = silu * both[row.size + i]


@njit
def _finish(row, position, column, bias, residual, number_format, out, out_format):  # type: ignore[no-untyped-def]
    """Add bias and residual to part of a row of products, and write it to element `position` of out."""
    bytes_each = bytes_of(number_format)
    other = np.empty(row.size, np.float32)
    if bias != 0:
        load_row(bias + column * bytes_each, number_format, other)
        for i in range(row.size):
            row[i] += other[i]
    if residual != 0:
        if out_format == BFLOAT16:  # the product is rounded before it is added, as in a layer of separate operations
            rounded = carray(pointer(out + position * 2), (row.size,), np.uint16)
            store_row(rounded.ctypes.data, BFLOAT16, row)
            load_row(rounded.ctypes.data, BFLOAT16, row)
        load_row(residual + position * bytes_each, number_format, other)
        for i in range(row.size):
            row[i] += other[i]
    store_row(out + position * bytes_of(out_format), out_format, row)


@njit
def prepare_inputs(x, norm, eps, gated, number_format, weight_format, rows, size):  # type: ignore[no-untyped-def]
    """Return what goes into the product: x, RMSNorm(x) or silu(gate) · up, fp32 [rows, size] or records.

    Records are [rows, size rounded up to whole blocks].

    Args:
        x: address of [rows, size] numbers, [rows, 2 · size] if `gated`.
        norm: address of the norm's weights, or 0.
        number_format: of x and norm: `formats.FLOAT32` or `BFLOAT16`.
    """
    packed = weight_format in (INT8, INT4)
    held = np.zeros((rows, (size + BLOCK - 1) // BLOCK * BLOCK if packed else size), np.float32)
    inputs, scratch = held[:, :size], np.empty(1, np.float32)
    bytes_each = bytes_of(number_format)
    for row in range(rows):
        if gated:
            _gate(inputs[row], x + row * 2 * size * bytes_each, number_format)
        else:
            load_row(x + row * size * bytes_each, number_format, inputs[row])
        if norm != 0:
            normalise(inputs[row], norm, number_format, eps, scratch)
        if packed:
            to_records(held[row])
    return held


@njit
def linear_part(  # type: ignore[no-untyped-def]
    task, tasks, inputs, number_format, weight_format, w, scale, group, bias, residual, out, out_format, width
):
    """Write one of `tasks` parts of the columns of out = residual + inputs · wᵀ + bias.

    Args:
        inputs: [rows, size], from `prepare_inputs`.
        w, scale: address of the weights [width, size] in `weight_format` and of their scales, one per `group`.
        bias, residual: addresses of [width] and [rows, width] in `number_format`, or 0.
        out: address of [rows, width] in `out_format`.
    """
    rows, size = inputs.shape
    part = ((width + tasks - 1) // tasks + 3) // 4 * 4
    first, stop = task * part, min(width, (task + 1) * part)
    count = stop - first
    if count <= 0:
        return
    held = np.empty((rows, count), np.float32)
    inputs_at, held_at = inputs.ctypes.data, held.ctypes.data
    if weight_format == FLOAT32:
        stride = size * 4
        columns_float32(inputs_at, w + first * stride, 0, held_at, rows, size, 0, count, stride, 0, count)
    elif weight_format == BFLOAT16:
        stride = size * 2
        columns_bfloat16(inputs_at, w + first * stride, 0, held_at, rows, size, 0, count, stride, 0, count)
    elif weight_format == INT8:
        _columns_int8(inputs_at, w + first * size, scale + first * 4, held_at, rows, size, 0, count, size, 4, count)
    else:
        stride, scales = size // 2, size // group * 4
        scale += first * scales
        _columns_int4(inputs_at, w + first * stride, scale, held_at, rows, size, 0, count, stride, scales, count)
    for row in range(rows):
        _finish(held[row], row * width + first, first, bias, residual, number_format, out, out_format)


@compile_op(3, 17)
def few_row_linear(  # type: ignore[no-untyped-def]
    tasks,
    x,
    norm,
    eps,
    gated,
    number_format,
    weight_format,
    rows,
    size,
    w,
    scale,
    group,
    bias,
    residual,
    out,
    out_format,
    width,
):
    """`selfspec_kernels.few_row_linear` on this thread; arguments as in `prepare_inputs` and `linear_part`."""
    inputs = prepare_inputs(x, norm, eps, gated, number_format, weight_format, rows, size)
    after = (w, scale, group, bias, residual, out, out_format, width)
    linear_part(0, 1, inputs, number_format, weight_format, *after)
