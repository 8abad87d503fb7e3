"""PyTorch oracles of acceptance: which drafted tokens stand, and which token follows them.

They run where there is no kernel, on CPUs that is always. Pure functions of tensors: no generator, and no shape that
depends on what the tensors hold.
"""

from __future__ import annotations

import torch
from torch import Tensor


def accept_greedy(drafted: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """See `selfspec_kernels.accept_greedy`."""
    return accept_matching(drafted, logits.argmax(-1))


def accept_shared(drafted: Tensor, target: Tensor, gumbel: Tensor) -> tuple[Tensor, Tensor]:
    """See `selfspec_kernels.accept_shared`."""
    return accept_matching(drafted, draw_with_gumbel(target, gumbel))


def accept_matching(drafted: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Accept the longest prefix of `drafted` [B, k] that the target's choices [B, k + 1] begin with."""
    accepted = (drafted == chosen[:, :-1]).long().cumprod(-1).sum(-1)
    return accepted, chosen.gather(1, accepted[:, None]).squeeze(1)


def accept_ratio(drafted: Tensor, draft: Tensor | None, target: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """See `selfspec_kernels.accept_ratio`."""
    batch, k = drafted.shape
    p = target[:, :-1].gather(-1, drafted[..., None]).squeeze(-1).double()
    q = torch.ones_like(p) if draft is None else draft.gather(-1, drafted[..., None]).squeeze(-1).double()
    accepted = (uniforms[:, :k].double() * q < p).long().cumprod(-1).sum(-1)

    row = torch.arange(batch, device=drafted.device)
    after = target[row, accepted]
    rejected_draft = torch.zeros_like(after)
    if k:
        at = accepted.clamp(max=k - 1)
        if draft is None:
            rejected_draft.scatter_(1, drafted[row, at][:, None], 1.0)
        else:
            rejected_draft = draft[row, at]
    residual = (after - rejected_draft).clamp_min(0)
    use_target = (accepted == k) | (residual.sum(-1) <= 0)
    residual = torch.where(use_target[:, None], after, residual)
    return accepted, draw(residual, uniforms[:, k])


def draw_with_gumbel(probabilities: Tensor, gumbel: Tensor) -> Tensor:
    """See `selfspec_kernels.draw_with_gumbel`."""
    return (probabilities.log() + gumbel).argmax(-1)


def draw(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """See `selfspec_kernels.draw`."""
    cumulative = probabilities.double().cumsum(-1)
    target = uniform.double()[..., None] * cumulative[..., -1:]
    token = torch.searchsorted(cumulative, target, right=True).squeeze(-1)
    last = probabilities.shape[-1] - 1 - (probabilities.flip(-1) > 0).int().argmax(-1)
    return torch.minimum(token, last)


def committed_after(accepted: Tensor, committed: Tensor, active: Tensor) -> Tensor:
    """Return the new `committed` [B] of sequences of which some are `active` [B]."""
    return torch.where(active, committed + accepted + 1, committed)
