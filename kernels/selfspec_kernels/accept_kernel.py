"""Acceptance of a whole batch on GPUs, in Triton (the extra `cuda`): nothing waits for the host, no shape for data.

Two kernels each, so that many programs read a large vocabulary: the first takes one chunk of one row, the second merges
a sequence's chunks. Matching: the largest of every chunk and where it stands first; then the target's choice at every
position, and how far the draft agrees with them. Ratio test: every program tests the drafted tokens itself, which is a
few numbers, and sums its chunk of the residual after the accepted ones and of p there; then the chunk that the uniform
number falls in is found, and the token in it. Sums are fp64, in an order that the size of the vocabulary gives.

What this file does not know: where probabilities and noise come from, and how fast it is. No GPU has run it so far.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Of logits and probabilities."""
CHUNK = 1024
"""Tokens of the vocabulary that a program handles; fewer where there are fewer."""
NUM_WARPS = 4
FAR = tl.constexpr(2**31 - 1)
"""Behind every token."""

Commit = tuple[Tensor, Tensor] | None
Results = tuple[Tensor, Tensor, Tensor | None]
"""accepted [B], the token after the accepted ones [B], and the new `committed` [B], see `selfspec_kernels.Accepted`."""


def accept_matching(drafted: Tensor, values: Tensor, gumbel: Tensor | None, commit: Commit) -> Results:
    """Accept what the target chooses too: the first of the largest logits or, with noise, of the largest log p + g.

    Args:
        drafted: [B, k].
        values: [B, k + 1, V] logits or, with noise, probabilities.
        gumbel: [B, k + 1, V], fp32 or fp64.
        commit: see `selfspec_kernels.accept_greedy`.

    Raises:
        ValueError: other dtypes than `DTYPES`, or shapes or devices that do not go together.
    """
    _check(drafted, values, commit)
    if gumbel is not None and (gumbel.shape != values.shape or gumbel.device != values.device):
        raise ValueError(f"noise {list(gumbel.shape)} for probabilities {list(values.shape)}")
    values, drafted = values.contiguous(), drafted.contiguous()
    noise = values if gumbel is None else gumbel.contiguous()
    batch, rows, width = values.shape
    whole, merged = launch_constants(width, rows - 1)
    tiles, device = (batch * rows, merged["CHUNKS"]), values.device
    best = torch.empty(*tiles, dtype=torch.promote_types(torch.float32, noise.dtype), device=device)
    best_at = torch.empty(*tiles, dtype=torch.int32, device=device)
    results, commits, commit_constants = _results(drafted, commit)
    with torch.cuda.device_of(values):
        best_of_chunk_kernel[tiles](
            values, noise, best, best_at, **whole, GUMBEL=gumbel is not None, num_warps=NUM_WARPS
        )
        accept_matching_kernel[(batch,)](
            drafted, best, best_at, *results[:2], *commits, rows - 1, **merged, **commit_constants, num_warps=NUM_WARPS
        )
    return results


def accept_ratio(drafted: Tensor, draft: Tensor | None, target: Tensor, uniforms: Tensor, commit: Commit) -> Results:
    """See `selfspec_kernels.accept_ratio`; raises as `accept_matching`."""
    _check(drafted, target, commit)
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
    results, commits, commit_constants = _results(drafted, commit)
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


def launch_constants(width: int, k: int) -> tuple[dict[str, int], dict[str, int]]:
    """Return the compile-time arguments of what reads the vocabulary, and those of what merges its chunks."""
    chunk = min(CHUNK, triton.next_power_of_2(width))
    chunks = triton.cdiv(width, chunk)
    merged = {"CHUNKS": chunks, "PADDED": triton.next_power_of_2(chunks), "LANES": triton.next_power_of_2(k + 1)}
    return {"WIDTH": width, "CHUNK": chunk}, merged


def _check(drafted: Tensor, values: Tensor, commit: Commit) -> None:
    if values.dtype not in DTYPES or values.device != drafted.device:
        raise ValueError(f"no acceptance with {values.dtype} on {values.device} of tokens on {drafted.device}")
    batch, k = drafted.shape
    if values.ndim != 3 or values.shape[:2] != (batch, k + 1) or values.shape[2] == 0:
        raise ValueError(f"{list(values.shape)} numbers for drafted tokens {list(drafted.shape)}")
    if commit is not None and not commit[0].shape == commit[1].shape == (batch,):
        raise ValueError(f"committed {list(commit[0].shape)}, active {list(commit[1].shape)} of {batch} sequences")


def _results(drafted: Tensor, commit: Commit) -> tuple[Results, tuple[Tensor, Tensor, Tensor], dict[str, bool]]:
    """Return empty results, the kernels' arguments that concern `commit`, and their constant."""
    batch, device = len(drafted), drafted.device
    accepted, following = (torch.empty(batch, dtype=torch.int64, device=device) for _ in range(2))
    if commit is None:
        return (accepted, following, None), (drafted, drafted, drafted), {"COMMIT": False}
    committed, active = commit[0].contiguous(), commit[1].contiguous()
    after = torch.empty(batch, dtype=committed.dtype, device=device)
    return (accepted, following, after), (committed, active, after), {"COMMIT": True}


@triton.jit
def best_of_chunk_kernel(  # type: ignore[no-untyped-def]
    values, gumbel, best, best_at, WIDTH: tl.constexpr, CHUNK: tl.constexpr, GUMBEL: tl.constexpr
):
    """Find the largest of a chunk of a row of `values` [M, V], with `GUMBEL` of log values + gumbel.

    Fills `best` [M, chunks] and `best_at` [M, chunks], its first token. NaN counts as infinity, so that every token is
    one of the vocabulary.
    """
    start = tl.program_id(0).to(tl.int64) * WIDTH
    at = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(values + start + at, mask=at < WIDTH, other=0.0).to(tl.float32)
    if GUMBEL:
        x = tl.log(x) + tl.load(gumbel + start + at, mask=at < WIDTH, other=0.0)
    x = tl.where(x != x, float("inf"), x)
    x = tl.where(at < WIDTH, x, float("-inf"))
    top = tl.max(x, 0)
    place = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    tl.store(best + place, top)
    tl.store(best_at + place, tl.min(tl.where(x == top, at, FAR), 0))


@triton.jit(do_not_specialize=["k"])
def accept_matching_kernel(  # type: ignore[no-untyped-def]
    drafted,
    best,
    best_at,
    accepted,
    following,
    committed,
    active,
    new_committed,
    k,
    CHUNKS: tl.constexpr,
    PADDED: tl.constexpr,
    LANES: tl.constexpr,
    COMMIT: tl.constexpr,
):
    """Merge the chunks of a sequence's k + 1 rows and compare its drafted tokens with their choices."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    chunk = tl.arange(0, PADDED)
    places = (row * (k + 1) + lane) * CHUNKS
    inside = (lane <= k)[:, None] & (chunk < CHUNKS)[None, :]
    x = tl.load(best + places[:, None] + chunk[None, :], mask=inside, other=float("-inf"))
    first = tl.min(tl.where(x == tl.max(x, 1)[:, None], chunk[None, :], FAR), 1)
    chosen = tl.load(best_at + places + first, mask=lane <= k, other=0).to(tl.int64)
    # Behind the drafted tokens stands one that is no choice, so that no more than k agree.
    tokens = tl.load(drafted + row * k + lane, mask=lane < k, other=-1)
    count = tl.min(tl.where(tokens == chosen, LANES, lane), 0)
    tl.store(accepted + row, count)
    tl.store(following + row, tl.sum(tl.where(lane == count, chosen, 0), 0))
    if COMMIT:
        store_committed(row, count, committed, active, new_committed)


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


@triton.jit
def store_committed(row, count, committed, active, new_committed):  # type: ignore[no-untyped-def]
    """Fill a sequence's new `committed`: its accepted tokens and one more where it is active."""
    now = tl.load(committed + row)
    tl.store(new_committed + row, tl.where(tl.load(active + row), now + count + 1, now))
