"""What follows from an evaluation: the best weights are kept, and a run beyond its budget ends or turns back."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from selfspec_tune.config import TrainConfig, parse_share
from selfspec_tune.progress import Report
from selfspec_tune.train import guard
from selfspec_tune.train.evaluate import Evaluator
from selfspec_tune.train.position import Position
from selfspec_tune.train.shrink import interpolated, largest_share
from selfspec_tune.train.weights import KeptWeights, rounded


@dataclass(frozen=True)
class Judge:
    """Evaluates a run and decides; all of its state is in the position and in the kept weights.

    Attributes:
        config: of the run.
        module: the prepared one.
        position: of the run.
        evaluator: measures.
        kept: the best weights so far.
        save_dtype: of the weights to be saved.
        log: told of every evaluation.
        report: told when the run turns back.
    """

    config: TrainConfig
    module: Any
    position: Position
    evaluator: Evaluator
    kept: KeptWeights
    save_dtype: torch.dtype
    log: Report
    report: Report

    def if_due(self) -> None:
        """Evaluate every `eval_every` steps, once."""
        if self.position.step % self.config.eval_every == 0:
            self.now()

    def now(self) -> None:
        """Measure the weights as they would be saved and act on it; nothing where this step was measured before."""
        position = self.position
        if position.evaluated == position.step:
            return
        record = self._measure()
        position.evaluated, position.last = position.step, record
        if position.step == 0:
            position.before = record
            self.log(record)
            if self.kept.always:
                self.kept.write(self.module, 0)
            return
        rises, over = self._rises(record)
        self.log({**record, "perplexity_increase": rises, "within_budget": not over})
        if over:
            self._over_budget(over, rises)
        elif guard.better(record, position.best):
            position.best = record
            self.kept.write(self.module, position.step)

    def shrink(self) -> None:
        """Bring the last weights back into the budget where they are beyond it, and keep them if they are best then."""
        position = self.position
        if self.config.over_budget != "shrink" or not self._rises(position.last)[1]:
            return
        trained = {name: weight.clone() for name, weight in self.kept.taken(self.module).items()}
        base = None if self.config.lora_rank else self.kept.load(0)

        def measure(share: float) -> dict[str, Any]:
            self.kept.put(self.module, interpolated(base, trained, share) if trained else {})
            record = {**self._measure(), "share_kept": share}
            rises, over = self._rises(record)
            self.log({**record, "perplexity_increase": rises, "within_budget": not over})
            return record

        found = largest_share(measure, lambda record: not self._rises(record)[1])
        if found is not None and guard.better(found[1], position.best):
            share, position.best = found
            self.kept.put(self.module, interpolated(base, trained, share) if trained else {})
            self.kept.write(self.module, position.step)

    def restore(self, step: int) -> None:
        """Put the weights of the best step, or of the base, back into the module."""
        shrunk = self.position.best is not None and "share_kept" in self.position.best
        if step != self.position.step or shrunk:
            self.kept.read(self.module, step)

    def _measure(self) -> dict[str, Any]:
        """Measure the weights as they would be saved."""
        with nullcontext() if self.position.step == 0 else rounded(self.module, self.save_dtype):
            return {"step": self.position.step, **self.evaluator.measure(self.module)}

    def _rises(self, record: dict[str, Any]) -> tuple[dict[str, float], list[str]]:
        """Return by how much perplexity rose on each text, and the texts where that is beyond the budget."""
        rises = guard.increases(self.position.before, record)
        limit = parse_share("max_perplexity_increase", self.config.max_perplexity_increase)
        return rises, guard.beyond(rises, limit)

    def _over_budget(self, over: list[str], rises: dict[str, float]) -> None:
        """End the run; or go back to the best weights, with half of the loss given to the exits.

        Going back, steps, data and schedules go on, and the optimizer keeps its moments, which fade in a few steps.
        """
        position = self.position
        if self.config.over_budget == "shrink":
            return
        spent = position.lowered == guard.MAX_LOWERED or position.exit_share == 0
        if self.config.over_budget == "stop" or spent:
            position.stopped = "max_perplexity_increase"
            return
        step = position.best["step"] if position.best else 0
        self.restore(step)
        position.exit_share, position.lowered = position.exit_share / 2, position.lowered + 1
        rose = ", ".join(f"{text.replace('_', '-')} text by {rises[text]:.2%}" for text in over)
        back = f"back to the weights of step {step}, with {position.exit_share:.3g} of the loss for the exits"
        self.report({"notice": f"step {position.step}: perplexity rose beyond the budget ({rose}); {back}"})
