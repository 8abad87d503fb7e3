"""The training loss and the evaluation counts, fused with the LM head and computed in chunks of tokens.

Logits exist for one chunk and one exit at a time: never [exits, tokens, V], nor [tokens, V]. The gradient of
softmax cross entropy and of KL in the logits is a difference of two distributions, so it is formed in the forward pass,
while the logits are there, and nothing is recomputed in the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

# fp32 logits held at once; 2**24 of them are 64 MB.
LOGITS_PER_CHUNK = 2**24


def early_exit_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    exit_weight: float,
    kind: str = "kl",
    chunk: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of the final layer and of the active exits, as in LayerSkip (arXiv 2404.16710, section 4.2).

    total = (1 - w) * CE(final, targets) + w * mean over exits of loss_e, each a mean over tokens, where loss_e is
    KL(final, detached || exit) for kind `kl` and CE(exit, targets) for `ce`. Without exits, total = CE(final, targets).
    Matrix products run in the autocast dtype where autocast is on, all else in fp32 (fp64 for fp64 inputs).

    Args:
        hidden: [1 + exits, N, d], *after* the final norm; index 0 is the final layer, the others the active exits.
        weight: [V, d] of the LM head.
        targets: [N], the token each row should predict.
        exit_weight: w, the share of the exits.
        kind: kl or ce.
        chunk: tokens per chunk; chosen from V if None.

    Returns:
        The total (a scalar with gradients in `hidden` and `weight`) and [1 + exits] losses without gradients.
    """
    size = chunk or chunk_size(weight)
    return _FusedLoss.apply(hidden, weight, targets, exit_weight, kind == "kl", size)


@torch.no_grad()
def agreement_counts(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, *, chunk: int | None = None
) -> torch.Tensor:
    """Count what perplexity and alpha are made of.

    Args:
        hidden: [1 + exits, N, d], after the final norm; index 0 is the final layer.
        weight: [V, d] of the LM head.
        targets: [N].
        chunk: tokens per chunk; chosen from V if None.

    Returns:
        [2 + exits] in fp64: tokens N, summed negative log-likelihood of the targets at the final layer, and per exit
        the number of rows whose argmax is that of the final layer (not that of the data).
    """
    counts = torch.zeros(1 + len(hidden), dtype=torch.float64, device=hidden.device)
    size = chunk or chunk_size(weight)
    counts[0] = len(targets)
    for start in range(0, len(targets), size):
        rows = slice(start, start + size)
        final = F.linear(hidden[0, rows], weight).float()
        counts[1] += F.cross_entropy(final, targets[rows], reduction="sum").double()
        best = final.argmax(-1)
        for index in range(1, len(hidden)):
            counts[1 + index] += (F.linear(hidden[index, rows], weight).argmax(-1) == best).sum()
    return counts


def chunk_size(weight: torch.Tensor) -> int:
    """Return how many tokens' logits are held at once for a head of shape [V, d]."""
    return max(32, LOGITS_PER_CHUNK // weight.shape[0])


class _FusedLoss(torch.autograd.Function):
    """Loss and both gradients in one pass; backward only scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        exit_weight: float,
        distil: bool,
        chunk: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        device = hidden.device.type
        compute = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        num_exits, num_tokens = len(hidden) - 1, max(1, len(targets))
        shares = [1 - exit_weight if num_exits else 1.0] + [exit_weight / max(1, num_exits)] * num_exits
        accumulate = torch.promote_types(weight.dtype, torch.float32)
        grad_hidden = torch.zeros_like(hidden)
        # A frozen head takes no gradient, which saves a third of the products here.
        grad_weight = torch.zeros_like(weight, dtype=accumulate) if ctx.needs_input_grad[1] else None
        losses = hidden.new_zeros(1 + num_exits, dtype=accumulate)
        with torch.autocast(device, enabled=False):
            head = weight.to(compute)
            for start in range(0, len(targets), chunk):
                rows = slice(start, start + chunk)
                teacher = None
                for index, share in enumerate(shares):
                    h = hidden[index, rows].to(compute)
                    log_q = F.linear(h, head).to(accumulate).log_softmax(-1)
                    loss, grad = _loss_and_grad(log_q, targets[rows], teacher if distil and index else None)
                    if index == 0 and distil and num_exits:
                        teacher = log_q
                    losses[index] += loss / num_tokens
                    if share == 0:
                        continue
                    grad = (grad * (share / num_tokens)).to(compute)
                    grad_hidden[index, rows] = (grad @ head).to(hidden.dtype)
                    if grad_weight is not None:
                        grad_weight += grad.t() @ h
        ctx.save_for_backward(grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype))
        ctx.mark_non_differentiable(losses)
        return (losses * losses.new_tensor(shares)).sum(), losses

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_total: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        if grad_weight is not None:
            grad_weight = grad_weight * grad_total
        return grad_hidden * grad_total.to(grad_hidden.dtype), grad_weight, None, None, None, None


def _loss_and_grad(
    log_q: torch.Tensor, targets: torch.Tensor, teacher: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the summed loss of [n, V] log-probabilities and its gradient in the logits; KL given a teacher."""
    if teacher is not None:
        p = teacher.exp()
        return (p * (teacher - log_q)).sum(), log_q.exp() - p
    rows = torch.arange(len(targets), device=targets.device)
    grad = log_q.exp()
    grad[rows, targets] -= 1
    return -log_q[rows, targets].sum(), grad
