"""A run of decoder layers in one call: at batch 1, six ways in and out of Python per layer cost a tenth of a step.

Nothing is computed here. The ops are called as they are compiled for calls from Python, so the bits are the same.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from selfspec_kernels.cpu.memory import bytes_of, call

PRODUCT = 7
"""Numbers of a product: addresses of weights and scales, format, group, address of the bias, width and size."""
QKV, OUT, GATE_UP, DOWN = range(0, 4 * PRODUCT, PRODUCT)
INPUT_NORM, MLP_NORM, QUERY_NORM, KEY_NORM, CACHE_LAYER, WINDOW = range(4 * PRODUCT, 4 * PRODUCT + 6)
COLUMNS = 4 * PRODUCT + 6
"""Numbers of a layer in a table, at these places: four products, addresses of four norms (0: none), its place in the
cache, the attention window (0: none)."""
INPUT_EPS, MLP_EPS, HEAD_EPS, SCALE = range(4)
"""A layer's real numbers: epsilons of its norms, and the scale of its scores."""
ROPE, PRODUCT_SERIAL, PRODUCT_PARALLEL, ATTENTION_SERIAL, ATTENTION_PARALLEL = range(5)
"""Places of the ops' addresses."""


@njit
def _multiply(ops, threads, least, product, x, norm, eps, gated, number_format, rows, residual, out):  # type: ignore[no-untyped-def]
    weight, scale, weight_format, group, bias, width, size = product
    tasks = threads if rows * size * width >= least else 1
    inputs = (np.int64(tasks), x, np.int64(norm), np.float64(eps), np.int64(gated), number_format)
    outputs = (np.int64(residual), out, number_format, width)
    op = ops[PRODUCT_PARALLEL if tasks > 1 else PRODUCT_SERIAL]
    call(op, inputs + (weight_format, rows, size, weight, scale, group, bias) + outputs)  # noqa: RUF005


@njit
def _product(row, at):  # type: ignore[no-untyped-def]
    return row[at], row[at + 1], row[at + 2], row[at + 3], row[at + 4], row[at + 5], row[at + 6]


@njit(nogil=True, cache=True, error_model="numpy")
def run_layers(  # type: ignore[no-untyped-def]
    ops,
    threads,
    least,
    table,
    reals,
    number_format,
    hidden,
    cos,
    sin,
    positions,
    keys,
    values,
    layer_stride,
    row_stride,
    head_stride,
    slots,
    batch,
    rows,
    written,
    num_heads,
    num_kv_heads,
    size,
):
    """Run layers in place on [batch, rows, d] hidden states.

    Args:
        ops: int64 [5], addresses; those for several threads are not used where `threads` is 1.
        threads, least: ops of less than `least` multiply-adds stay on this thread.
        table, reals: int64 [layers, `COLUMNS`] and fp64 [layers, 4].
        number_format: of hidden states, norms, biases and the cache.
        hidden: address; it holds the result at the end.
        cos, sin, positions, keys, values, written: as in `attention.rope_kv_write`; keys and values of layer 0, with
            `layer_stride`, `row_stride` and `head_stride` elements between layers, rows and heads.
        slots: of the cache; how much work attention may be.
    """
    bytes_each, count = bytes_of(number_format), batch * rows
    other = np.empty(count * _product(table[0], OUT)[5] * bytes_each, np.uint8)
    heads = np.empty(count * _product(table[0], QKV)[5] * bytes_each, np.uint8)
    query = np.empty(count * num_heads * size, np.float32)
    mixed = np.empty(count * num_heads * size * bytes_each, np.uint8)
    gates = np.empty(count * _product(table[0], GATE_UP)[5] * bytes_each, np.uint8)
    attention_tasks = threads if count * num_heads * size * slots >= least else 1
    attention = ops[ATTENTION_PARALLEL if attention_tasks > 1 else ATTENTION_SERIAL]
    for layer in range(table.shape[0]):
        # Asked for in the loop: numba frees an array after the last line that names it, whoever has its address.
        heads_at, query_at, mixed_at = heads.ctypes.data, query.ctypes.data, mixed.ctypes.data
        other_at, gates_at = other.ctypes.data, gates.ctypes.data
        one, real = table[layer], reals[layer]
        here, after = (ops, threads, least), (number_format, count)
        norm, eps = one[INPUT_NORM], real[INPUT_EPS]
        _multiply(*here, _product(one, QKV), hidden, norm, eps, 0, *after, 0, heads_at)
        offset = one[CACHE_LAYER] * layer_stride * bytes_each
        read = (keys + offset, values + offset)
        rotation = (one[QUERY_NORM], one[KEY_NORM], real[HEAD_EPS], cos, sin, positions)
        shape = (num_heads, num_kv_heads, size, row_stride, head_stride)
        call(ops[ROPE], (heads_at, number_format) + rotation + read + (query_at, batch, rows, written) + shape)  # noqa: RUF005
        out = (number_format, positions, one[WINDOW], mixed_at, number_format, batch, rows)
        call(attention, (np.int64(attention_tasks), query_at, real[SCALE]) + read + out + shape)  # noqa: RUF005
        _multiply(*here, _product(one, OUT), mixed_at, 0, 0.0, 0, *after, hidden, other_at)
        norm, eps = one[MLP_NORM], real[MLP_EPS]
        _multiply(*here, _product(one, GATE_UP), other_at, norm, eps, 0, *after, 0, gates_at)
        _multiply(*here, _product(one, DOWN), gates_at, 0, 0.0, 1, *after, other_at, hidden)
