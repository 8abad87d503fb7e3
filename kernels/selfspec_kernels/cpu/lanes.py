"""Dot products as LLVM vector code: the one place where the order of additions on a CPU is decided.

A result is the sum of `LANES` running sums, lane l over the elements l, l + LANES, …, each a chain of fused
multiply-adds in order of position, added up as a tree, and a scalar tail. This order is written out here, not left to
an optimiser, so the bits of a result depend on its two vectors alone: not on how many rows a tile has, how work is
split over threads, or how wide the CPU's registers are. Drafts' products have an order of their own, see `integers`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from typing import Any, ClassVar

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 8
LINE = 64
"""Bytes of a cache line."""
AHEAD = 1024
"""How many bytes behind the columns of a tile the weights begin that it asks for."""

F32, I8, I16, I32, I64 = ir.FloatType(), *(ir.IntType(bits) for bits in (8, 16, 32, 64))
VECTOR = ir.VectorType(F32, LANES)


def make_tile(kind: type[Tile], weight_format: str, rows: int, columns: int) -> Any:
    """Return the intrinsic `tile(x, w, scale, out, size, x_stride, w_stride, scale_stride, out_stride)`.

    It computes rows × columns dot products of `size` elements: out[r, c] = Σ x[r, :] · w[c, :]. Arguments are int64:
    addresses in bytes, `size` in elements, strides between rows (of x and out, in elements of 4 bytes) and between
    columns (of w and scale, in bytes). out is fp32; x and scale are as the kind of tile has them.
    """

    @intrinsic
    def tile(typing_context, x, w, scale, out, size, x_stride, w_stride, scale_stride, out_stride):  # type: ignore[no-untyped-def]
        signature = types.void(*[types.int64] * 9)

        def generate(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
            kind(builder, weight_format, rows, columns, arguments).emit()
            return context.get_dummy_value()

        return signature, generate

    return tile


class Tile(ABC):
    """Emits one tile."""

    bits: ClassVar[dict[str, int]]
    """Of a weight, by format."""

    def __init__(self, builder: Any, weight_format: str, rows: int, columns: int, arguments: Any) -> None:
        self.b, self.format, self.rows, self.columns = builder, weight_format, range(rows), range(columns)
        x, self.w_start, self.scale, self.out, self.size, x_stride, self.w_stride, *strides = arguments
        self.scale_stride, self.out_stride = strides
        b = builder
        self.x = [b.add(x, b.mul(x_stride, I64(4 * row))) for row in self.rows]
        self.w = self.column_addresses()
        self.next = b.add(self.w_start, b.add(b.mul(self.w_stride, I64(columns)), I64(AHEAD)))
        self.sums = {(row, column): ir.Constant(VECTOR, [0.0] * LANES) for row in self.rows for column in self.columns}

    def column_addresses(self) -> list[Any]:
        """Return where each column begins."""
        return [self.b.add(self.w_start, self.b.mul(self.w_stride, I64(column))) for column in self.columns]

    @abstractmethod
    def emit(self) -> None:
        """Emit the whole tile."""

    def loop(self, start: Any, stop: Any, step: int, values: dict, body: Any) -> dict:
        """Emit `for position in range(start, stop, step): values = body(position, values)`."""
        b = self.b
        entry = b.block
        head, inside, after = (b.append_basic_block(name) for name in ("head", "inside", "after"))
        b.branch(head)
        b.position_at_end(head)
        position = b.phi(I64)
        position.add_incoming(start, entry)
        carried = {}
        for cell, value in values.items():
            carried[cell] = b.phi(value.type)
            carried[cell].add_incoming(value, entry)
        b.cbranch(b.icmp_signed("<", position, stop), inside, after)
        b.position_at_end(inside)
        results = body(position, carried)
        position.add_incoming(b.add(position, I64(step)), b.block)
        for cell, value in results.items():
            carried[cell].add_incoming(value, b.block)
        b.branch(head)
        b.position_at_end(after)
        return carried

    def prefetch(self, position: Any, step: int) -> None:
        """Ask for weights behind the tile's columns, as many as a step of the loop takes.

        A CPU sees by itself that one row is read on and on, but not that several short ones, side by side, are one
        stretch of memory.
        """
        b, width = self.b, len(self.columns) * self.bits[self.format]
        address = b.add(self.next, b.lshr(b.mul(position, I64(width)), I64(3)))
        kind = ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32])
        function = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0")
        for line in range(max(1, width * step // 8 // LINE)):
            # Data (1), to be read (0), wanted in every cache (3).
            b.call(function, [self.pointer(b.add(address, I64(LINE * line)), I8), I32(0), I32(3), I32(1)])

    def store(self, row: int, column: int, total: Any) -> None:
        """Write a result."""
        offset = self.b.mul(self.b.add(self.b.mul(self.out_stride, I64(row)), I64(column)), I64(4))
        self.b.store(total, self.pointer(self.b.add(self.out, offset), F32))

    def load(self, address: Any, kind: Any, align: int) -> Any:
        """Load a value of a type from an address."""
        return self.b.load(self.pointer(address, kind), align=align, typ=kind)

    def pointer(self, address: Any, kind: Any) -> Any:
        """Turn an address into a pointer."""
        return self.b.inttoptr(address, kind.as_pointer())

    def fma(self, left: Any, right: Any, addend: Any) -> Any:
        """left · right + addend, rounded once."""
        kind = left.type
        name = f"llvm.fma.v{LANES}f32" if kind == VECTOR else "llvm.fma.f32"
        function = cgutils.get_or_insert_function(self.b.module, ir.FunctionType(kind, [kind] * 3), name)
        return self.b.call(function, [left, right, addend])

    def splat(self, value: Any) -> Any:
        """Put a number into every lane."""
        undefined = ir.Constant(ir.VectorType(value.type, LANES), ir.Undefined)
        return self.b.shuffle_vector(self.b.insert_element(undefined, value, I32(0)), undefined, indices([0] * LANES))

    def tree_sum(self, vector: Any) -> Any:
        """Add up the lanes, halves first."""
        count = LANES
        while count > 1:
            undefined, count = ir.Constant(vector.type, ir.Undefined), count // 2
            low = self.b.shuffle_vector(vector, undefined, indices(range(count)))
            high = self.b.shuffle_vector(vector, undefined, indices(range(count, 2 * count)))
            vector = self.b.fadd(low, high)
        return self.b.extract_element(vector, I32(0))


class FloatTile(Tile):
    """Weights in fp32 or bf16, inputs in fp32, `size` any; there is no scale."""

    bits: ClassVar = {"float32": 32, "bfloat16": 16}

    def emit(self) -> None:
        """Emit the whole tile."""
        whole = self.b.and_(self.size, I64(-LANES))
        sums = self.loop(I64(0), whole, LANES, self.sums, partial(self._step, LANES))
        totals = {cell: self.tree_sum(value) for cell, value in sums.items()}
        totals = self.loop(whole, self.size, 1, totals, partial(self._step, 1))
        for (row, column), total in totals.items():
            self.store(row, column, total)

    def _step(self, count: int, position: Any, sums: dict) -> dict:
        """Add the products of `count` elements, LANES as a vector or 1, to the sums."""
        if count > 1:
            self.prefetch(position, count)
        offset = self.b.mul(position, I64(self.bits[self.format] // 8))
        weights = [self.load_floats(self.b.add(column, offset), count) for column in self.w]
        results = {}
        for row in self.rows:
            x = self.load(self.b.add(self.x[row], self.b.mul(position, I64(4))), VECTOR if count > 1 else F32, 4)
            for column in self.columns:
                results[row, column] = self.fma(x, weights[column], sums[row, column])
        return results

    def load_floats(self, address: Any, count: int) -> Any:
        """Load `count` numbers of w as fp32 (a vector, or a scalar for 1)."""
        b = self.b

        def kind(element: Any) -> Any:
            return ir.VectorType(element, count) if count > 1 else element

        if self.format == "float32":
            return self.load(address, kind(F32), 4)
        bits = b.zext(self.load(address, kind(I16), 2), kind(I32))
        sixteen = ir.Constant(kind(I32), [16] * count if count > 1 else 16)
        return b.bitcast(b.shl(bits, sixteen), kind(F32))


class MixTile(FloatTile):
    """Weighted sums of rows: out[r, :] += Σ x[r, s] · w[s, :] for s = 0..size - 1, in order of s, in fp32.

    A column is a vector of `LANES` numbers, `MixTile` knows fp32 and bf16 ones. A number of out is one chain of fused
    multiply-adds, so its bits do not depend on where a sum was interrupted.
    """

    def column_addresses(self) -> list[Any]:
        """Return where the first row of w has each column."""
        width = LANES * self.bits[self.format] // 8
        return [self.b.add(self.w_start, I64(width * column)) for column in self.columns]

    def emit(self) -> None:
        """Emit the whole tile."""
        b = self.b
        cells = {
            (row, column): b.add(self.out, b.add(b.mul(self.out_stride, I64(4 * row)), I64(4 * LANES * column)))
            for row, column in self.sums
        }
        sums = {cell: self.load(address, VECTOR, 4) for cell, address in cells.items()}
        for cell, total in self.loop(I64(0), self.size, 1, sums, self._add_row).items():
            b.store(total, self.pointer(cells[cell], VECTOR), align=4)

    def _add_row(self, position: Any, sums: dict) -> dict:
        b, row_at = self.b, self.b.mul(self.w_stride, position)
        values = [self.load_floats(b.add(self.w[column], row_at), LANES) for column in self.columns]
        results = {}
        for row in self.rows:
            weights = self.splat(self.load(b.add(self.x[row], b.mul(position, I64(4))), F32, 4))
            for column in self.columns:
                results[row, column] = self.fma(weights, values[column], sums[row, column])
        return results


def indices(values: Any) -> Any:
    """Return a constant of lane numbers, for `shuffle_vector`."""
    values = list(values)
    return ir.Constant(ir.VectorType(I32, len(values)), values)
