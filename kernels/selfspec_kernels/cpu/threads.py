"""The ops that are worth several threads, on numba's. Apart, because what is imported here is compiled for threads."""

from __future__ import annotations

from numba import prange

from selfspec_kernels.cpu.attention import attention_part
from selfspec_kernels.cpu.linear import linear_part, prepare_inputs
from selfspec_kernels.cpu.memory import compile_op


@compile_op(3, 17, parallel=True)
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
    """`linear.few_row_linear`, in `tasks` parts of the columns."""
    inputs = prepare_inputs(x, norm, eps, gated, number_format, weight_format, rows, size)
    after = (w, scale, group, bias, residual, out, out_format, width)
    for task in prange(tasks):
        linear_part(task, tasks, inputs, number_format, weight_format, *after)


@compile_op(2, 17, parallel=True)
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
    """`attention.ragged_attention`, in `tasks` parts."""
    shape = (batch, rows, num_heads, num_kv_heads, size, row_stride, head_stride)
    for task in prange(tasks):
        attention_part(
            task, tasks, query, scale, keys, values, number_format, positions, window, out, out_format, *shape
        )
