"""The product of a few rows with a `PackedWeight` on GPUs, in Triton (the extra `cuda`).

A program takes a tile of the weight's rows and walks along them in whole blocks, so that every packed byte is read once
and in order. Levels become fp32 in registers and meet the inputs there, unrounded. All sums are fp32, each a chain of
fused multiply-adds in order of position and one sum over a program's lanes at the end; the compiler may not fuse or
reorder anything else, so the bits of a result depend on its two vectors and on nothing else in the call.

What this file does not know: what stands around a product (see `ops`), when it pays (a draft measures that), and how
fast it is. Its configurations were chosen by counting bytes and registers, and no GPU has run them so far.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from selfspec_kernels.weights import BLOCK, PackedWeight

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Of inputs and results."""
MOST_ROWS = 4
"""Rows of inputs that share what a program unpacks. More rows take more programs, which find it in the card's cache."""
LONG = 2048
"""Weights of a row from which the configurations for long rows serve."""


class Configuration(NamedTuple):
    """How much a program does at a time: rows of the weight, blocks of each, and its warps."""

    block_n: int
    blocks: int
    num_warps: int


# Tiles of which each thread loads 16 bytes of levels at a time (8 on AMD's cards, whose warps are twice as wide).
CONFIGURATIONS = {
    (8, "short"): Configuration(8, 4, 4),
    (8, "long"): Configuration(4, 8, 4),
    (4, "short"): Configuration(8, 4, 2),
    (4, "long"): Configuration(4, 16, 4),
}
"""By bits, and by whether a row is `LONG`."""
OPTIONS = {"num_stages": 1, "enable_fp_fusion": False}
"""Of compilation. Multiply-adds are fused where the source says so and nowhere else."""


def packed_linear(inputs: Tensor, weight: PackedWeight, out_dtype: torch.dtype) -> Tensor:
    """Multiply rows of inputs with a packed weight.

    Args:
        inputs: [..., K], one of `DTYPES`; any number of rows, a few are what it is made for.
        weight: [N, K], on the same device.
        out_dtype: one of `DTYPES`.

    Returns:
        [..., N]; of a row with an infinity or NaN, infinities and NaNs.

    Raises:
        ValueError: other dtypes, or sizes or devices that do not go together.
    """
    width, size = weight.shape
    if inputs.dtype not in DTYPES or out_dtype not in DTYPES:
        raise ValueError(f"no packed product of {inputs.dtype} with results in {out_dtype}")
    if inputs.shape[-1] != size or inputs.device != weight.data.device:
        raise ValueError(
            f"inputs {list(inputs.shape)} on {inputs.device}, but weight {[width, size]} on {weight.data.device}"
        )
    inputs = inputs.contiguous()
    out = torch.empty(*inputs.shape[:-1], width, dtype=out_dtype, device=inputs.device)
    num_rows = out.numel() // width
    if num_rows == 0:
        return out
    constants, num_warps = launch_constants(num_rows, weight)
    programs = triton.cdiv(width, constants["BLOCK_N"]) * triton.cdiv(num_rows, constants["ROWS"])
    with torch.cuda.device_of(inputs):
        packed_linear_kernel[(programs,)](
            inputs, *loaded_as(weight), out, num_rows, width, **constants, num_warps=num_warps, **OPTIONS
        )
    return out


def launch_constants(num_rows: int, weight: PackedWeight) -> tuple[dict[str, int], int]:
    """Return the kernel's compile-time constants for a call, and its warps."""
    configuration = CONFIGURATIONS[weight.bits, "long" if weight.shape[1] >= LONG else "short"]
    rows = min(MOST_ROWS, triton.next_power_of_2(num_rows))
    constants = {
        "SIZE": weight.shape[1],
        "BITS": weight.bits,
        "GROUP": weight.group if weight.bits == 4 else BLOCK,
        "ROWS": rows,
        "BLOCK_N": configuration.block_n,
        "BLOCKS": configuration.blocks,
    }
    return constants, configuration.num_warps


def loaded_as(weight: PackedWeight) -> tuple[Tensor, Tensor]:
    """Return levels and scales as the kernel loads them.

    They are int8 [N, P] and fp32 [N]; or, of 4 bits, int16 [N, P / 4] of four levels each and int32 [N, P / group], a
    scale in the lower and a minimum in the upper half.
    """
    if weight.bits == 8:
        return weight.data, weight.scale
    return weight.data.view(torch.int16), weight.scale.view(torch.int32).squeeze(-1)


@triton.jit
def packed_linear_kernel(  # type: ignore[no-untyped-def]
    inputs,
    levels,
    scales,
    out,
    num_rows,
    width,
    SIZE: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Multiply `ROWS` rows of inputs [M, K] with `BLOCK_N` rows of the weight, `BLOCKS` blocks of 64 at a time.

    A lane is one int8 level, or the four levels of an int16. Programs that read the same part of the weight are
    neighbours.
    """
    row_tiles = tl.cdiv(num_rows, ROWS)
    program = tl.program_id(0)
    first_row = program % row_tiles * ROWS
    columns = program // row_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns < width
    # Of heads with more than 2^31 weights the last are out of reach of 32 bits.
    wide_columns = columns.to(tl.int64)
    NUM_BLOCKS: tl.constexpr = (SIZE + 63) // 64
    LANES: tl.constexpr = 64 if BITS == 8 else 16
    SHAPE: tl.constexpr = (BLOCK_N, BLOCKS * LANES)
    lane = tl.arange(0, BLOCKS * LANES)
    # Eight lanes at a time have neighbouring inputs: where in the row those of the (first) weight stand. The three
    # others of an int16 follow at distances of 8.
    EIGHTS: tl.constexpr = LANES // 8
    eight = tl.arange(0, BLOCKS * EIGHTS)
    eight = eight // EIGHTS * 64 + eight % 2 * 32 + eight % EIGHTS // 2 * 8

    sums = (tl.zeros(SHAPE, tl.float32),) * ROWS
    for block in range(0, NUM_BLOCKS, BLOCKS):
        loaded = inside[:, None] & (block * LANES + lane < NUM_BLOCKS * LANES)[None, :]
        at = wide_columns[:, None] * (NUM_BLOCKS * LANES) + (block * LANES + lane)[None, :]
        packed = tl.load(levels + at, mask=loaded, other=0)
        if BITS == 4:
            halves = block * 2 + tl.arange(0, 2 * BLOCKS)
            at = wide_columns[:, None] * (NUM_BLOCKS * 64 // GROUP) + (halves * 32 // GROUP)[None, :]
            pairs = tl.load(scales + at, mask=inside[:, None] & (halves < 2 * NUM_BLOCKS)[None, :], other=0)
            pairs = tl.reshape(tl.broadcast_to(pairs[:, :, None], (BLOCK_N, 2 * BLOCKS, 8)), SHAPE)
            # bf16 numbers are the upper halves of fp32 ones.
            scale = (pairs << 16).to(tl.float32, bitcast=True)
            minimum = (pairs & -65536).to(tl.float32, bitcast=True)
        new_sums = ()
        for row in tl.static_range(ROWS):
            live = first_row + row < num_rows
            start = inputs + (first_row + row).to(tl.int64) * SIZE
            if BITS == 8:
                x = load_inputs(start, block * 64 + eight, SIZE, live, BLOCK_N)
                new_sums += (tl.fma(packed.to(tl.float32), x, sums[row]),)  # type: ignore[assignment]
            else:
                total = tl.zeros(SHAPE, tl.float32)
                products = tl.zeros(SHAPE, tl.float32)
                for vector in tl.static_range(4):
                    x = load_inputs(start, block * 64 + eight + 8 * vector, SIZE, live, BLOCK_N)
                    level = (packed >> (4 * vector)) & 15
                    products = tl.fma(level.to(tl.float32), x, products)
                    total += x
                new_sums += (tl.fma(minimum, total, tl.fma(scale, products, sums[row])),)  # type: ignore[assignment]
        sums = new_sums

    if BITS == 8:
        row_scale = tl.load(scales + columns, mask=inside, other=0.0)
    for row in tl.static_range(ROWS):
        result = tl.sum(sums[row], 1)
        if BITS == 8:
            result *= row_scale
        at = out + (first_row + row).to(tl.int64) * width + columns
        tl.store(at, result.to(out.dtype.element_ty), mask=inside & (first_row + row < num_rows))


@triton.jit
def load_inputs(row, eights, SIZE: tl.constexpr, live, BLOCK_N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load eight inputs from each of the positions [lanes / 8]: fp32 [BLOCK_N, lanes], zeros beyond the row's end.

    Every row of the tile loads them, so that they arrive in the lanes where they are needed.
    """
    positions = eights[:, None] + tl.arange(0, 8)[None, :]
    SHAPE: tl.constexpr = (BLOCK_N, eights.shape[0], 8)
    mask = tl.broadcast_to(((positions < SIZE) & live)[None, :, :], SHAPE)
    x = tl.load(tl.broadcast_to((row + positions)[None, :, :], SHAPE), mask=mask, other=0.0)
    return tl.reshape(x, (BLOCK_N, eights.shape[0] * 8)).to(tl.float32)
