"""One optimiser step: gradients of some batches accumulated, checked, clipped and applied."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from selfspec_tune.config import TrainConfig
from selfspec_tune.train.environment import num_passes
from selfspec_tune.train.guard import check_finite


@dataclass(frozen=True)
class Taken:
    """What a step found, means over its batches and all ranks.

    Attributes:
        loss: the total.
        losses: each layer's own loss: "final", the exits by number, with an anchor "anchor", and "anchor_data", the KL
            on the anchor's own text.
        accepted: the acceptance probability of each exit trained, mean Σ min(p, q).
        gradient_norm: before clipping.
    """

    loss: float
    losses: dict[str, float]
    accepted: list[float]
    gradient_norm: float


class Update:
    """Takes steps with a prepared module and optimizer; knows neither data nor schedules."""

    def __init__(self, config: TrainConfig, accelerator: Any, module: Any, optimizer: Any) -> None:
        self.config, self.accelerator = config, accelerator
        self.module, self.optimizer = module, optimizer

    def take(
        self,
        number: int,
        batches: Iterable[Sequence[torch.Tensor]],
        exits: tuple[int, ...],
        dropped: frozenset[int],
        anchored: Sequence[torch.Tensor] | None = None,
        **of_step: Any,
    ) -> Taken:
        """Do step `number`, from 1.

        Args:
            number: of the step, for the message if it fails.
            batches: `gradient_accumulation` of them, each what `Sequences.batch` gives.
            exits: active exits.
            dropped: layers that are not run.
            anchored: a batch on which the final layer, with all layers run, is held to the base; comes first.
            of_step: the rest of what the module's `forward` takes at a step.

        Raises:
            Diverged: the loss or the norm of the gradient is not finite; the weights are as before the step.
        """
        accelerator, many = self.accelerator, self.config.gradient_accumulation
        sums, values, held = torch.zeros(0), [0.0], torch.zeros(1, device=accelerator.device)
        if anchored is not None:
            held = self._hold(anchored)
        # accelerate divides by the passes of a step, of which the anchor's is one.
        scale = num_passes(self.config) / many
        for index, (ids, counted, *states) in enumerate(batches):
            with accelerator.accumulate(self.module):
                total, losses, agreed = self.module(ids, counted, exits, dropped, *states, **of_step)
                accelerator.backward(total * scale)
                found = torch.cat([total.detach()[None], losses, agreed[1:]]) / many
                sums = sums + found if index else found
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(self.module.parameters(), self.config.max_grad_norm)
                    values = accelerator.reduce(torch.cat([sums, held, _whole(norm).to(sums)[None]]), "mean").tolist()
                    check_finite(values[0], values[-1], number)
                self.optimizer.step()
                self.optimizer.zero_grad()
        names = ["final", *map(str, exits), "anchor"]
        loss, *own, kept, gradient_norm = values
        accepted = own[len(own) - len(exits) :]
        own = own[: len(own) - len(exits)]
        named = dict(zip(names, own, strict=False))
        if anchored is not None:
            loss, named["anchor_data"] = loss + self.config.anchor_data_weight * kept, kept
        return Taken(loss, named, accepted, gradient_norm)

    def _hold(self, batch: Sequence[torch.Tensor]) -> torch.Tensor:
        """Add the gradients of KL(base || model) on a batch; return that KL, [1]."""
        accelerator = self.accelerator
        with accelerator.accumulate(self.module):
            total, _, _ = self.module(*batch, (), mixture=(), anchor=1.0)
            accelerator.backward(total * num_passes(self.config) * self.config.anchor_data_weight)
        return total.detach()[None]


def _whole(norm: Any) -> torch.Tensor:
    """Return the norm itself where it comes as a tensor spread over ranks."""
    whole: torch.Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return whole.detach()
