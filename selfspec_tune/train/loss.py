"""The training loss and the evaluation counts, fused with final norm and LM head and computed in chunks of tokens.

Logits exist for one chunk of two layers at a time: never [exits, tokens, V], nor [tokens, V]. The gradients of all
losses in the logits follow from two distributions, so they are formed in the forward pass, in the logits' own memory,
and nothing is recomputed in the backward pass. Hidden states are read where they lie: no copy of them is stacked,
sorted or normed beyond the rows of one chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from selfspec_kernels import exit_loss
from torch import Tensor, nn

# Logits of a layer held at once; 2**24 of them are 64 MB in fp32.
LOGITS_PER_CHUNK = 2**24
IGNORED = -100
"""The target of a row that predicts nothing."""

Kind = Literal["kl", "ce", "tv", "mixture"]
Parts = tuple[float, float, float]
"""Weights of cross entropy, KL and total variation in a layer's loss."""


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
    - mixture: λ KL + (1 − λ) TV, see `schedule.mixture_weight`;
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
    plan = _Plan(
        targets=targets.flatten(),
        shares=tuple(float(share) for share in shares),
        parts=((1 - anchor, anchor, 0.0), *_exit_parts(kind, mixture, len(hidden) - 1)),
        norm=norm,
        teacher=None if teacher is None or anchor == 0 else _rows_of(teacher.detach()),
        teacher_weight=(weight if teacher_weight is None else teacher_weight).detach(),
        chunk=chunk or chunk_size(weight),
    )
    parameters = () if norm is None else tuple(norm.parameters())
    return _FusedLoss.apply(plan, weight, *hidden, *parameters)


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
    counted = _counted(targets)
    counts[0] = len(counted)
    for rows in counted.split(chunk or chunk_size(weight)):
        logits = (F.linear(_normed(_rows_of(each)[rows], norm), weight) for each in hidden)
        final = next(logits).float()
        counts[1] += F.cross_entropy(final, targets[rows], reduction="sum").double()
        best = final.argmax(-1)
        for index, early in enumerate(logits):
            counts[2 + index] += (early.argmax(-1) == best).sum()
    return counts


def chunk_size(weight: Tensor) -> int:
    """Return how many tokens' logits are held at once for a head of shape [V, d]."""
    return max(32, LOGITS_PER_CHUNK // weight.shape[0])


@dataclass(frozen=True)
class _Plan:
    """What to compute besides tensors with gradients; see `early_exit_loss`. Rows are flat; `parts` per layer."""

    targets: Tensor
    shares: tuple[float, ...]
    parts: tuple[Parts, ...]
    norm: nn.Module | None
    teacher: Tensor | None
    teacher_weight: Tensor
    chunk: int


class _FusedLoss(torch.autograd.Function):
    """Loss and all gradients in one pass; backward only scales them, in place, and hands them over."""

    @staticmethod
    def forward(ctx: Any, plan: _Plan, weight: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        work = _Pass(plan, weight, tensors, ctx.needs_input_grad[1:])
        counted = _counted(plan.targets)
        work.run(counted)
        # Not saved as tensors for backward: whoever holds a gradient makes autograd copy it.
        ctx.gradients = work.gradients()
        means = work.sums / max(1, len(counted))
        own = (means * means.new_tensor(plan.parts)).sum(-1)
        total = (own * own.new_tensor(plan.shares)).sum()
        losses = torch.cat([means[:1, 0], own[1:], *([means[:1, 1]] if plan.teacher is not None else [])])
        agreed = 1 - means[:, 2]
        ctx.mark_non_differentiable(losses, agreed)
        return total, losses, agreed

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_total: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("the gradients of this loss were taken before")
        return None, *(None if each is None else each.mul_(grad_total) for each in gradients)


class _Pass:
    """The work of one forward pass: logits chunk by chunk, sums of the losses, gradients.

    Attributes:
        sums: [M, 3] summed cross entropy, KL and total variation.
    """

    def __init__(self, plan: _Plan, weight: Tensor, tensors: Sequence[Tensor], wanted: Sequence[bool]) -> None:
        device = weight.device.type
        self.plan, num_layers = plan, len(plan.shares)
        self.compute = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        accumulate = torch.promote_types(weight.dtype, torch.float32)
        self.weight_dtype = weight.dtype
        self.head = weight.detach().to(self.compute)
        self.hidden = [_rows_of(each.detach()) for each in tensors[:num_layers]]
        self.parameters = tensors[num_layers:]
        # A frozen head takes no gradient, which saves a third of the products here.
        self.grad_weight = torch.zeros_like(weight, dtype=accumulate) if wanted[0] else None
        self.grad_tensors = [
            torch.zeros_like(each) if want else None for each, want in zip(tensors, wanted[1:], strict=True)
        ]
        self.sums = torch.zeros(num_layers, 3, dtype=accumulate, device=weight.device)

    def run(self, counted: Tensor) -> None:
        """Go through the rows `counted`, and with each chunk through the exits before the final layer.

        The final layer's logits are what the exits learn from, so they are made first and become a gradient last.
        """
        plan, self.num_counted = self.plan, max(1, len(counted))
        size = min(plan.chunk, self.num_counted)
        count = 1 + (len(self.hidden) > 1 or plan.teacher is not None)
        buffers = self.head.new_empty(count, size, len(self.head))
        for rows in counted.split(size):
            targets, logits = plan.targets[rows], buffers[:, : len(rows)]
            final = self._states(0, rows)
            self._logits(final[1], self.head, logits[0])
            for index in range(1, len(self.hidden)):
                states = self._states(index, rows)
                self._logits(states[1], self.head, logits[1])
                self._finish(index, rows, states, logits[1], targets, logits[0])
            base = None
            if plan.teacher is not None:
                base = logits[1]
                self._logits(plan.teacher[rows], plan.teacher_weight.to(self.compute), base)
            self._finish(0, rows, final, logits[0], targets, base)

    def gradients(self) -> list[Tensor | None]:
        """Return the gradients of the head and of all other tensors."""
        head = None if self.grad_weight is None else self.grad_weight.to(self.weight_dtype)
        return [head, *self.grad_tensors]

    def _states(self, index: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return hidden states of a layer, and the same after the norm with the graph of it."""
        states = self.hidden[index][rows]
        if self.plan.norm is None:
            return states, states
        with torch.enable_grad():
            return states.requires_grad_(), _normed(states, self.plan.norm)

    def _logits(self, normed: Tensor, head: Tensor, out: Tensor) -> None:
        torch.mm(normed.detach().to(self.compute), head.t(), out=out)

    def _finish(
        self,
        index: int,
        rows: Tensor,
        states: tuple[Tensor, Tensor],
        logits: Tensor,
        targets: Tensor,
        teacher: Tensor | None,
    ) -> None:
        """Add up the losses of a layer and the gradients, for which its logits are overwritten."""
        share = self.plan.shares[index]
        parts = self.plan.parts[index] if share else None
        self.sums[index] += exit_loss(logits, targets, teacher, parts).sum(0)
        if not share:
            return
        scale = share / self.num_counted
        self._add_weight_gradient(logits, states[1].detach().to(self.compute), scale)
        self._add_state_gradient(index, rows, states, (logits @ self.head).to(states[1].dtype).mul_(scale))

    def _add_weight_gradient(self, gradient: Tensor, normed: Tensor, scale: float) -> None:
        """Add scale · gradientᵀ [V, n] · normed [n, d], without a second [V, d] where dtypes differ."""
        total = self.grad_weight
        if total is None:
            return
        if total.dtype == gradient.dtype:
            total.addmm_(gradient.t(), normed, alpha=scale)
            return
        step = max(1, LOGITS_PER_CHUNK // total.shape[1])
        for part, columns in zip(total.split(step), gradient.split(step, 1), strict=True):
            part.add_(columns.t() @ normed, alpha=scale)

    def _add_state_gradient(self, index: int, rows: Tensor, states: tuple[Tensor, Tensor], gradient: Tensor) -> None:
        """Carry `gradient`, that of the normed states, through the norm, and add it where it belongs."""
        own, others = self.grad_tensors[index], self.grad_tensors[len(self.hidden) :]
        if self.plan.norm is None:
            if own is not None:
                _rows_of(own)[rows] = gradient
            return
        wanted = [each for each, total in zip(self.parameters, others, strict=True) if total is not None]
        first, *rest = torch.autograd.grad(states[1], [states[0], *wanted], gradient)
        if own is not None:
            _rows_of(own)[rows] = first
        for total, each in zip([each for each in others if each is not None], rest, strict=True):
            total += each


def _exit_parts(kind: Kind, mixture: Sequence[float] | None, num_exits: int) -> list[Parts]:
    """Return what the loss of each exit is made of."""
    if kind == "mixture":
        assert mixture is not None
        return [(0.0, float(share), 1 - float(share)) for share in mixture]
    parts = {"ce": (1.0, 0.0, 0.0), "kl": (0.0, 1.0, 0.0), "tv": (0.0, 0.0, 1.0)}
    return [parts[kind]] * num_exits


def _rows_of(hidden: Tensor) -> Tensor:
    """View [..., d] as [rows, d]."""
    return hidden.reshape(-1, hidden.shape[-1])


def _counted(targets: Tensor) -> Tensor:
    """Return the indices of the rows [R] that predict something."""
    return (targets != IGNORED).nonzero().squeeze(1)


def _normed(states: Tensor, norm: nn.Module | None) -> Tensor:
    return states if norm is None else norm(states)
