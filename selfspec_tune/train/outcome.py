"""How a run ended: its facts, and the error where it went wrong."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from selfspec_tune.config import TrainConfig
from selfspec_tune.errors import UserError
from selfspec_tune.train import checkpoint, guard
from selfspec_tune.train.evaluate import Evaluator
from selfspec_tune.train.guard import Diverged
from selfspec_tune.train.position import Position


@dataclass(frozen=True)
class Facts:
    """What of a run's facts is known from its start.

    Attributes:
        config: of the run.
        base: the directory or hub name it started from.
        save_dtype: of the saved weights.
        identity: the options that make it the same run.
        evaluator: knows what was measured on.
    """

    config: TrainConfig
    base: str
    save_dtype: torch.dtype
    identity: dict[str, Any]
    evaluator: Evaluator

    def of(self, position: Position, after: dict[str, Any]) -> dict[str, Any]:
        """Return the facts as a JSON object.

        Args:
            position: at the end.
            after: {"step": ..., and the evaluation} of the saved weights, or of the last ones if none were saved.
        """
        before, general = position.before, self.evaluator.general
        rises = guard.increases(before, after)
        saved, done = position.best is not None, position.step >= self.config.max_steps
        return {
            "base": self.base,
            "steps": position.step,
            "stopped_by": position.stopped or ("max_steps" if done else "max_minutes"),
            "best_step": after["step"] if saved else None,
            **({"share_kept": after["share_kept"]} if "share_kept" in after else {}),
            "improved": saved and guard.score(after) > guard.score(before),
            "tokens": position.tokens,
            "seconds": position.seconds,
            "exits": list(self.evaluator.exits),
            "exit_share": position.exit_share,
            "alpha_before": before["alpha"],
            "alpha_after": after["alpha"],
            "speedup_estimate_before": before["speedup_estimate"],
            "speedup_estimate_after": after["speedup_estimate"],
            "perplexity_before": before["perplexity"],
            "perplexity_after": after["perplexity"],
            "held_out_tokens": self.evaluator.held_out.ids.numel(),
            **({} if general is None else self._general(before, after)),
            "perplexity_increase": rises,
            "max_perplexity_increase": self.config.max_perplexity_increase,
            "dtype": str(self.save_dtype).removeprefix("torch."),
            "config": self.identity,
            "config_hash": checkpoint.identity_hash(self.identity),
        }

    def _general(self, before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
        assert self.evaluator.general is not None
        return {
            "general_perplexity_before": before["general_perplexity"],
            "general_perplexity_after": after["general_perplexity"],
            "general_tokens": self.evaluator.general.ids.numel(),
        }


def diverged(error: Diverged, facts: dict[str, Any], config: TrainConfig, state: Path | None) -> UserError:
    """Return the error of a run whose loss or gradient was not finite: what is left of it, and what to do."""
    if facts["best_step"] is not None:
        kept = f"the best checkpoint before, of step {facts['best_step']}, is saved in {config.output}"
    elif state is not None:
        kept = f"no checkpoint was within the budget yet; the last state before is kept in {state}"
    else:
        kept = "no checkpoint was within the budget yet, and no state was saved"
    return UserError(
        f"{error}: {kept}",
        allowed="finite numbers: a smaller learning rate, a longer warm-up, or --mixed-precision no",
        command=f"--learning-rate {config.learning_rate / 3:.1g} --output OTHER_DIR",
    )
