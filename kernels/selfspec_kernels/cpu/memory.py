"""Rows of numbers in memory given by address: as fp32, and back. Elementwise, so free of any order of additions."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, cfunc, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from selfspec_kernels.cpu.formats import FLOAT32


@intrinsic
def pointer(typing_context: Any, address: Any) -> Any:
    """Turn an int64 address into a pointer."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


@intrinsic
def call(typing_context: Any, address: Any, arguments: Any) -> Any:
    """Call a compiled function by address, with a tuple of int64 and fp64 numbers; it returns nothing.

    What it calls is compiled once, by itself; calling it by name would compile it again into every caller.
    """

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        kinds = [context.get_value_type(kind) for kind in arguments.types]
        function = ir.FunctionType(ir.VoidType(), kinds)
        numbers = [builder.extract_value(values[1], index) for index in range(len(kinds))]
        builder.call(builder.inttoptr(values[0], function.as_pointer()), numbers)
        return context.get_dummy_value()

    return types.void(types.int64, arguments), generate


def compile_op(reals: int, arguments: int, *, parallel: bool = False) -> Any:
    """Return a decorator that compiles a function of int64 numbers, of which number `reals` is fp64, into a C function.

    It is compiled for this signature when it is defined, and cached; `.ctypes` calls it, `.address` is for `call`.
    """
    kinds = [types.int64] * arguments
    kinds[reals] = types.float64
    return cfunc(types.void(*kinds), cache=True, error_model="numpy", parallel=parallel)


@njit(inline="always")
def bytes_of(number_format):  # type: ignore[no-untyped-def]
    """Return the size of a number of an activation's format."""
    return 4 if number_format == FLOAT32 else 2


@njit(inline="always")
def load_row(address, number_format, row):  # type: ignore[no-untyped-def]
    """Fill fp32 `row` from `row.size` numbers at `address`."""
    size = row.size
    if number_format == FLOAT32:
        source = carray(pointer(address), (size,), np.float32)
        for i in range(size):
            row[i] = source[i]
    else:
        halves = carray(pointer(address), (size,), np.uint16)
        bits = row.view(np.uint32)
        for i in range(size):
            bits[i] = np.uint32(halves[i]) << np.uint32(16)


@njit(inline="always")
def store_row(address, number_format, row):  # type: ignore[no-untyped-def]
    """Write fp32 `row` to `address`, rounded to nearest even where the format is bfloat16."""
    size = row.size
    if number_format == FLOAT32:
        target = carray(pointer(address), (size,), np.float32)
        for i in range(size):
            target[i] = row[i]
    else:
        halves = carray(pointer(address), (size,), np.uint16)
        bits = row.view(np.uint32)
        for i in range(size):
            odd = (bits[i] >> np.uint32(16)) & np.uint32(1)
            halves[i] = np.uint16((bits[i] + np.uint32(0x7FFF) + odd) >> np.uint32(16))


@njit(inline="always")
def exp_row(row):  # type: ignore[no-untyped-def]
    """Replace each x of fp32 `row` by exp(x), to about 2 units in the last place; below −87 by about 1e-38."""
    powers = np.empty(row.size, np.int32)
    factors = powers.view(np.float32)
    for i in range(row.size):
        scaled = min(max(row[i], np.float32(-87.0)), np.float32(88.0)) * np.float32(1.4426950408889634)
        whole = np.floor(scaled + np.float32(0.5))
        # exp(x) = 2^whole · exp(f) with |f| ≤ ln2/2: ln2 in two parts, then the Taylor series.
        f = min(max(row[i], np.float32(-87.0)), np.float32(88.0)) - whole * np.float32(0.693359375)
        f = f + whole * np.float32(2.12194440e-4)
        series = np.float32(1.9875691500e-4)
        series = series * f + np.float32(1.3981999507e-3)
        series = series * f + np.float32(8.3334519073e-3)
        series = series * f + np.float32(4.1665795894e-2)
        series = series * f + np.float32(1.6666665459e-1)
        series = series * f + np.float32(5.0000001201e-1)
        row[i] = series * f * f + f + np.float32(1.0)
        powers[i] = (np.int32(whole) + np.int32(127)) << np.int32(23)
    for i in range(row.size):
        row[i] *= factors[i]
