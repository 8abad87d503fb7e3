"""Losses of a layer's logits and their gradient on GPUs, in Triton (the extra `cuda`).

A program takes one row of logits and, where there is one, the teacher's row, and walks along them in blocks: once for
the two normalisers, once for the losses, and once more for the gradient of total variation, which needs a sum over the
row first. Without total variation the gradient is written while the losses are summed. The gradient takes the place
of the logits, and nothing of their size is made besides. All arithmetic is fp32.

What this file does not know: where logits come from (see `ops`), and how fast it is. No GPU has run it so far.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Of logits and teacher, each its own."""
BLOCK = 4096
"""Logits that a program handles at a time; fewer where a row is shorter."""
NUM_WARPS = 8


def exit_loss(
    logits: Tensor, targets: Tensor, teacher: Tensor | None, parts: tuple[float, float, float] | None
) -> Tensor:
    """See `selfspec_kernels.exit_loss`.

    Raises:
        ValueError: other dtypes than `DTYPES`, rows that are not contiguous, or shapes or devices that do not go
            together.
    """
    both = [logits] if teacher is None else [logits, teacher]
    for each in both:
        if each.dtype not in DTYPES or not each.is_contiguous():
            raise ValueError(f"no losses of {each.dtype} logits with strides {each.stride()}")
        if each.shape != logits.shape or each.device != targets.device:
            raise ValueError(
                f"logits {list(each.shape)} on {each.device}, but {list(logits.shape)} on {targets.device}"
            )
    num_rows, width = logits.shape
    if targets.shape != (num_rows,):
        raise ValueError(f"targets {list(targets.shape)} for {num_rows} rows")
    losses = torch.empty(num_rows, 3, dtype=torch.float32, device=logits.device)
    if num_rows == 0:
        return losses
    arguments = (logits, targets.contiguous(), both[-1], losses, *(parts or (0.0, 0.0, 0.0)))
    with torch.cuda.device_of(logits):
        exit_loss_kernel[(num_rows,)](*arguments, **launch_constants(width, teacher, parts), num_warps=NUM_WARPS)
    return losses


def launch_constants(
    width: int, teacher: Tensor | None, parts: tuple[float, float, float] | None
) -> dict[str, int | bool]:
    """Return the kernel's compile-time arguments."""
    return {
        "WIDTH": width,
        "TEACHER": teacher is not None,
        "GRADIENT": parts is not None,
        "VARIATION": teacher is not None and parts is not None and parts[2] != 0,
        "BLOCK": min(BLOCK, triton.next_power_of_2(width)),
    }


@triton.jit
def exit_loss_kernel(  # type: ignore[no-untyped-def]
    logits,
    targets,
    teacher,
    losses,
    cross_entropy,
    divergence,
    variation,
    WIDTH: tl.constexpr,
    TEACHER: tl.constexpr,
    GRADIENT: tl.constexpr,
    VARIATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Fill one row of losses [n, 3]; with `GRADIENT` overwrite that row of logits [n, V] with the weighted gradient."""
    row = tl.program_id(0)
    target = tl.load(targets + row)
    logits += row.to(tl.int64) * WIDTH
    teacher += row.to(tl.int64) * WIDTH
    lane = tl.arange(0, BLOCK)
    top, normaliser = log_sum_exp(logits, WIDTH, BLOCK)
    if TEACHER:
        teacher_top, teacher_normaliser = log_sum_exp(teacher, WIDTH, BLOCK)

    likelihood = tl.zeros((BLOCK,), tl.float32)
    kl = tl.zeros((BLOCK,), tl.float32)
    distance = tl.zeros((BLOCK,), tl.float32)
    signs = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, WIDTH, BLOCK):
        at = start + lane
        # Beyond the row's end q and p are 0, as the logits there are -inf.
        log_q = log_softmax(logits + at, at < WIDTH, top, normaliser)
        q = tl.exp(log_q)
        is_target = at == target
        likelihood += tl.where(is_target, log_q, 0.0)
        gradient = cross_entropy * (q - is_target.to(tl.float32))
        if TEACHER:
            log_p = log_softmax(teacher + at, at < WIDTH, teacher_top, teacher_normaliser)
            p = tl.exp(log_p)
            kl += tl.where(p > 0, p * (log_p - log_q), 0.0)
            distance += tl.abs(q - p)
            signs += signed(q, p)
            gradient += divergence * (q - p)
        if GRADIENT and not VARIATION:
            tl.store(logits + at, gradient.to(logits.dtype.element_ty), mask=at < WIDTH)
    tl.store(losses + row * 3, -tl.sum(likelihood, 0))
    tl.store(losses + row * 3 + 1, tl.sum(kl, 0))
    tl.store(losses + row * 3 + 2, tl.sum(distance, 0) * 0.5)

    if VARIATION:
        mean_sign = tl.sum(signs, 0)
        for start in range(0, WIDTH, BLOCK):
            at = start + lane
            q = tl.exp(log_softmax(logits + at, at < WIDTH, top, normaliser))
            p = tl.exp(log_softmax(teacher + at, at < WIDTH, teacher_top, teacher_normaliser))
            gradient = cross_entropy * (q - (at == target).to(tl.float32)) + divergence * (q - p)
            gradient += variation * 0.5 * (signed(q, p) - q * mean_sign)
            tl.store(logits + at, gradient.to(logits.dtype.element_ty), mask=at < WIDTH)


@triton.jit
def log_sum_exp(start, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the largest of a row of `WIDTH` logits, and log Σ exp of what each is below it.

    They stay apart, since the sum of both would round the second off where the first is large. A block of -inf alone
    adds nothing.
    """
    lane = tl.arange(0, BLOCK)
    top = float("-inf")
    total = 0.0
    for first in range(0, WIDTH, BLOCK):
        x = tl.load(start + first + lane, mask=first + lane < WIDTH, other=float("-inf")).to(tl.float32)
        new_top = tl.maximum(top, tl.max(x, 0))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        total = total * tl.exp(top - shift) + tl.sum(tl.exp(x - shift), 0)
        top = new_top
    return top, tl.log(total)


@triton.jit
def log_softmax(at, inside, top, normaliser):  # type: ignore[no-untyped-def]
    """Load logits and return their log-probabilities in fp32, -inf where not `inside`."""
    return tl.load(at, mask=inside, other=float("-inf")).to(tl.float32) - top - normaliser


@triton.jit
def signed(q, p):  # type: ignore[no-untyped-def]
    """Return q times the sign of q - p, 0 where they are equal."""
    return tl.where(q > p, q, tl.where(q < p, -q, 0.0))
