"""Which drafted tokens stand, and which token follows them. Pure functions of tensors: no model, no generator."""

from __future__ import annotations

import torch
from torch import Tensor

from selfspec_tune.decode.sampling import draw


def accept_matching(drafted: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Accept the longest prefix of drafted tokens the target chose too (greedy, or sampling with shared noise).

    Args:
        drafted: [B, k] draft tokens.
        chosen: [B, k + 1] the target's own choice at each position.

    Returns:
        accepted [B] in 0..k, and the token after the accepted ones [B].
    """
    accepted = (drafted == chosen[:, :-1]).long().cumprod(-1).sum(-1)
    return accepted, chosen.gather(1, accepted[:, None]).squeeze(1)


def accept_ratio(
    drafted: Tensor, draft: Tensor, target: Tensor, uniform: Tensor, residual_uniform: Tensor
) -> tuple[Tensor, Tensor]:
    """Ratio test and residual resampling (arXiv 2211.17192, 2302.01318): the output follows the target distribution.

    A drafted token x stands with probability min(1, p(x)/q(x)). At the first rejection the token is drawn from
    max(0, p − q) normalised, and from p where that is zero everywhere; after k acceptances from p at the last position.

    Args:
        drafted: [B, k] draft tokens, drawn from `draft`.
        draft: q, [B, k, V].
        target: p, [B, k + 1, V].
        uniform: [B, k] in [0, 1), one per test.
        residual_uniform: [B] in [0, 1), for the token after the accepted ones.

    Returns:
        accepted [B] in 0..k, and the token after the accepted ones [B].
    """
    batch, k = drafted.shape
    q = draft.gather(-1, drafted[..., None]).squeeze(-1).double()
    p = target[:, :-1].gather(-1, drafted[..., None]).squeeze(-1).double()
    accepted = (uniform.double() * q < p).long().cumprod(-1).sum(-1)

    row = torch.arange(batch, device=drafted.device)
    after = target[row, accepted]
    rejected_draft = draft[row, accepted.clamp(max=k - 1)] if k else torch.zeros_like(after)
    residual = (after - rejected_draft).clamp_min(0)
    use_target = (accepted == k) | (residual.sum(-1) <= 0)
    residual = torch.where(use_target[:, None], after, residual)
    return accepted, draw(residual, residual_uniform)
