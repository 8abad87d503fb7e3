"""Acceptance by the ratio test of a whole batch on GPUs, and the draw after it, in Triton (the extra `cuda`).

Nothing waits for the host, and no shape for data. There are two kernels, so that many programs read a large vocabulary:
in the first every program tests the drafted tokens itself, which is a few numbers, and sums its chunk of the residual
after the accepted ones and of p there; the second finds the chunk that the uniform number falls in, and the token in
it. Sums are fp64, in an order that the size of the vocabulary gives.

What this file does not know: where probabilities and numbers come from, and how fast it is. No GPU has run it so far.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from selfspec_kernels.accept_kernel import (
    DTYPES,
    FAR,
    NUM_WARPS,
    Commit,
    Results,
    check,
    launch_constants,
    results_of,
    store_committed,
)


def accept_ratio(drafted: Tensor, draft: Tensor | None, target: Tensor, uniforms: Tensor, commit: Commit) -> Results:
    """See `selfspec_kernels.accept_ratio`; raises as `accept_kernel.accept_matching`."""
    check(drafted, target, commit)
    batch, rows, width = target.shape
    if draft is not None and (draft.shape != (batch, rows - 1, width) or draft.dtype not in DTYPES):
        raise ValueError(f"q {list(draft.shape)} of {draft.dtype} for p {list(target.shape)}")
    if uniforms.shape != (batch, rows) or uniforms.device != target.device:
        raise ValueError(f"uniform numbers {list(uniforms.shape)} for p {list(target.shape)}")
    target, drafted, uniforms = target.contiguous(), drafted.contiguous(), uniforms.contiguous()
    both = (drafted, target if draft is None else draft.contiguous(), target, uniforms)
    whole, merged = launch_constants(width, rows - 1)
    lanes, chunks = merged.pop("LANES"), merged["CHUNKS"]
    masses = torch.empty(batch, 2, chunks, dtype=torch.float64, device=target.device)
    results, commits, commit_constants = results_of(drafted, commit)
    constants = {**whole, "DRAFT": draft is not None}
    with torch.cuda.device_of(target):
        residual_of_chunk_kernel[(batch, chunks)](
            *both, results[0], masses, rows - 1, **constants, LANES=lanes, num_warps=NUM_WARPS
        )
        draw_kernel[(batch,)](
            *both,
            masses,
            *results[:2],
            *commits,
            rows - 1,
            **constants,
            **merged,
            **commit_constants,
            num_warps=NUM_WARPS,
        )
    return results


@triton.jit(do_not_specialize=["k"])
def residual_of_chunk_kernel(  # type: ignore[no-untyped-def]
    drafted,
    draft,
    target,
    uniforms,
    accepted,
    masses,
    k,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    DRAFT: tl.constexpr,
    LANES: tl.constexpr,
):
    """Test a sequence's drafted tokens and sum a chunk of what the next token may be drawn from.

    Fills `masses` [B, 2, chunks], the sums of max(0, p - q) and of p at the position after the accepted tokens; the
    first chunk's program also `accepted` [B].
    """
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    lane = tl.arange(0, LANES)
    live = lane < k
    tokens = tl.load(drafted + row * k + lane, mask=live, other=0)
    p = tl.load(target + (row * (k + 1) + lane) * WIDTH + tokens, mask=live, other=0.0).to(tl.float64)
    needed = tl.load(uniforms + row * (k + 1) + lane, mask=live, other=0.0).to(tl.float64)
    if DRAFT:
        needed *= tl.load(draft + (row * k + lane) * WIDTH + tokens, mask=live, other=0.0).to(tl.float64)
    count = tl.min(tl.where(live & (needed < p), LANES, lane), 0)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    p, residual = load_residual(drafted, draft, target, row, count, k, at, WIDTH, DRAFT)
    chunks = tl.num_programs(1)
    tl.store(masses + row * 2 * chunks + chunk, tl.sum(residual, 0))
    tl.store(masses + (row * 2 + 1) * chunks + chunk, tl.sum(p, 0))
    tl.store(accepted + row, count, mask=chunk == 0)


@triton.jit(do_not_specialize=["k"])
def draw_kernel(  # type: ignore[no-untyped-def]
    drafted,
    draft,
    target,
    uniforms,
    masses,
    accepted,
    following,
    committed,
    active,
    new_committed,
    k,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    DRAFT: tl.constexpr,
    CHUNKS: tl.constexpr,
    PADDED: tl.constexpr,
    COMMIT: tl.constexpr,
):
    """Draw a sequence's next token from the residual, from p where that is zero everywhere.

    Given `accepted` [B] and `masses` [B, 2, chunks]; fills `following` [B]. The token is the first whose cumulative
    weight exceeds the uniform number times the total, and never one of weight zero.
    """
    row = tl.program_id(0).to(tl.int64)
    count = tl.load(accepted + row)
    chunk = tl.arange(0, PADDED)
    start = masses + row * 2 * CHUNKS + chunk
    mass = tl.load(start, mask=chunk < CHUNKS, other=0.0)
    from_target = tl.sum(mass, 0) <= 0
    mass = tl.where(from_target, tl.load(start + CHUNKS, mask=chunk < CHUNKS, other=0.0), mass)
    wanted = tl.load(uniforms + row * (k + 1) + k).to(tl.float64) * tl.sum(mass, 0)
    its_chunk = first_above(tl.cumsum(mass, 0), mass, wanted, chunk, CHUNKS - 1)
    before = tl.sum(tl.where(chunk < its_chunk, mass, 0.0), 0)
    at = its_chunk * CHUNK + tl.arange(0, CHUNK)
    p, residual = load_residual(drafted, draft, target, row, count, k, at, WIDTH, DRAFT)
    weight = tl.where(from_target, p, residual)
    tl.store(following + row, first_above(before + tl.cumsum(weight, 0), weight, wanted, at, WIDTH - 1))
    if COMMIT:
        store_committed(row, count, committed, active, new_committed)


@triton.jit
def load_residual(  # type: ignore[no-untyped-def]
    drafted, draft, target, row, count, k, at, WIDTH: tl.constexpr, DRAFT: tl.constexpr
):
    """Return fp64 p at tokens `at` of the position after `count` accepted ones, and max(0, p - q) there.

    The subtraction is fp32, in which p and q are given. After the last drafted token q is zero; without `DRAFT` it is
    one at the drafted token and zero elsewhere.
    """
    rejected = count < k
    p = tl.load(target + (row * (k + 1) + count) * WIDTH + at, mask=at < WIDTH, other=0.0).to(tl.float32)
    if DRAFT:
        q = tl.load(draft + (row * k + count) * WIDTH + at, mask=(at < WIDTH) & rejected, other=0.0).to(tl.float32)
    else:
        q = (at == tl.load(drafted + row * k + count, mask=rejected, other=-1)).to(tl.float32)
    return p.to(tl.float64), tl.maximum(p - q, 0.0).to(tl.float64)


@triton.jit
def first_above(cumulative, weight, wanted, at, otherwise):  # type: ignore[no-untyped-def]
    """Return the first of the places `at` of positive weight that `cumulative` exceeds `wanted` at.

    If rounding leaves none, the last of positive weight; `otherwise` if there is none of that (weights are zero or
    NaN). A scan may round equal prefixes differently: it is the weight that tells a possible place.
    """
    first = tl.min(tl.where((weight > 0) & (cumulative > wanted), at, FAR), 0)
    last = tl.max(tl.where(weight > 0, at, -1), 0)
    found = tl.minimum(first, last)
    return tl.where(found < 0, otherwise, found)
