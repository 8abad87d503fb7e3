"""One optimiser step: gradients of some batches accumulated, checked, clipped and applied."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from selfspec_tune.config import TrainConfig
from selfspec_tune.train.guard import check_finite


@dataclass(frozen=True)
class Taken:
    """What a step found, means over its batches and all ranks.

    Attributes:
        loss: the total.
        losses: each layer's own loss: "final", the exits by number, and with an anchor "anchor".
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
        **of_step: Any,
    ) -> Taken:
        """Do step `number`, from 1.

        Args:
            number: of the step, for the message if it fails.
            batches: `gradient_accumulation` of them, each what `Sequences.batch` gives.
            exits: active exits.
            dropped: layers that are not run.
            of_step: the rest of what the module's `forward` takes at a step.

        Raises:
            Diverged: the loss or the norm of the gradient is not finite; the weights are as before the step.
        """
        accelerator, many = self.accelerator, self.config.gradient_accumulation
        sums, values = torch.zeros(0), [0.0]
        for index, (ids, counted, *states) in enumerate(batches):
            with accelerator.accumulate(self.module):
                total, losses, agreed = self.module(ids, counted, exits, dropped, *states, **of_step)
                accelerator.backward(total)
                found = torch.cat([total.detach()[None], losses, agreed[1:]]) / many
                sums = sums + found if index else found
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(self.module.parameters(), self.config.max_grad_norm)
                    values = accelerator.reduce(torch.cat([sums, _whole(norm).to(sums)[None]]), "mean").tolist()
                    check_finite(values[0], values[-1], number)
                self.optimizer.step()
                self.optimizer.zero_grad()
        names = ["final", *map(str, exits), "anchor"]
        loss, *own, gradient_norm = values
        accepted = own[len(own) - len(exits) :]
        own = own[: len(own) - len(exits)]
        return Taken(loss, dict(zip(names, own, strict=False)), accepted, gradient_norm)


def _whole(norm: Any) -> torch.Tensor:
    """Return the norm itself where it comes as a tensor spread over ranks."""
    whole: torch.Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return whole.detach()
