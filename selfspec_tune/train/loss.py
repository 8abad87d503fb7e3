"""The training loss and the evaluation counts, fused with final norm and LM head and computed in chunks of tokens.

Never are there logits [exits, tokens, V], nor [tokens, V]; `fused_loss.py` has the pass that sees to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selfspec_tune.train.fused_loss import IGNORED as IGNORED
from selfspec_tune.train.fused_loss import LOGITS_PER_CHUNK, FusedLoss, Parts, Plan, counted_rows, normed, rows_of

Kind = Literal["kl", "ce", "tv", "mixture"]


def early_exit_loss(
    hidden: Sequence[Tensor],
    weight: Tensor,
    targets: Tensor,
    *,
    shares: Sequence[float],
    kind: Kind = "kl",
    mixture: Sequence[float] | None = None,
    norm: nn.Module | None = None,
    teacher: Tensor | None = None,
    teacher_weight: Tensor | None = None,
    anchor: float = 0.0,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss of the final layer and of the active exits, as in LayerSkip (arXiv 2404.16710, section 4.2).

    total = Σ shares_i · loss_i, each a mean over counted rows. With p the final layer's distribution, detached, and q
    that of an exit, the exit's loss is

    - kl: KL(p || q);
    - tv: the total variation ½ Σ |p − q| = 1 − Σ min(p, q), one minus the expected acceptance rate;
    - mixture: λ KL + (1 − λ) TV (arXiv 2602.23881, section 4.2), with λ of `schedule.mixture_weight`: TV is what
      acceptance is made of, but its gradient vanishes where p and q share nothing, and there KL leads;
    - ce: the cross entropy to the data.

    The final layer's is (1 − a) · CE(final, targets) + a · KL(base || final), the anchor. Matrix products run in the
    autocast dtype where autocast is on, all else in fp32 (fp64 for fp64 inputs). The gradients can be taken once.

    Args:
        hidden: M tensors [..., d] of one shape: the final layer, then the active exits; before the final norm if `norm`
            is given, after it if not.
        weight: [V, d] of the LM head.
        targets: [...], the token each row should predict; -100 where it predicts none.
        shares: of the M layers in the total.
        kind: of the exits' loss.
        mixture: λ in [0, 1] of each of the M - 1 exits; for `mixture` only.
        norm: the final norm. It is applied chunk by chunk and its parameters get their gradients.
        teacher: [..., d], the base's final hidden states *after* its norm; for an anchor only. No gradient.
        teacher_weight: [V, d] of the base's LM head if it is not `weight`. No gradient.
        anchor: a in [0, 1].
        chunk: rows per chunk; chosen from V if None.

    Returns:
        The total (a scalar with gradients in `hidden`, `weight` and the norm's parameters); [M] losses without
        gradients, the first the cross entropy, or [M + 1] with the anchor's KL at the end if a > 0; and [M] agreements,
        mean Σ min(p, q) without gradients, the first that of the final layer with the base if a > 0, else 1.
    """
    if kind == "mixture" and (mixture is None or len(mixture) != len(hidden) - 1):
        raise ValueError("a mixture needs a weight for every exit")
    if len(shares) != len(hidden):
        raise ValueError(f"{len(shares)} shares for {len(hidden)} layers")
    if anchor > 0 and teacher is None:
        raise ValueError("an anchor needs the base's hidden states")
    plan = Plan(
        targets=targets.flatten(),
        shares=tuple(float(share) for share in shares),
        parts=((1 - anchor, anchor, 0.0), *_exit_parts(kind, mixture, len(hidden) - 1)),
        norm=norm,
        teacher=None if teacher is None or anchor == 0 else rows_of(teacher.detach()),
        teacher_weight=None if teacher_weight is None else teacher_weight.detach(),
        chunk=chunk or chunk_size(weight),
    )
    parameters = () if norm is None else tuple(norm.parameters())
    return FusedLoss.apply(plan, weight, *hidden, *parameters)


@torch.no_grad()
def agreement_counts(
    hidden: Sequence[Tensor],
    weight: Tensor,
    targets: Tensor,
    *,
    norm: nn.Module | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Count what perplexity and alpha are made of.

    Args:
        hidden: 1 + exits tensors [..., d], the final layer first; before the final norm if `norm` is given.
        weight: [V, d] of the LM head.
        targets: [...], -100 where a row predicts nothing.
        norm: the final norm.
        chunk: rows per chunk; chosen from V if None.

    Returns:
        [2 + exits] in fp64: counted rows N, summed negative log-likelihood of the targets at the final layer, and per
        exit the number of rows whose argmax is that of the final layer (not that of the data).
    """
    counts = torch.zeros(1 + len(hidden), dtype=torch.float64, device=weight.device)
    targets = targets.flatten()
    counted = counted_rows(targets)
    counts[0] = len(counted)
    for rows in counted.split(chunk or chunk_size(weight)):
        logits = (F.linear(normed(rows_of(each)[rows], norm), weight) for each in hidden)
        final = next(logits).float()
        counts[1] += F.cross_entropy(final, targets[rows], reduction="sum").double()
        best = final.argmax(-1)
        for index, early in enumerate(logits):
            counts[2 + index] += (early.argmax(-1) == best).sum()
    return counts


def chunk_size(weight: Tensor) -> int:
    """Return how many tokens' logits are held at once for a head of shape [V, d]."""
    return max(32, LOGITS_PER_CHUNK // weight.shape[0])


def _exit_parts(kind: Kind, mixture: Sequence[float] | None, num_exits: int) -> list[Parts]:
    """Return what the loss of each exit is made of."""
    if kind == "mixture":
        assert mixture is not None
        return [(0.0, float(share), 1 - float(share)) for share in mixture]
    parts = {"ce": (1.0, 0.0, 0.0), "kl": (0.0, 1.0, 0.0), "tv": (0.0, 0.0, 1.0)}
    return [parts[kind]] * num_exits
