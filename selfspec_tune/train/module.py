"""The modules that own the training forward: they drive the layers themselves, so that a dropped layer is not called.

One of them is what accelerate wraps, so everything that touches weights, evaluation included, goes through its
`forward`. They read no cache and build no logits larger than a chunk. They know nothing of steps, data or files.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from selfspec_tune.model.exit_head import ExitHead
from selfspec_tune.model.families import describe
from selfspec_tune.train.lora import adapted_layers, head_weight, without_adapters
from selfspec_tune.train.loss import IGNORED, Kind, agreement_counts, early_exit_loss
from selfspec_tune.train.schedule import exit_shares


class EarlyExitModule(nn.Module):
    """A causal language model of a supported family, trained at its final layer and at early exits.

    Args:
        model: a transformers causal language model, with or without adapters.
        exit_loss_weight: share of the loss given to the exits, where a step names no other.
        exit_loss: kl, ce, tv or mixture.
        exit_weights: how the exits divide their share, see `exit_shares`.
        anchor_weight: share of the final layer's loss that is KL to the base's distribution.
        base: the base, where it is a frozen copy (see `frozen_copy`); else it is the model without its adapters. It is
            no part of the module: accelerate does not wrap it, states do not hold it, no optimizer sees it.
        gradient_checkpointing: recompute each layer in the backward pass.
    """

    def __init__(
        self,
        model: Any,
        *,
        exit_loss_weight: float = 0.5,
        exit_loss: Kind = "kl",
        exit_weights: str = "uniform",
        anchor_weight: float = 0.0,
        base: Any = None,
        gradient_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        self.outside = (base,)
        for each in (model, base):
            if each is not None:
                each.set_attn_implementation("sdpa")
        self.model = model
        self.windows = describe(model.config).windows
        self.exit_loss_weight, self.exit_weights = exit_loss_weight, exit_weights
        self.exit_loss, self.anchor_weight = exit_loss, anchor_weight
        self.gradient_checkpointing = gradient_checkpointing

    def forward(
        self,
        ids: torch.Tensor,
        counted: torch.Tensor,
        exits: tuple[int, ...],
        dropped: frozenset[int] = frozenset(),
        *,
        mixture: Sequence[float] | None = None,
        exit_share: float | None = None,
        anchor: float | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Return the loss in training mode, counts in evaluation mode; see `loss.py` for both.

        Args:
            ids: [B, T] token ids.
            counted: [B, T] bool; False for a token that is read but not predicted, such as a prompt's.
            exits: ascending exit layers to train or measure.
            dropped: layers that are not run. The base runs all of its own.
            mixture: for the loss `mixture`, the weight of KL at each exit, see `mixture_weight`.
            exit_share: share of the loss given to the exits at this step; `exit_loss_weight` if None.
            anchor: share of the final layer's loss that is KL to the base; `anchor_weight` if None.

        Returns:
            Training: (total, losses, agreements), see `early_exit_loss`. Evaluation: ([2 + exits] counts,).
        """
        targets, head = predictions(ids, counted), head_weight(self.model)
        anchor = self.anchor_weight if anchor is None else anchor
        teacher, base_head = self._base_final(ids) if self.training and anchor else (None, None)
        hidden = self.hidden_states(ids, exits, dropped)
        if not self.training:
            return (agreement_counts(hidden, head, targets, norm=self.model.model.norm),)
        share = self.exit_loss_weight if exit_share is None else exit_share
        return early_exit_loss(
            hidden,
            head,
            targets,
            shares=exit_shares(exits, share, self.exit_weights),
            kind=self.exit_loss,
            mixture=mixture,
            norm=self.model.model.norm,
            teacher=teacher,
            teacher_weight=base_head,
            anchor=anchor,
        )

    def normed_hidden(
        self, ids: torch.Tensor, exits: tuple[int, ...], dropped: frozenset[int] = frozenset()
    ) -> list[torch.Tensor]:
        """Return 1 + exits hidden states [B, T, d] after the final norm: the final layer's, then one per exit."""
        return [self.model.model.norm(hidden) for hidden in self.hidden_states(ids, exits, dropped)]

    def hidden_states(
        self, ids: torch.Tensor, exits: tuple[int, ...], dropped: frozenset[int] = frozenset(), inner: Any = None
    ) -> list[torch.Tensor]:
        """Return 1 + exits hidden states [B, T, d] without the final norm: the final layer's, then one per exit.

        The hidden state at exit E is what layers 0..E-1 produced, dropped ones left out.

        Args:
            ids: [B, T].
            exits: ascending exit layers.
            dropped: layers that are not run.
            inner: the layers' owner, if another than the model's. Without embeddings it reads the model's.
        """
        inner = inner or self.model.model
        embed = inner.embed_tokens or self.model.model.embed_tokens
        hidden = embed(ids).to(inner.norm.weight.dtype)
        arguments = layer_arguments(inner.rotary_emb, hidden, self.windows)
        taps = []
        for index, layer in enumerate(inner.layers):
            if index not in dropped:
                hidden = self._run(layer, hidden, arguments[self.windows[index]])
            if index + 1 in exits:
                taps.append(hidden)
        return [hidden, *taps]

    @torch.no_grad()
    def _base_final(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the base's hidden states [B, T, d] after its final norm, and its head's weight [V, d].

        They come first, so that none of the model's activations are held meanwhile.
        """
        base = self.outside[0] or self.model
        head = base.lm_head or self.model.lm_head
        with without_adapters(adapted_layers(self.model)):
            (final,) = self.hidden_states(ids, (), inner=base.model)
        return base.model.norm(final), head.weight

    def _run(self, layer: nn.Module, hidden: torch.Tensor, arguments: dict[str, Any]) -> Any:
        if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
            return checkpoint(layer, hidden, use_reentrant=False, **arguments)
        return layer(hidden, **arguments)


class ExitHeadModule(nn.Module):
    """An early-exit head after layer E of a frozen target; the forward contract is that of `EarlyExitModule`.

    The target is no part of the module: accelerate does not wrap it, states do not hold it, no optimizer sees it.

    Args:
        target: the frozen model, on the device it will be used on.
        head: its head, trainable.
        states_dtype: what the target's hidden states are rounded to, so that decoding's dtype is what is trained on.
        exit_loss: kl, ce, tv or mixture.
    """

    def __init__(
        self, target: EarlyExitModule, head: ExitHead, *, states_dtype: torch.dtype, exit_loss: Kind = "kl"
    ) -> None:
        super().__init__()
        self.head = head
        self.states_dtype, self.exit_loss = states_dtype, exit_loss
        self.window = target.windows[head.exit_layer]
        self.outside: tuple[EarlyExitModule | None, Any, torch.Tensor] = (
            target,
            target.model.model.rotary_emb,
            target.model.lm_head.weight.detach(),
        )

    def forward(
        self,
        ids: torch.Tensor,
        counted: torch.Tensor,
        exits: tuple[int, ...],
        dropped: frozenset[int] = frozenset(),
        states: torch.Tensor | None = None,
        *,
        mixture: Sequence[float] | None = None,
        exit_share: float | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Return the loss of the one exit in training mode, counts in evaluation mode; see `loss.py` for both.

        Args:
            ids: [B, T] token ids.
            counted: [B, T] bool; False for a token that is read but not predicted, such as a prompt's.
            exits: (E,).
            dropped: empty; the target is whole.
            states: [B, 2, T, d] of `target_states`, where they are known.
            mixture: for the loss `mixture`, the weight of KL at the exit.
            exit_share: not looked at: the target learns nothing, so the exit has all of the loss.

        Returns:
            Training: (total, [2] losses: the target's cross entropy and the exit's, [2] agreements). Evaluation: ([3]
            counts,).
        """
        if exits != (self.head.exit_layer,) or dropped:
            raise ValueError(f"this head is for exit {self.head.exit_layer} and a target with all its layers")
        known = self.target_states(ids) if states is None else states
        dtype = self.head.norm.weight.dtype
        final, early = known[:, 0].to(dtype), known[:, 1].to(dtype)
        _, rotary, weight = self.outside
        adapted = self.head.block(early, **layer_arguments(rotary, early, (self.window,))[self.window])
        hidden, targets = [final, self.head.norm(adapted)], predictions(ids, counted)
        if not self.training:
            return (agreement_counts(hidden, weight, targets),)
        return early_exit_loss(hidden, weight, targets, shares=(0.0, 1.0), kind=self.exit_loss, mixture=mixture)

    @torch.no_grad()
    def target_states(self, ids: torch.Tensor) -> torch.Tensor:
        """Return [B, 2, T, d] of the target: hidden states after the final norm, and those at exit E before any."""
        target = self.outside[0]
        if target is None:
            raise ValueError("the target was released: its states must be given")
        with torch.autocast(ids.device.type, enabled=False):
            final, early = target.hidden_states(ids, (self.head.exit_layer,))
            return torch.stack([target.model.model.norm(final), early], 1).to(self.states_dtype)

    def release_target(self) -> None:
        """Let go of the target's layers: from now on all states are given."""
        self.outside = (None, *self.outside[1:])


def predictions(ids: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """Return [B, T], the token that each row predicts: the next one, or -100 where that is not counted."""
    targets = torch.full_like(ids, IGNORED)
    targets[:, :-1] = ids[:, 1:].masked_fill(~counted[:, 1:].to(torch.bool), IGNORED)
    return targets


def layer_arguments(
    rotary: Any, hidden: torch.Tensor, windows: Iterable[int | None]
) -> dict[int | None, dict[str, Any]]:
    """Return, per attention window, what a transformers layer takes besides its hidden states [B, T, d]."""
    length, device = hidden.shape[1], hidden.device
    positions = torch.arange(length, device=device)[None]
    embeddings = rotary(hidden, position_ids=positions)
    return {
        window: {
            "attention_mask": _window_mask(length, window, device),
            "position_ids": positions,
            "position_embeddings": embeddings,
        }
        for window in set(windows)
    }


def _window_mask(length: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    """Return the [1, 1, T, T] mask of a sliding window (True is seen), or None where plain causal attention will do."""
    if window is None or window >= length:
        return None
    positions = torch.arange(length, device=device)
    distance = positions[:, None] - positions[None, :]
    return ((distance >= 0) & (distance < window))[None, None]
