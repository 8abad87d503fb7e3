"""Acceptance by agreement of a whole batch on GPUs, in Triton (the extra `cuda`): greedy, or with shared noise.

Nothing waits for the host, and no shape for data. There are two kernels, so that many programs read a large vocabulary:
the first finds the largest of a chunk of a row and where it stands first, the second merges the chunks of a sequence's
rows and looks how far the draft agrees with the target's choices. What `accept_ratio_kernel` shares stands here too.

What this file does not know: where logits and noise come from, and how fast it is. No GPU has run it so far.
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
    check(drafted, values, commit)
    if gumbel is not None and (gumbel.shape != values.shape or gumbel.device != values.device):
        raise ValueError(f"noise {list(gumbel.shape)} for probabilities {list(values.shape)}")
    values, drafted = values.contiguous(), drafted.contiguous()
    noise = values if gumbel is None else gumbel.contiguous()
    batch, rows, width = values.shape
    whole, merged = launch_constants(width, rows - 1)
    tiles, device = (batch * rows, merged["CHUNKS"]), values.device
    best = torch.empty(*tiles, dtype=torch.promote_types(torch.float32, noise.dtype), device=device)
    best_at = torch.empty(*tiles, dtype=torch.int32, device=device)
    results, commits, commit_constants = results_of(drafted, commit)
    with torch.cuda.device_of(values):
        best_of_chunk_kernel[tiles](
            values, noise, best, best_at, **whole, GUMBEL=gumbel is not None, num_warps=NUM_WARPS
        )
        accept_matching_kernel[(batch,)](
            drafted, best, best_at, *results[:2], *commits, rows - 1, **merged, **commit_constants, num_warps=NUM_WARPS
        )
    return results


def launch_constants(width: int, k: int) -> tuple[dict[str, int], dict[str, int]]:
    """Return the compile-time arguments of what reads the vocabulary, and those of what merges its chunks."""
    chunk = min(CHUNK, triton.next_power_of_2(width))
    chunks = triton.cdiv(width, chunk)
    merged = {"CHUNKS": chunks, "PADDED": triton.next_power_of_2(chunks), "LANES": triton.next_power_of_2(k + 1)}
    return {"WIDTH": width, "CHUNK": chunk}, merged


def check(drafted: Tensor, values: Tensor, commit: Commit) -> None:
    """Raise a ValueError where dtypes, shapes or devices do not go together."""
    if values.dtype not in DTYPES or values.device != drafted.device:
        raise ValueError(f"no acceptance with {values.dtype} on {values.device} of tokens on {drafted.device}")
    batch, k = drafted.shape
    if values.ndim != 3 or values.shape[:2] != (batch, k + 1) or values.shape[2] == 0:
        raise ValueError(f"{list(values.shape)} numbers for drafted tokens {list(drafted.shape)}")
    if commit is not None and not commit[0].shape == commit[1].shape == (batch,):
        raise ValueError(f"committed {list(commit[0].shape)}, active {list(commit[1].shape)} of {batch} sequences")


def results_of(drafted: Tensor, commit: Commit) -> tuple[Results, tuple[Tensor, Tensor, Tensor], dict[str, bool]]:
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


@triton.jit
def store_committed(row, count, committed, active, new_committed):  # type: ignore[no-untyped-def]
    """Fill a sequence's new `committed`: its accepted tokens and one more where it is active."""
    now = tl.load(committed + row)
    tl.store(new_committed + row, tl.where(tl.load(active + row), now + count + 1, now))
