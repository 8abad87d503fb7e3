"""Which implementation of acceptance runs, for a whole batch: the kernel on GPUs, else the reference.

Ties go to the first token. All probabilities are given, not computed, here; none need sum to one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from selfspec_kernels import accept_reference as reference
from selfspec_kernels.ops import on_gpu


class Accepted(NamedTuple):
    """What became of a round's drafted tokens."""

    accepted: Tensor
    """[B] in 0..k, how many of them stand."""
    following: Tensor
    """[B], the token after those."""
    committed: Tensor | None
    """[B], the new number of committed positions of every sequence; None where none was given."""


def accept_greedy(drafted: Tensor, logits: Tensor, *, commit: tuple[Tensor, Tensor] | None = None) -> Accepted:
    """Accept the longest prefix of drafted tokens that are the target's most probable ones.

    Args:
        drafted: [B, k] draft tokens; k may be 0.
        logits: [B, k + 1, V] of the target.
        commit: committed [B] and active [B]: sequences that are active commit their accepted tokens and one more, the
            others nothing.
    """
    if on_gpu(logits):
        from selfspec_kernels import accept_kernel

        return Accepted(*accept_kernel.accept_matching(drafted, logits, None, commit))
    return _with_commit(*reference.accept_greedy(drafted, logits), commit)


def accept_shared(
    drafted: Tensor, target: Tensor, gumbel: Tensor, *, commit: tuple[Tensor, Tensor] | None = None
) -> Accepted:
    """Accept the longest prefix of drafted tokens that the target draws too with the same noise.

    Args:
        drafted: [B, k], drawn with `draw_with_gumbel`; k may be 0.
        target: p, [B, k + 1, V].
        gumbel: [B, k + 1, V], the noise of every position.
        commit: as in `accept_greedy`.
    """
    if on_gpu(target):
        from selfspec_kernels import accept_kernel

        return Accepted(*accept_kernel.accept_matching(drafted, target, gumbel, commit))
    return _with_commit(*reference.accept_shared(drafted, target, gumbel), commit)


def accept_ratio(
    drafted: Tensor,
    draft: Tensor | None,
    target: Tensor,
    uniforms: Tensor,
    *,
    commit: tuple[Tensor, Tensor] | None = None,
) -> Accepted:
    """Ratio test and residual resampling (arXiv 2211.17192, 2302.01318): the output follows the target distribution.

    A drafted token x stands with probability min(1, p(x)/q(x)). At the first rejection the token is drawn from
    max(0, p − q) normalised, and from p where that is zero everywhere; after k acceptances from p at the last position.

    Args:
        drafted: [B, k] draft tokens, drawn from `draft`; k may be 0.
        draft: q, [B, k, V]; None where the draft was certain of every token.
        target: p, [B, k + 1, V].
        uniforms: [B, k + 1] in [0, 1): one per test, and the last for the token after the accepted ones.
        commit: as in `accept_greedy`.
    """
    if on_gpu(target):
        from selfspec_kernels import accept_ratio_kernel

        return Accepted(*accept_ratio_kernel.accept_ratio(drafted, draft, target, uniforms, commit))
    return _with_commit(*reference.accept_ratio(drafted, draft, target, uniforms), commit)


def accept_matching(drafted: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Accept the longest prefix of drafted tokens that the target chose too, on any device by PyTorch: a few numbers.

    Args:
        drafted: [B, k].
        chosen: [B, k + 1] the target's own choice at each position.

    Returns:
        accepted [B] in 0..k, and the token after the accepted ones [B].
    """
    return reference.accept_matching(drafted, chosen)


def draw(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """Draw one token per row by inverting the cumulative distribution.

    Args:
        probabilities: [..., V], non-negative, not all zero; need not be normalised.
        uniform: [...] in [0, 1).

    Returns:
        Token ids [...]; never one of probability zero.
    """
    if not on_gpu(probabilities):
        return reference.draw(probabilities, uniform)
    nothing, rows = _rounds_without_draft(probabilities)
    return accept_ratio(nothing, None, rows, uniform.reshape(-1, 1)).following.view(uniform.shape)


def draw_with_gumbel(probabilities: Tensor, gumbel: Tensor) -> Tensor:
    """Draw argmax(log p + g): the same noise g picks the same token wherever two distributions agree enough.

    Args:
        probabilities, gumbel: [..., V].

    Returns:
        Token ids [...].
    """
    if not on_gpu(probabilities):
        return reference.draw_with_gumbel(probabilities, gumbel)
    nothing, rows = _rounds_without_draft(probabilities)
    tokens = accept_shared(nothing, rows, gumbel.expand_as(probabilities).reshape(rows.shape)).following
    return tokens.view(probabilities.shape[:-1])


def _rounds_without_draft(probabilities: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows [..., V] as rounds in which nothing was drafted: tokens [B, 0] and p [B, 1, V]."""
    rows = probabilities.reshape(-1, 1, probabilities.shape[-1])
    return rows.new_empty(len(rows), 0, dtype=torch.int64), rows


def _with_commit(accepted: Tensor, following: Tensor, commit: tuple[Tensor, Tensor] | None) -> Accepted:
    committed = None if commit is None else reference.committed_after(accepted, *commit)
    return Accepted(accepted, following, committed)
