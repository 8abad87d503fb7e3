"""The one pass over chunks of tokens in which the training loss and all its gradients are made.

Logits exist for one chunk of two layers at a time. The gradients of all losses in the logits follow from two
distributions, so they are formed in the forward pass, in the logits' own memory, and nothing is recomputed in the
backward pass. Hidden states are read where they lie: no copy of them is stacked, sorted or normed beyond the rows of
one chunk. What the losses mean is said in `loss.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from selfspec_kernels import exit_loss
from torch import Tensor, nn

# Logits of a layer held at once; 2**24 of them are 64 MB in fp32.
LOGITS_PER_CHUNK = 2**24
IGNORED = -100
"""The target of a row that predicts nothing."""

Parts = tuple[float, float, float]
"""Weights of cross entropy, KL and total variation in a layer's loss."""


@dataclass(frozen=True)
class Plan:
    """What to compute besides tensors with gradients; see `early_exit_loss`. Rows are flat; `parts` per layer."""

    targets: Tensor
    shares: tuple[float, ...]
    parts: tuple[Parts, ...]
    norm: nn.Module | None
    teacher: Tensor | None
    teacher_weight: Tensor | None
    chunk: int


class FusedLoss(torch.autograd.Function):
    """Loss and all gradients in one pass; backward only scales them, in place, and hands them over."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, weight: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        work = _Pass(plan, weight, tensors, ctx.needs_input_grad[1:])
        counted = counted_rows(plan.targets)
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

    def __init__(self, plan: Plan, weight: Tensor, tensors: Sequence[Tensor], wanted: Sequence[bool]) -> None:
        device = weight.device.type
        self.plan, num_layers = plan, len(plan.shares)
        self.compute = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        accumulate = torch.promote_types(weight.dtype, torch.float32)
        self.weight_dtype = weight.dtype
        self.head = weight.detach().to(self.compute)
        self.teacher_head = self.head if plan.teacher_weight is None else plan.teacher_weight.to(self.compute)
        self.hidden = [rows_of(each.detach()) for each in tensors[:num_layers]]
        self.parameters = tensors[num_layers:]
        # A frozen head takes no gradient, which saves a third of the products here.
        self.grad_weight = torch.zeros_like(weight, dtype=accumulate) if wanted[0] else None
        self.grad_tensors = [
            torch.zeros_like(each, memory_format=torch.contiguous_format) if want else None
            for each, want in zip(tensors, wanted[1:], strict=True)
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
                self._logits(plan.teacher[rows], self.teacher_head, base)
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
            return states.requires_grad_(), normed(states, self.plan.norm)

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
                rows_of(own)[rows] = gradient
            return
        wanted = [each for each, total in zip(self.parameters, others, strict=True) if total is not None]
        first, *rest = torch.autograd.grad(states[1], [states[0], *wanted], gradient)
        if own is not None:
            rows_of(own)[rows] = first
        for total, each in zip([each for each in others if each is not None], rest, strict=True):
            total += each


def rows_of(hidden: Tensor) -> Tensor:
    """View [..., d] as [rows, d]."""
    return hidden.reshape(-1, hidden.shape[-1])


def counted_rows(targets: Tensor) -> Tensor:
    """Return the indices of the rows [R] that predict something."""
    return (targets != IGNORED).nonzero().squeeze(1)


def normed(states: Tensor, norm: nn.Module | None) -> Tensor:
    return states if norm is None else norm(states)
