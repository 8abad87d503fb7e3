"""Products with weights of 8 or 4 bits, for drafts: both sides are integers, and each half of a block has its scale.

The largest input of a half becomes 32767, so rounding adds about 1e-5 of it: nothing beside weights of so few bits. (A
scale per row would let one large input take the digits of all others.) Products and sums of a half's integers are
exact in 32 bits; only halves are added in floating point, in order of position, so the bits of a result depend on its
two vectors alone.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from llvmlite import ir
from numba import njit

from selfspec_kernels.cpu.lanes import F32, I8, I16, I32, I64, LANES, VECTOR, Tile, indices
from selfspec_kernels.weights import BLOCK

HALF, PLACES = BLOCK // 2, 2 * LANES
QUARTERS = BLOCK // PLACES
"""Vectors in a block, of `PLACES` numbers; their products meet, two by two, in the lanes of a sum: of the first half in
the first four lanes, of the second in the others."""
LIMIT, LEAST = np.float32(32767.0), np.float32(1e-30)
"""The largest integer of a half; a half with no number as large as `LEAST` is taken for zeros."""
INFINITY_BITS = 0x7F800000
SCALES_AT, SUMS_AT = 2 * BLOCK, 2 * BLOCK + 4 * LANES
"""Bytes of a record before its scales and sums."""
BYTES, SHORTS = ir.VectorType(I8, PLACES), ir.VectorType(I16, PLACES)
PRODUCTS, INTEGERS = ir.VectorType(I32, PLACES), ir.VectorType(I32, LANES)


@njit
def to_records(row):  # type: ignore[no-untyped-def]
    """Replace each `BLOCK` of an fp32 row, in place, by a record of the same 256 bytes, of which 192 are used.

    A record is int16 [64], the numbers in the order of `PackedWeight`; then, fp32 [8] each, the scale of the lane's
    half, and a quarter of scale times sum of the half (what the minimum of 4-bit weights is multiplied with). An
    infinity or NaN makes the scale NaN, and with it every result of the row.
    """
    numbers = row.view(np.int16)
    half = np.empty(HALF, np.float32)
    bits = half.view(np.int32)
    shorts = np.empty(BLOCK, np.int16)
    for start in range(0, row.size, BLOCK):
        for second in range(2):
            half[:] = row[start + second * HALF : start + (second + 1) * HALF]
            largest_bits = np.int32(0)
            for i in range(HALF):
                largest_bits = max(largest_bits, np.int32(bits[i] & np.int32(0x7FFFFFFF)))
            largest = np.int32(largest_bits).view(np.float32)
            scale, inverse = largest / LIMIT, LIMIT / largest
            if largest_bits >= INFINITY_BITS:
                half[:] = np.float32(0.0)
                scale, inverse = np.float32(np.nan), np.float32(0.0)
            elif largest < LEAST:
                scale, inverse = np.float32(0.0), np.float32(0.0)
            total = np.int32(0)
            for i in range(HALF):
                number = np.int16(np.floor(half[i] * inverse + np.float32(0.5)))
                shorts[i // LANES * PLACES + second * LANES + i % LANES] = number
                total += np.int32(number)
            if second == 0:
                first_scale, first_sum = scale, scale * np.float32(total)
        floats = start + BLOCK // 2
        numbers[2 * start : 2 * start + BLOCK] = shorts
        for lane in range(LANES // 2):
            row[floats + lane], row[floats + LANES // 2 + lane] = first_scale, scale
            sums = floats + LANES + lane
            row[sums] = first_sum * np.float32(0.25)
            row[sums + LANES // 2] = scale * np.float32(total) * np.float32(0.25)


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
        results = {}
        records = [b.add(self.x[row], b.mul(position, I64(4))) for row in self.rows]
        for column in self.columns:
            weights = self._unpack(column, position)
            weight_scale, minimum = self._load_line(column, position) if int4 else (None, None)
            for row, record in zip(self.rows, records, strict=True):
                total = None
                for quarter, weight in enumerate(weights):
                    x = self.load(b.add(record, I64(2 * PLACES * quarter)), SHORTS, 4)
                    products = self._pair_sums(x, weight)
                    total = products if total is None else b.add(total, products)
                factor, addend = self.load(b.add(record, I64(SCALES_AT)), VECTOR, 4), sums[row, column]
                if int4:
                    factor = b.fmul(factor, weight_scale)
                    addend = self.fma(self.load(b.add(record, I64(SUMS_AT)), VECTOR, 4), minimum, addend)
                results[row, column] = self.fma(b.sitofp(total, VECTOR), factor, addend)
        return results

    def _unpack(self, column: int, position: Any) -> list[Any]:
        """Load a block of weights as its vectors, in 16 bits each; of int4 they are the levels 0..15."""
        b = self.b
        if self.format == "int8":
            address = b.add(self.w[column], position)
            loads = (self.load(b.add(address, I64(PLACES * quarter)), BYTES, 1) for quarter in range(QUARTERS))
            return [b.sext(weights, SHORTS) for weights in loads]
        packed = self.load(b.add(self.w[column], b.lshr(position, I64(1))), SHORTS, 1)
        shifted = [b.lshr(packed, ir.Constant(SHORTS, [4 * quarter] * PLACES)) for quarter in range(QUARTERS)]
        return [b.and_(levels, ir.Constant(SHORTS, [15] * PLACES)) for levels in shifted]

    def _load_line(self, column: int, position: Any) -> tuple[Any, Any]:
        """Load scales and minima of a block of int4, each half's in its lanes."""
        b, halves = self.b, []
        for first in (0, HALF):
            group = b.lshr(b.add(position, I64(first)), self.group_shift)
            offset = b.add(b.mul(self.scale_stride, I64(column)), b.shl(group, I64(2)))
            halves.append(self.splat(self.load(b.add(self.scale, offset), I32, 4)))
        both = b.shuffle_vector(*halves, indices([0] * (LANES // 2) + [LANES] * (LANES // 2)))
        sixteen, upper = (ir.Constant(INTEGERS, [value] * LANES) for value in (16, 0xFFFF0000))
        return b.bitcast(b.shl(both, sixteen), VECTOR), b.bitcast(b.and_(both, upper), VECTOR)

    def _pair_sums(self, x: Any, w: Any) -> Any:
        """Sum products of neighbours in 32 bits. LLVM makes one instruction of these lines on CPUs that have it."""
        b = self.b
        products = b.mul(b.sext(x, PRODUCTS), b.sext(w, PRODUCTS))
        undefined = ir.Constant(PRODUCTS, ir.Undefined)
        even, odd = (b.shuffle_vector(products, undefined, indices(range(first, PLACES, 2))) for first in (0, 1))
        return b.add(even, odd)
