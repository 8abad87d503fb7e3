"""The ops on a CPU, compiled at their first call by numba (the extra `cpu`) and cached beside these files.

Tensors go in by address. The bits of a result row depend on that row's inputs only (see `lanes`), so on CPUs every row
count is one class. numba's cache looks only at the file a kernel stands in: after a change to another one,
remove the `__pycache__` folders.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from selfspec_kernels.cpu import formats
from selfspec_kernels.weights import LayerWeights, PackedWeight

FORMATS = {torch.float32: formats.FLOAT32, torch.bfloat16: formats.BFLOAT16}
PACKED_FORMATS = {8: formats.INT8, 4: formats.INT4}
LEAST_WORK = 1 << 16
"""Multiply-adds below which a call is not split over threads."""

enabled = True
"""Set to False to run the reference instead."""


@cache
def available() -> bool:
    """Whether numba is installed."""
    return find_spec("numba") is not None


def runs(tensor: Tensor) -> bool:
    """Whether these kernels can work on a tensor like this."""
    return tensor.device.type == "cpu" and tensor.dtype in FORMATS and enabled and available()


def few_row_linear(
    inputs: Tensor,
    weight: Tensor | PackedWeight,
    bias: Tensor | None,
    norm: tuple[Tensor, float] | None,
    gated: bool,
    residual: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """See `selfspec_kernels.few_row_linear`."""
    from selfspec_kernels.cpu import linear

    data, scale, weight_format, group, bias_at, width, size = _product(weight, bias)
    inputs = inputs.contiguous()
    rows = inputs.numel() // inputs.shape[-1]
    out = torch.empty(*inputs.shape[:-1], width, dtype=out_dtype)
    if residual is not None:
        residual = residual.contiguous()
    assert inputs.shape[-1] == size * (2 if gated else 1)
    arguments = (
        inputs.data_ptr(),
        norm[0].data_ptr() if norm else 0,
        norm[1] if norm else 0.0,
        gated,
        FORMATS[inputs.dtype],
        weight_format,
        rows,
        size,
        data,
        scale,
        group,
        bias_at,
        _address(residual),
        out.data_ptr(),
        FORMATS[out_dtype],
        width,
    )
    tasks = _tasks(rows * size * width)
    if tasks == 1:
        linear.few_row_linear.ctypes(1, *arguments)
    else:
        from selfspec_kernels.cpu import threads

        threads.few_row_linear.ctypes(tasks, *arguments)
    return out


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
    """See `selfspec_kernels.rope_kv_write`."""
    from selfspec_kernels.cpu import attention

    batch, num_kv_heads, _, size = keys.shape
    rows = positions.shape[1]
    query = torch.empty(batch, rows, num_heads, size)
    cos, sin = rotary
    assert keys.stride() == values.stride() and keys.stride()[2:] == (size, 1) and positions.is_contiguous()
    assert heads.is_contiguous() and cos.is_contiguous() and sin.is_contiguous()
    attention.rope_kv_write.ctypes(
        heads.data_ptr(),
        FORMATS[heads.dtype],
        norms[0][0].data_ptr() if norms else 0,
        norms[1][0].data_ptr() if norms else 0,
        norms[0][1] if norms else 0.0,
        cos.data_ptr(),
        sin.data_ptr(),
        positions.data_ptr(),
        keys.data_ptr(),
        values.data_ptr(),
        query.data_ptr(),
        batch,
        rows,
        written,
        num_heads,
        num_kv_heads,
        size,
        *keys.stride()[:2],
    )
    return query


def ragged_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    scale: float,
    window: int | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """Attention of rows that each see the slots up to their own position, with bits that depend on nothing else.

    Args:
        query: fp32 [B, T, H, D], rotated.
        keys, values: [B, Hkv, S, D] views of one layer of the cache; H is a multiple of Hkv.
        positions: [B, T].
        window: see only so many of the last slots.

    Returns:
        [B, T, H · D] in `out_dtype`.
    """
    from selfspec_kernels.cpu import attention

    batch, rows, num_heads, size = query.shape
    num_kv_heads = keys.shape[1]
    out = torch.empty(batch, rows, num_heads * size, dtype=out_dtype)
    query, positions = query.contiguous(), positions.contiguous()
    arguments = (
        query.data_ptr(),
        scale,
        keys.data_ptr(),
        values.data_ptr(),
        FORMATS[keys.dtype],
        positions.data_ptr(),
        window or 0,
        out.data_ptr(),
        FORMATS[out_dtype],
        batch,
        rows,
        num_heads,
        num_kv_heads,
        size,
        *keys.stride()[:2],
    )
    tasks = _tasks(rows * batch * num_heads * size * keys.shape[2])
    if tasks == 1:
        attention.ragged_attention.ctypes(1, *arguments)
    else:
        from selfspec_kernels.cpu import threads

        threads.ragged_attention.ctypes(tasks, *arguments)
    return out


class LayerTable:
    """Layers ready to be run in one call: their weights by address. Holds on to the tensors."""

    def __init__(self, layers: Sequence[LayerWeights]) -> None:
        from selfspec_kernels.cpu.layers import COLUMNS

        self.layers = list(layers)
        self._table = torch.empty(len(layers), COLUMNS, dtype=torch.int64)
        self._reals = torch.empty(len(layers), 4, dtype=torch.float64)
        for number, one in enumerate(self.layers):
            products = [_product(*product) for product in (one.qkv, one.out, one.gate_up, one.down)]
            norms = one.head_norms or ((None, 0.0), (None, 0.0))
            assert norms[0][1] == norms[1][1]
            addresses = [_address(norm) for norm in (one.input_norm[0], one.mlp_norm[0], norms[0][0], norms[1][0])]
            numbers = [value for product in products for value in product]
            self._table[number] = torch.tensor([*numbers, *addresses, one.cache_layer, one.window or 0])
            self._reals[number] = torch.tensor([one.input_norm[1], one.mlp_norm[1], norms[0][1], one.scale])

    def run(
        self,
        hidden: Tensor,
        start: int,
        stop: int,
        keys: Tensor,
        values: Tensor,
        positions: Tensor,
        written: int,
        rotary: tuple[Tensor, Tensor],
        num_heads: int,
    ) -> Tensor:
        """Run layers start..stop of the table; returns new hidden states.

        Args:
            hidden: [B, T, d].
            keys, values: [L, B, Hkv, S, D] views of the whole cache, of hidden's dtype; D is a multiple of 8.
            positions, written, rotary, num_heads: as in `rope_kv_write`.
        """
        from selfspec_kernels.cpu.layers import run_layers

        _, batch, num_kv_heads, slots, size = keys.shape
        rows, hidden = hidden.shape[1], hidden.clone(memory_format=torch.contiguous_format)
        cos, sin = rotary
        assert keys.stride() == values.stride() and keys.stride()[3:] == (size, 1) and positions.is_contiguous()
        assert cos.is_contiguous() and sin.is_contiguous() and keys.dtype == hidden.dtype
        threads = torch.get_num_threads()
        threads = 1 if threads == 1 else _use_threads(threads)
        run_layers(
            _addresses(threads > 1),
            threads,
            LEAST_WORK,
            self._table.numpy()[start:stop],
            self._reals.numpy()[start:stop],
            FORMATS[hidden.dtype],
            hidden.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            positions.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            *keys.stride()[:3],
            slots,
            batch,
            rows,
            written,
            num_heads,
            num_kv_heads,
            size,
        )
        return hidden


@cache
def _addresses(several_threads: bool) -> Any:
    """Return the ops' addresses for `layers.run_layers`; those for several threads only where they are needed."""
    import numpy as np

    from selfspec_kernels.cpu import attention, linear

    parallel = [0, 0]
    if several_threads:
        from selfspec_kernels.cpu import threads

        parallel = [threads.few_row_linear.address, threads.ragged_attention.address]
    serial = [linear.few_row_linear.address, attention.ragged_attention.address]
    return np.array([attention.rope_kv_write.address, serial[0], parallel[0], serial[1], parallel[1]])


def _product(weight: Tensor | PackedWeight, bias: Tensor | None) -> tuple[int, ...]:
    """Return the numbers a product is known by: address, of the scales too, format, group, bias, width and size."""
    if isinstance(weight, PackedWeight):
        data, scale, weight_format, group = weight.data, weight.scale, PACKED_FORMATS[weight.bits], weight.group
    else:
        data, scale, weight_format, group = weight, None, FORMATS[weight.dtype], weight.shape[1]
    assert data.is_contiguous() and (bias is None or bias.is_contiguous())
    return (data.data_ptr(), _address(scale), weight_format, group, _address(bias), *weight.shape)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _tasks(work: int) -> int:
    """Parts to split a call of `work` multiply-adds in: as many as torch has threads, one for a small call.

    One part runs on the calling thread: waking others costs more than a small call, and much more on a busy machine.
    """
    threads = torch.get_num_threads()
    return 1 if work < LEAST_WORK or threads == 1 else _use_threads(threads)


@cache
def _use_threads(count: int) -> int:
    import numba

    count = min(count, numba.config.NUMBA_NUM_THREADS)
    numba.set_num_threads(count)
    # numba's first parallel call sets the thread number of the OpenMP library, which torch may share.
    torch.set_num_threads(count)
    return int(count)
