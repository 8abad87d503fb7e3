"""Where a run stands: all that a resumed run needs besides model, optimizer and torch's random states."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import torch

RUNNING = 0.9
"""What the running alpha keeps of itself at a step."""


class Position:
    """Registered with accelerate, which saves and loads it with the states.

    Attributes:
        step: optimiser steps done.
        sequences: sequences read from the training data, all ranks together.
        tokens: tokens read.
        seconds: spent on steps and evaluations.
        evaluated: step of the last evaluation; -1 before the first.
        before: the evaluation of the base.
        last: the last evaluation.
        best: {"step": ..., and its evaluation} of the best weights within the budget so far; None before there are any.
        stopped: what ended the run early, a key of `guard.STOPPED`; None while nothing did.
        exit_share: share of the loss given to the exits.
        lowered: times that the share was halved.
        alpha: exit layer → running mean of the acceptance probability in training.
        run: id of the run for trackers.
        generator: of the layers dropped.
    """

    def __init__(self, seed: int, exit_share: float, data: Any = None) -> None:
        self.step = 0
        self.sequences = 0
        self.tokens = 0
        self.seconds = 0.0
        self.evaluated = -1
        self.before: dict[str, Any] = {}
        self.last: dict[str, Any] = {}
        self.best: dict[str, Any] | None = None
        self.stopped: str | None = None
        self.exit_share = exit_share
        self.lowered = 0
        self.alpha: dict[int, float] = {}
        self.run = secrets.token_hex(4)
        self.generator = torch.Generator().manual_seed(seed)
        self._data = data if hasattr(data, "state_dict") else None

    def note_acceptance(self, exits: Sequence[int], accepted: Sequence[float]) -> None:
        """Bring the running alpha of the exits trained at a step up to date."""
        for layer, value in zip(exits, accepted, strict=True):
            known = self.alpha.get(layer)
            self.alpha[layer] = value if known is None else RUNNING * known + (1 - RUNNING) * value

    def state_dict(self) -> dict[str, Any]:
        """Return plain values and tensors; those of data that are read as a stream are under "data"."""
        plain = {name: value for name, value in vars(self).items() if name not in ("generator", "_data")}
        data = {} if self._data is None else {"data": self._data.state_dict()}
        return {**plain, **data, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to where `state_dict` was taken."""
        state = dict(state)
        self.generator.set_state(state.pop("generator"))
        data = state.pop("data", None)
        if self._data is not None:
            self._data.load_state_dict(data)
        vars(self).update(state)
