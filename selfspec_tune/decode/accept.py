"""Which drafted tokens stand, and which token follows them. Pure functions of tensors: no model, no generator."""

from __future__ import annotations

import selfspec_kernels
import torch
from torch import Tensor


def accept_greedy(drafted: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Accept the longest prefix of drafted tokens that are the target's first choice, see `selfspec_kernels`.

    Args:
        drafted: [B, k] draft tokens.
        logits: [B, k + 1, V] of the target.

    Returns:
        accepted [B] in 0..k, and the token after the accepted ones [B].
    """
    return selfspec_kernels.accept_greedy(drafted, logits)[:2]


def accept_shared(drafted: Tensor, target: Tensor, gumbel: Tensor) -> tuple[Tensor, Tensor]:
    """Accept the longest prefix of drafted tokens that the target draws too with the same noise [B, k + 1, V].

    Args and results as those of `accept_ratio`.
    """
    return selfspec_kernels.accept_shared(drafted, target, gumbel)[:2]


def accept_ratio(
    drafted: Tensor, draft: Tensor | None, target: Tensor, uniform: Tensor, residual_uniform: Tensor
) -> tuple[Tensor, Tensor]:
    """Accept by the ratio test, see `selfspec_kernels.accept_ratio`: the output follows the target distribution.

    Args:
        drafted: [B, k] draft tokens, drawn from `draft`.
        draft: q, [B, k, V]; None where the draft was certain of every token.
        target: p, [B, k + 1, V].
        uniform: [B, k] in [0, 1), one per test.
        residual_uniform: [B] in [0, 1), for the token after the accepted ones.

    Returns:
        accepted [B] in 0..k, and the token after the accepted ones [B].
    """
    uniforms = torch.cat((uniform, residual_uniform[:, None]), 1)
    return selfspec_kernels.accept_ratio(drafted, draft, target, uniforms)[:2]
