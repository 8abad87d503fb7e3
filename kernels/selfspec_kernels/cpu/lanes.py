"""Dot products as LLVM vector code: the one place where the order of additions on a CPU is decided.

A result is the sum of `LANES` running sums, lane l over the elements l, l + LANES, …, each a chain of fused
multiply-adds in order of position, added up as a tree, and a scalar tail. This order is written out here, not left to
an optimiser, so the bits of a result depend on its two vectors alone: not on how many rows a tile has, how work is
split over threads, or how wide the CPU's registers are.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from selfspec_kernels.weights import GROUP

LANES = 8

F32, I8, I16, I32, I64 = ir.FloatType(), ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
VECTOR = ir.VectorType(F32, LANES)
INTEGERS = ir.VectorType(I32, LANES)


def make_tile(weight_format: str, rows: int, columns: int) -> Any:
    """Return the intrinsic `tile(x, w, scale, out, size, x_stride, w_stride, scale_stride, out_stride)`.

    It computes rows × columns dot products of `size` elements: out[r, c] = Σ x[r, :] · w[c, :]. Arguments are int64:
    addresses in bytes, `size` in elements, strides between rows (of x and out, in elements of 4 bytes) and between
    columns (of w and scale, in bytes). x and out are fp32. `scale` holds one fp32 per column (int8) or per column and
    `GROUP` (int4, symmetric around 8); other formats ignore it. int4 needs a `size` that is a multiple of `GROUP`.
    """

    @intrinsic
    def tile(typing_context, x, w, scale, out, size, x_stride, w_stride, scale_stride, out_stride):  # type: ignore[no-untyped-def]
        signature = types.void(*[types.int64] * 9)

        def generate(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
            _Tile(builder, weight_format, rows, columns, arguments).emit()
            return context.get_dummy_value()

        return signature, generate

    return tile


class _Tile:
    """Emits one tile."""

    def __init__(self, builder: Any, weight_format: str, rows: int, columns: int, arguments: Any) -> None:
        self.b, self.format, self.rows, self.columns = builder, weight_format, range(rows), range(columns)
        x, w, self.scale, self.out, self.size, x_stride, w_stride, self.scale_stride, self.out_stride = arguments
        b = builder
        self.x = [b.add(x, b.mul(x_stride, I64(4 * row))) for row in self.rows]
        self.w = [b.add(w, b.mul(w_stride, I64(column))) for column in self.columns]
        self.step = GROUP if weight_format == "int4" else LANES
        self.zero = ir.Constant(VECTOR, [0.0] * LANES)
        self.cells = [(row, column) for row in self.rows for column in self.columns]

    def emit(self) -> None:
        whole = self.b.and_(self.size, I64(-self.step))
        body = self._group_step if self.format == "int4" else partial(self._step, LANES)
        sums = self._loop(I64(0), whole, self.step, dict.fromkeys(self.cells, self.zero), body)
        totals = {cell: self._tree_sum(value) for cell, value in sums.items()}
        if self.format != "int4":
            totals = self._loop(whole, self.size, 1, totals, partial(self._step, 1))
        for (row, column), total in totals.items():
            if self.format == "int8":
                total = self.b.fmul(total, self._load_scale(column, I64(0)))
            offset = self.b.mul(self.b.add(self.b.mul(self.out_stride, I64(row)), I64(column)), I64(4))
            self.b.store(total, self._pointer(self.b.add(self.out, offset), F32))

    def _loop(self, start: Any, stop: Any, step: int, values: dict, body: Any) -> dict:
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

    def _step(self, count: int, position: Any, sums: dict) -> dict:
        """Add the products of `count` elements, LANES as a vector or 1, to the sums."""
        weights = [self._load_weights(column, position, count) for column in self.columns]
        results = {}
        for row in self.rows:
            x = self._load_x(row, position, VECTOR if count > 1 else F32)
            for column in self.columns:
                results[row, column] = self._fma(x, weights[column], sums[row, column])
        return results

    def _group_step(self, position: Any, sums: dict) -> dict:
        """Sum one group's integers by themselves, then add them times their scale."""
        b = self.b
        group = b.lshr(position, I64(5))
        unpacked = [self._unpack_group(column, group) for column in self.columns]
        scales = [self._splat(self._load_scale(column, group)) for column in self.columns]
        results = {}
        for row in self.rows:
            parts = [self.zero] * len(self.columns)
            for piece in range(GROUP // LANES):
                x = self._load_x(row, b.add(position, I64(piece * LANES)), VECTOR)
                for column in self.columns:
                    parts[column] = self._fma(x, unpacked[column][piece], parts[column])
            for column in self.columns:
                results[row, column] = self._fma(parts[column], scales[column], sums[row, column])
        return results

    def _load_weights(self, column: int, position: Any, count: int) -> Any:
        """Load `count` weights of a row from an element on, as fp32 (a vector, or a scalar for 1)."""
        b = self.b
        size = {"float32": 4, "bfloat16": 2, "int8": 1}[self.format]
        address = b.add(self.w[column], b.mul(position, I64(size)))

        def kind(element: Any) -> Any:
            return ir.VectorType(element, count) if count > 1 else element

        if self.format == "float32":
            return self._load(address, kind(F32), 4)
        if self.format == "int8":
            return b.sitofp(b.sext(self._load(address, kind(I8), 1), kind(I32)), kind(F32))
        bits = b.zext(self._load(address, kind(I16), 2), kind(I32))
        sixteen = ir.Constant(kind(I32), [16] * count if count > 1 else 16)
        return b.bitcast(b.shl(bits, sixteen), kind(F32))

    def _unpack_group(self, column: int, group: Any) -> list[Any]:
        """Load a group of int4 weights as four fp32 vectors of −8..7."""
        b, count = self.b, GROUP // 2
        kind = ir.VectorType(I8, count)
        packed = self._load(b.add(self.w[column], b.mul(group, I64(count))), kind, 1)
        low = b.and_(packed, ir.Constant(kind, [15] * count))
        high = b.lshr(packed, ir.Constant(kind, [4] * count))
        pieces = []
        for half in (low, high):
            for first in (0, LANES):
                part = b.shuffle_vector(half, ir.Constant(kind, ir.Undefined), _indices(range(first, first + LANES)))
                wide = b.sub(b.zext(part, INTEGERS), ir.Constant(INTEGERS, [8] * LANES))
                pieces.append(b.sitofp(wide, VECTOR))
        return pieces

    def _load_scale(self, column: int, group: Any) -> Any:
        b = self.b
        offset = b.add(b.mul(self.scale_stride, I64(column)), b.mul(group, I64(4)))
        return self._load(b.add(self.scale, offset), F32, 4)

    def _load_x(self, row: int, position: Any, kind: Any) -> Any:
        return self._load(self.b.add(self.x[row], self.b.mul(position, I64(4))), kind, 4)

    def _load(self, address: Any, kind: Any, align: int) -> Any:
        return self.b.load(self._pointer(address, kind), align=align, typ=kind)

    def _pointer(self, address: Any, kind: Any) -> Any:
        return self.b.inttoptr(address, kind.as_pointer())

    def _fma(self, left: Any, right: Any, addend: Any) -> Any:
        kind = left.type
        name = f"llvm.fma.v{LANES}f32" if kind == VECTOR else "llvm.fma.f32"
        function = cgutils.get_or_insert_function(self.b.module, ir.FunctionType(kind, [kind] * 3), name)
        return self.b.call(function, [left, right, addend])

    def _splat(self, value: Any) -> Any:
        undefined = ir.Constant(VECTOR, ir.Undefined)
        return self.b.shuffle_vector(self.b.insert_element(undefined, value, I32(0)), undefined, _indices([0] * LANES))

    def _tree_sum(self, vector: Any) -> Any:
        count = LANES
        while count > 1:
            undefined, count = ir.Constant(vector.type, ir.Undefined), count // 2
            low = self.b.shuffle_vector(vector, undefined, _indices(range(count)))
            high = self.b.shuffle_vector(vector, undefined, _indices(range(count, 2 * count)))
            vector = self.b.fadd(low, high)
        return self.b.extract_element(vector, I32(0))


def _indices(values: Any) -> Any:
    values = list(values)
    return ir.Constant(ir.VectorType(I32, len(values)), values)
