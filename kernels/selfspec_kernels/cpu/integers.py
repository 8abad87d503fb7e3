"""Products with weights of 8 or 4 bits, for drafts: both sides are integers, and each block of a row has its scale.

The largest input of a block becomes 32767, so rounding adds about 1e-5 of it: nothing beside weights of so few bits. (A
scale per row would let one large input take the digits of all others.) Products and sums of a block's integers are
exact in 32 bits and in fp32; only blocks are added in floating point, in order of position, so the bits of a result
depend on its two vectors alone.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from llvmlite import ir
from numba import njit

from selfspec_kernels.cpu.lanes import F32, I8, I16, I32, I64, LANES, VECTOR, Tile, indices
from selfspec_kernels.weights import BLOCK

HALF = BLOCK // 2
LIMIT, LEAST = np.float32(32767.0), np.float32(1e-30)
"""The largest integer of a block; a block with no number as large as `LEAST` is taken for zeros."""
INFINITY_BITS = 0x7F800000
BYTES, SHORTS = ir.VectorType(I8, HALF), ir.VectorType(I16, HALF)
PRODUCTS, INTEGERS = ir.VectorType(I32, HALF), ir.VectorType(I32, LANES)


@njit
def to_records(row):  # type: ignore[no-untyped-def]
    """Replace each `BLOCK` of an fp32 row, in place, by a record of the same 128 bytes.

    A record is int16 [32], the numbers; fp32 [8], in lane l the scale times the sum of numbers 2 l, 2 l + 1, 2 l + 16
    and 2 l + 17, whose products meet there (what a minimum of 4-bit weights is multiplied with); fp32 [8], the scale in
    every lane. An infinity or NaN makes the scale NaN, and with it every result of the row.
    """
    numbers = row.view(np.int16)
    for start in range(0, row.size, BLOCK):
        block = row[start : start + BLOCK].copy()
        bits = block.view(np.int32)
        largest_bits = np.int32(0)
        for i in range(BLOCK):
            largest_bits = max(largest_bits, np.int32(bits[i] & np.int32(0x7FFFFFFF)))
        largest = np.int32(largest_bits).view(np.float32)
        scale, inverse = largest / LIMIT, LIMIT / largest
        if largest_bits >= INFINITY_BITS:
            block[:] = np.float32(0.0)
            scale, inverse = np.float32(np.nan), np.float32(0.0)
        elif largest < LEAST:
            scale, inverse = np.float32(0.0), np.float32(0.0)
        for i in range(BLOCK):
            numbers[2 * start + i] = np.int16(np.floor(block[i] * inverse + np.float32(0.5)))
        for lane in range(LANES):
            first = 2 * (start + lane)
            pairs = np.int32(numbers[first]) + np.int32(numbers[first + 1])
            pairs += np.int32(numbers[first + HALF]) + np.int32(numbers[first + HALF + 1])
            row[start + HALF + lane] = scale * np.float32(pairs)
            row[start + HALF + LANES + lane] = scale


class IntegerTile(Tile):
    """Weights as `PackedWeight` has them, inputs as `to_records` leaves them, `size` a multiple of `BLOCK`.

    `scale` holds one fp32 per column (int8), or a scale and a minimum in bf16 per column and group of weights (int4).
    """

    bits: ClassVar = {"int8": 8, "int4": 4}

    def emit(self) -> None:
        """Emit the whole tile."""
        b = self.b
        # 32 = 2^5 weights share 4 bytes of scale and minimum, or 64 where these take a 16th of a byte per weight.
        wide = b.icmp_signed("==", self.size, b.shl(self.scale_stride, I64(4)))
        self.group_shift = b.add(I64(5), b.zext(wide, I64))
        sums = self.loop(I64(0), self.size, BLOCK, self.sums, self._step)
        for (row, column), value in sums.items():
            total = self.tree_sum(value)
            if self.format == "int8":
                total = b.fmul(total, self.load(b.add(self.scale, b.mul(self.scale_stride, I64(column))), F32, 4))
            self.store(row, column, total)

    def _step(self, position: Any, sums: dict) -> dict:
        """Add the products of a block to the sums, times the scales of both sides."""
        b, int4 = self.b, self.format == "int4"
        self.prefetch(position, BLOCK)
        weights = [self._unpack(column, position) for column in self.columns]
        lines = [self._load_line(column, position) for column in self.columns] if int4 else []
        results = {}
        for row in self.rows:
            record = b.add(self.x[row], b.mul(position, I64(4)))
            halves = [self.load(b.add(record, I64(2 * HALF * half)), SHORTS, 4) for half in (0, 1)]
            scaled_sums = self.load(b.add(record, I64(2 * BLOCK)), VECTOR, 4)
            scale = self.load(b.add(record, I64(3 * BLOCK)), VECTOR, 4)
            for column in self.columns:
                low, high = (self._pair_sums(x, w) for x, w in zip(halves, weights[column], strict=True))
                total, factor, addend = b.sitofp(b.add(low, high), VECTOR), scale, sums[row, column]
                if int4:
                    weight_scale, minimum = lines[column]
                    factor, addend = b.fmul(scale, weight_scale), self.fma(scaled_sums, minimum, addend)
                results[row, column] = self.fma(total, factor, addend)
        return results

    def _unpack(self, column: int, position: Any) -> tuple[Any, Any]:
        """Load a block of weights as its two halves, in 16 bits each; of int4 they are the levels 0..15."""
        b = self.b
        if self.format == "int8":
            address = b.add(self.w[column], position)
            low, high = (b.sext(self.load(b.add(address, I64(HALF * half)), BYTES, 1), SHORTS) for half in (0, 1))
            return low, high
        packed = b.zext(self.load(b.add(self.w[column], b.lshr(position, I64(1))), BYTES, 1), SHORTS)
        return b.and_(packed, ir.Constant(SHORTS, [15] * HALF)), b.lshr(packed, ir.Constant(SHORTS, [4] * HALF))

    def _load_line(self, column: int, position: Any) -> tuple[Any, Any]:
        """Load the scale and the minimum of a group of int4, in every lane."""
        b = self.b
        offset = b.add(b.mul(self.scale_stride, I64(column)), b.shl(b.lshr(position, self.group_shift), I64(2)))
        both = self._splat(self.load(b.add(self.scale, offset), I32, 4))
        sixteen, upper = (ir.Constant(INTEGERS, [value] * LANES) for value in (16, 0xFFFF0000))
        return b.bitcast(b.shl(both, sixteen), VECTOR), b.bitcast(b.and_(both, upper), VECTOR)

    def _pair_sums(self, x: Any, w: Any) -> Any:
        """Sum products of neighbours in 32 bits. LLVM makes one instruction of these lines on CPUs that have it."""
        b = self.b
        products = b.mul(b.sext(x, PRODUCTS), b.sext(w, PRODUCTS))
        undefined = ir.Constant(PRODUCTS, ir.Undefined)
        even, odd = (b.shuffle_vector(products, undefined, indices(range(first, HALF, 2))) for first in (0, 1))
        return b.add(even, odd)

    def _splat(self, value: Any) -> Any:
        undefined = ir.Constant(INTEGERS, ir.Undefined)
        return self.b.shuffle_vector(self.b.insert_element(undefined, value, I32(0)), undefined, indices([0] * LANES))
