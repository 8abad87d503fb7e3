"""The module that owns the training forward: it drives the layers itself, so that a dropped layer is not called.

It is what accelerate wraps, so everything that touches weights, evaluation included, goes through its `forward`. It
reads no cache and builds no logits larger than a chunk. It knows nothing of steps, data or files.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from selfspec_tune.model.families import describe
from selfspec_tune.train.loss import agreement_counts, early_exit_loss


class EarlyExitModule(nn.Module):
    """A causal language model of a supported family, trained at its final layer and at early exits.

    Args:
        model: a transformers causal language model.
        exit_weight: share of the loss given to the exits.
        exit_loss: kl or ce.
        gradient_checkpointing: recompute each layer in the backward pass.
    """

    def __init__(
        self, model: Any, *, exit_weight: float = 0.5, exit_loss: str = "kl", gradient_checkpointing: bool = False
    ) -> None:
        super().__init__()
        model.set_attn_implementation("sdpa")
        self.model = model
        self.windows = describe(model.config).windows
        self.exit_weight = exit_weight
        self.exit_loss = exit_loss
        self.gradient_checkpointing = gradient_checkpointing

    def forward(
        self,
        ids: torch.Tensor,
        counted: torch.Tensor,
        exits: tuple[int, ...],
        dropped: frozenset[int] = frozenset(),
    ) -> tuple[torch.Tensor, ...]:
        """Return the loss in training mode, counts in evaluation mode; see `loss.py` for both.

        Args:
            ids: [B, T] token ids.
            counted: [B, T] bool; False for a token that is read but not predicted, such as a prompt's.
            exits: ascending exit layers to train or measure.
            dropped: layers that are not run.

        Returns:
            Training: (total, [1 + exits] losses). Evaluation: ([2 + exits] counts,).
        """
        taps = self.normed_hidden(ids, exits, dropped)
        predicts = counted[:, 1:].to(torch.bool)
        hidden = torch.stack([tap[:, :-1][predicts] for tap in taps])
        targets = ids[:, 1:][predicts]
        head = self.model.lm_head.weight
        if not self.training:
            return (agreement_counts(hidden, head, targets),)
        return early_exit_loss(hidden, head, targets, exit_weight=self.exit_weight, kind=self.exit_loss)

    def normed_hidden(
        self, ids: torch.Tensor, exits: tuple[int, ...], dropped: frozenset[int] = frozenset()
    ) -> list[torch.Tensor]:
        """Return 1 + exits hidden states [B, T, d] after the final norm: the final layer's, then one per exit.

        The hidden state at exit E is what layers 0..E-1 produced, dropped ones left out.
        """
        inner = self.model.model
        hidden = inner.embed_tokens(ids)
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        rotary = inner.rotary_emb(hidden, position_ids=positions)
        masks = {window: _window_mask(ids.shape[1], window, ids.device) for window in set(self.windows)}
        taps = []
        for index, layer in enumerate(inner.layers):
            if index not in dropped:
                hidden = self._run(layer, hidden, masks[self.windows[index]], positions, rotary)
            if index + 1 in exits:
                taps.append(inner.norm(hidden))
        return [inner.norm(hidden), *taps]

    def _run(self, layer: nn.Module, hidden: torch.Tensor, mask: Any, positions: torch.Tensor, rotary: Any) -> Any:
        arguments = {"attention_mask": mask, "position_ids": positions, "position_embeddings": rotary}
        if self.gradient_checkpointing and self.training:
            return checkpoint(layer, hidden, use_reentrant=False, **arguments)
        return layer(hidden, **arguments)


def _window_mask(length: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    """Return the [1, 1, T, T] mask of a sliding window (True is seen), or None where plain causal attention will do."""
    if window is None or window >= length:
        return None
    positions = torch.arange(length, device=device)
    distance = positions[:, None] - positions[None, :]
    return ((distance >= 0) & (distance < window))[None, None]
