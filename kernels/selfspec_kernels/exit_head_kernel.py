"""Final norm, head and choice of a token for a few rows on GPUs, in Triton (the extra `cuda`), without the logits.

A program takes a tile of the head's rows, and up to `MOST_ROWS` rows of hidden states, and walks along them in blocks:
each weight is read once and meets the norm's weight and the hidden states in fp32, unrounded, and the norm's scale is
a factor on the sums. Of its logits it writes the largest and where that stands first; a second kernel takes the first
of the largest of all tiles. A logit's arithmetic depends on its two vectors and on nothing else in the call: chains of
fused multiply-adds in order of position, one sum over a program's lanes, and no other fusion.

Whether this wins over norm, product and argmax, one after another, is measured, not assumed: it saves writing and
reading logits, which are few bytes beside the head's, and gives up the library's product. No GPU has run it so far.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Of hidden states, norm and head."""
MOST_ROWS = 4
"""Rows of hidden states that share what a program reads of the head."""
BLOCK_N = 32
"""Rows of the head of a program."""
BLOCK_K = 64
"""Weights of each at a time."""
OPTIONS = {"num_warps": 8, "num_stages": 1, "enable_fp_fusion": False}
"""Of compilation of the first kernel. Multiply-adds are fused where the source says so and nowhere else."""
FAR = tl.constexpr(2**31 - 1)
"""Behind every token."""


def exit_head(
    hidden: Tensor,
    norm: tuple[Tensor, float],
    weight: Tensor,
    bias: Tensor | None,
    token_ids: Tensor | None,
    gumbel: Tensor | None,
    temperature: float,
) -> tuple[Tensor, Tensor]:
    """See `selfspec_kernels.exit_head`.

    Raises:
        ValueError: other dtypes than `DTYPES`, or shapes or devices that do not go together.
    """
    width, size = weight.shape
    shape = hidden.shape[:-1]
    for each in (hidden, norm[0], weight):
        if each.dtype not in DTYPES or each.shape[-1] != size or each.device != hidden.device:
            raise ValueError(f"no head {[width, size]} with {each.dtype} {list(each.shape)} on {each.device}")
    for extra, wanted in ((bias, (width,)), (token_ids, (width,)), (gumbel, (*shape, width))):
        if extra is not None and extra.shape != wanted:
            raise ValueError(f"{list(extra.shape)} numbers, but {list(wanted)} logits")
    hidden, weight = hidden.contiguous(), weight.contiguous()
    num_rows = hidden.numel() // size
    tokens = torch.empty(shape, dtype=torch.int64, device=hidden.device)
    scores = torch.empty(shape, dtype=torch.float32, device=hidden.device)
    if num_rows == 0:
        return tokens, scores
    tiles = triton.cdiv(width, BLOCK_N)
    best = torch.empty(num_rows, tiles, dtype=torch.float32, device=hidden.device)
    best_at = torch.empty(num_rows, tiles, dtype=torch.int32, device=hidden.device)
    constants = launch_constants(num_rows, size, bias, gumbel)
    inputs = (hidden, norm[0].contiguous(), weight, weight if bias is None else bias.contiguous())
    noise = hidden if gumbel is None else gumbel.contiguous()
    ids = tokens if token_ids is None else token_ids.contiguous()
    with torch.cuda.device_of(hidden):
        exit_head_kernel[(triton.cdiv(num_rows, constants["ROWS"]), tiles)](
            *inputs, noise, best, best_at, num_rows, width, norm[1], 1 / temperature, **constants, **OPTIONS
        )
        best_tile_kernel[(num_rows,)](best, best_at, ids, tokens, scores, **merge_constants(width, token_ids))
    return tokens, scores


def launch_constants(num_rows: int, size: int, bias: Tensor | None, gumbel: Tensor | None) -> dict[str, int | bool]:
    """Return the compile-time constants of a call of the first kernel."""
    return {
        "SIZE": size,
        "ROWS": min(MOST_ROWS, triton.next_power_of_2(num_rows)),
        "BLOCK_N": BLOCK_N,
        "BLOCK_K": BLOCK_K,
        "BIAS": bias is not None,
        "GUMBEL": gumbel is not None,
    }


def merge_constants(width: int, token_ids: Tensor | None) -> dict[str, int | bool]:
    """Return the compile-time constants of a call of the second kernel."""
    tiles = triton.cdiv(width, BLOCK_N)
    return {"TILES": tiles, "PADDED": triton.next_power_of_2(tiles), "MAPPED": token_ids is not None}


@triton.jit(do_not_specialize=["num_rows"])
def exit_head_kernel(  # type: ignore[no-untyped-def]
    hidden,
    norm,
    weight,
    bias,
    gumbel,
    best,
    best_at,
    num_rows,
    width,
    epsilon,
    sharpness,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BIAS: tl.constexpr,
    GUMBEL: tl.constexpr,
):
    """Fill `best` [M, tiles] and `best_at` [M, tiles] for `ROWS` rows of `hidden` [M, K] and a tile of `weight` [N, K].

    With `GUMBEL` scores are logits times `sharpness`, plus the noise [M, N]. NaN counts as infinity, so that every
    index is one of the head.
    """
    first_row = tl.program_id(0) * ROWS
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns < width
    # Of heads with more than 2^31 weights the last are out of reach of 32 bits.
    starts = columns.to(tl.int64)[:, None] * SIZE
    lane = tl.arange(0, BLOCK_K)
    sums = (tl.zeros((BLOCK_N, BLOCK_K), tl.float32),) * ROWS
    for first in range(0, SIZE, BLOCK_K):
        # Every row of the tile loads what goes with the weights, so that it arrives in the lanes where it is needed.
        at = tl.broadcast_to((first + lane)[None, :], (BLOCK_N, BLOCK_K))
        weights = tl.load(weight + starts + at, mask=inside[:, None] & (at < SIZE), other=0.0).to(tl.float32)
        weights *= tl.load(norm + at, mask=at < SIZE, other=0.0).to(tl.float32)
        new_sums = ()
        for row in tl.static_range(ROWS):
            start = hidden + (first_row + row).to(tl.int64) * SIZE
            x = tl.load(start + at, mask=(at < SIZE) & (first_row + row < num_rows), other=0.0).to(tl.float32)
            new_sums += (tl.fma(weights, x, sums[row]),)  # type: ignore[assignment]
        sums = new_sums

    for row in tl.static_range(ROWS):
        score = tl.sum(sums[row], 1) * norm_scale(hidden, first_row + row, num_rows, epsilon, SIZE)
        if BIAS:
            score += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
        live = first_row + row < num_rows
        if GUMBEL:
            noise = gumbel + (first_row + row).to(tl.int64) * width + columns
            score = score * sharpness + tl.load(noise, mask=inside & live, other=0.0).to(tl.float32)
        score = tl.where(score != score, float("inf"), score)
        score = tl.where(inside, score, float("-inf"))
        top = tl.max(score, 0)
        place = (first_row + row).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
        tl.store(best + place, top, mask=live)
        tl.store(best_at + place, tl.min(tl.where(score == top, columns, FAR), 0), mask=live)


@triton.jit
def norm_scale(hidden, row, num_rows, epsilon, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the factor that RMSNorm multiplies a row of `hidden` [M, K] with; of no row, that of zeros."""
    lane = tl.arange(0, 1024)
    squares = tl.zeros((1024,), tl.float32)
    for first in range(0, SIZE, 1024):
        at = first + lane
        x = tl.load(hidden + row.to(tl.int64) * SIZE + at, mask=(at < SIZE) & (row < num_rows), other=0.0)
        squares = tl.fma(x.to(tl.float32), x.to(tl.float32), squares)
    return tl.rsqrt(tl.sum(squares, 0) / SIZE + epsilon)


@triton.jit
def best_tile_kernel(  # type: ignore[no-untyped-def]
    best, best_at, token_ids, tokens, scores, TILES: tl.constexpr, PADDED: tl.constexpr, MAPPED: tl.constexpr
):
    """Fill a row's `tokens` [M] and `scores` [M]: the first tile of those with the largest, with `MAPPED` its id."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, PADDED)
    score = tl.load(best + row * TILES + tile, mask=tile < TILES, other=float("-inf"))
    top = tl.max(score, 0)
    first = tl.min(tl.where(score == top, tile, FAR), 0)
    token = tl.load(best_at + row * TILES + first).to(tl.int64)
    if MAPPED:
        token = tl.load(token_ids + token).to(tl.int64)
    tl.store(tokens + row, token)
    tl.store(scores + row, top)
