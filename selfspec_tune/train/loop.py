"""The training loop: steps, evaluations, states, and the end. Knows no terminal; reports go to functions.

What is trained, the whole model or a head on it, and what is written at the end, `methods.py` says. `evaluate.py` says
what is measured, `guard.py` when a run has gone wrong.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from selfspec_tune import trained_on
from selfspec_tune.config import TrainConfig
from selfspec_tune.errors import UserError
from selfspec_tune.model.families import describe
from selfspec_tune.model.load import load_model, load_tokenizer
from selfspec_tune.progress import Progress, Report, silent, unheard
from selfspec_tune.train import checkpoint, guard, outcome
from selfspec_tune.train.environment import interruption, make_accelerator
from selfspec_tune.train.evaluate import Evaluator, assumed_costs
from selfspec_tune.train.judge import Judge
from selfspec_tune.train.methods import METHODS, Start
from selfspec_tune.train.metrics import Metrics, flat
from selfspec_tune.train.options import check_options
from selfspec_tune.train.position import Position
from selfspec_tune.train.schedule import active_exits, draw_dropped, learning_rate, mixture_weight, resolve_exits
from selfspec_tune.train.sharding import prepare
from selfspec_tune.train.step import Update
from selfspec_tune.train.texts import load_texts
from selfspec_tune.train.trackers import finish_trackers, start_trackers
from selfspec_tune.train.weights import KeptWeights


def train(config: TrainConfig, progress: Progress = silent, report: Report = unheard) -> dict[str, Any]:
    """Train as `config` says and return the contents of output/training.json (of a head: output/exit_head.json).

    What is saved are the weights of the evaluation with the best estimated speed-up within the perplexity budget. If no
    evaluation but the base's was within it, nothing is saved: `best_step` of the facts is None, and a state remains.

    A finished output is returned as it is; a state of the same run is resumed. Interrupted by SIGINT, the run saves a
    state and raises KeyboardInterrupt; the same call then ends with the weights of an uninterrupted run, bit for bit on
    a CPU.

    Args:
        config: model, output and train_data are required.
        progress: called with ("train" | "evaluate" | "target states", done, total).
        report: called with every record of metrics.jsonl, and with notices.

    Raises:
        UserError: a bad option, model or data set, an output that holds another run, or a loss that is not finite.
        KeyboardInterrupt: after SIGINT, with the state saved.
    """
    check_options(config)
    done = checkpoint.finished(config)
    if done is not None:
        return done
    accelerator = make_accelerator(config)
    try:
        return _Run(config, accelerator, progress, report).to_the_end()
    finally:
        finish_trackers(accelerator)  # the process group is left by the caller, when all is written and printed


class _Run:
    """One training run: what lives from the first step to the last."""

    def __init__(self, config: TrainConfig, accelerator: Any, progress: Progress, report: Report) -> None:
        self.config, self.accelerator, self.progress, self.report = config, accelerator, progress, report
        self.output, self.files = Path(str(config.output)), checkpoint.FILES[config.method]
        self.states, self.ranks = self.output / self.files.states, accelerator.num_processes
        self.base = checkpoint.base_name(str(config.model))
        model = load_model(self.base, device="cpu")
        self.save_dtype = model.dtype if config.dtype == "auto" else getattr(torch, config.dtype)
        family = describe(model.config)
        if config.sequence_length > family.max_context:
            allowed = f"at most {family.max_context}"
            raise UserError("sequence_length exceeds the model's context", got=config.sequence_length, allowed=allowed)
        self.exits = resolve_exits(config.chosen_exits, family.num_layers)
        costs = assumed_costs(model, self.exits, extra_layers=int(config.method == "exit-head"))
        self.trained_on = trained_on.read(checkpoint.files_of(self.base)) or trained_on.TrainedOn()
        self.tokenizer = load_tokenizer(self.base)
        texts = load_texts(config, self.tokenizer, accelerator.process_index, self.ranks, report)
        for part in (texts.training, texts.held_out, texts.general, texts.anchor):
            if part is not None:
                part.check_vocabulary(family.vocab_size)
        self.method = METHODS[config.method](Start(config, model, self.base, self.exits, self.save_dtype, accelerator))
        self.training, held_out = self.method.prepare(texts.training, texts.held_out, progress)
        self.anchor_data = texts.anchor
        self.position = Position(config.seed, config.exit_loss_weight, self.training)
        self.module, self.optimizer = self._prepare(self.method.module.train())
        self.update = Update(config, accelerator, self.module, self.optimizer)
        device, size = accelerator.device, config.batch_size
        self.evaluator = Evaluator(held_out, texts.general, self.exits, costs, size, device, progress)
        self.kept = KeptWeights(accelerator, self.states, always=guard.keeps_base(config))
        self.judge = Judge(
            config, self.module, self.position, self.evaluator, self.kept, self.save_dtype, self._log, report
        )
        self.started = time.monotonic()
        self.metrics = Metrics(self.output / self.files.metrics, enabled=accelerator.is_main_process)
        self.about = {
            "config": checkpoint.identity(config),
            "data": "".join(
                each.digest() for each in (self.training, held_out, texts.general, texts.anchor) if each is not None
            ),
            "processes": self.ranks,
        }

    def to_the_end(self) -> dict[str, Any]:
        """Resume or start, step until done, save the best weights and return the facts."""
        self.output.mkdir(parents=True, exist_ok=True)
        resumed = checkpoint.load_state(self.accelerator, self.states, self.about)
        position = self.position
        self.metrics.rewind(position.step if resumed else None)
        self.kept.state_saved(position.best["step"] if position.best else None)
        at = position.step if resumed else None
        start_trackers(self.accelerator, self.about["config"], self.output, position.run, resumed_at=at)
        self.started = time.monotonic() - position.seconds
        if not resumed:
            self.judge.now()
        diverged = None
        try:
            self._train()
        except guard.Diverged as error:
            diverged, position.stopped = error, "diverged"
        facts = self._finish()
        if diverged is not None:
            raise outcome.diverged(diverged, facts, self.config, checkpoint.latest_state(self.states))
        return facts

    def _train(self) -> None:
        position = self.position
        with interruption() as interrupted:
            self.judge.if_due()  # an interrupted run saved its state before the evaluation of its last step
            while not self._is_over():
                self._step()
                if self._agree(interrupted.is_set()):
                    self._save_state()
                    interrupted.leave(terminated=self._agree(interrupted.signal == signal.SIGTERM))
                self.judge.if_due()
                if position.step % self.config.save_every == 0 and not self._is_over():
                    self._save_state()
        self.judge.now()
        self._save_state()

    def _prepare(self, module: Any) -> tuple[Any, Any]:
        config = self.config
        matrices = [p for p in module.parameters() if p.requires_grad and p.ndim >= 2]
        vectors = [p for p in module.parameters() if p.requires_grad and p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        adamw = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=True)
        module, optimizer = prepare(self.accelerator, module, adamw)
        self.accelerator.register_for_checkpointing(self.position)
        return module, optimizer

    def _step(self) -> None:
        """Do one optimiser step as the schedules have it, and write its metrics."""
        config, position = self.config, self.position
        began = time.monotonic()
        steps, curriculum = config.max_steps, config.exit_curriculum
        exits = active_exits(self.exits, config.exits_per_step, position.step, curriculum=curriculum, max_steps=steps)
        dropped = draw_dropped(self.method.drop_probabilities, position.generator)
        rate = learning_rate(
            position.step, peak=config.learning_rate, warmup_steps=config.warmup_steps, max_steps=steps
        )
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        of_step: dict[str, Any] = {"exit_share": position.exit_share}
        if config.exit_loss == "mixture":
            of_step["mixture"] = [mixture_weight(position.alpha.get(layer, 0.0)) for layer in exits]
        taken = self.update.take(position.step + 1, self._batches(), exits, dropped, self._anchored(), **of_step)
        position.note_acceptance(exits, taken.accepted)
        tokens = config.batch_size * config.gradient_accumulation * self.ranks * config.sequence_length
        position.step += 1
        position.tokens += tokens
        self._read_clock()
        self._log(
            {
                "step": position.step,
                "loss": taken.loss,
                "losses": taken.losses,
                "gradient_norm": taken.gradient_norm,
                "running_alpha": {str(layer): value for layer, value in sorted(position.alpha.items())},
                "learning_rate": rate,
                "layers_dropped": len(dropped),
                "tokens_per_second": tokens / (time.monotonic() - began),
                "seconds": position.seconds,
            }
        )
        self.progress("train", position.step, config.max_steps)

    def _batches(self) -> Iterator[list[torch.Tensor]]:
        """Yield this rank's next batches of the stream, those of one step; ranks take neighbouring pieces."""
        count, device = self.config.batch_size, self.accelerator.device
        for _ in range(self.config.gradient_accumulation):
            first = self.position.sequences + self.accelerator.process_index * count
            self.position.sequences += count * self.ranks
            yield [tensor.to(device) for tensor in self.training.batch(first, count, seed=self.config.seed)]

    def _anchored(self) -> list[torch.Tensor] | None:
        """Return this rank's batch of the anchor's data for this step; None where there are none."""
        if self.anchor_data is None:
            return None
        count = self.config.anchor_batch_size
        first = (self.position.step * self.ranks + self.accelerator.process_index) * count
        batch = self.anchor_data.batch(first, count, seed=self.config.seed)
        return [tensor.to(self.accelerator.device) for tensor in batch]

    def _is_over(self) -> bool:
        minutes = self.config.max_minutes
        late = minutes is not None and self.position.seconds >= 60 * minutes
        over = self.position.stopped is not None or self.position.step >= self.config.max_steps
        return over or self._agree(late)

    def _agree(self, flag: bool) -> bool:
        """Return whether any rank says so: clocks and signals differ between ranks, decisions must not."""
        if self.ranks == 1:
            return flag
        flags = torch.tensor([float(flag)], device=self.accelerator.device)
        return bool(self.accelerator.reduce(flags, "sum").item())

    def _read_clock(self) -> None:
        """Bring the accumulated seconds up to date; those of earlier processes are in `started`."""
        self.position.seconds = time.monotonic() - self.started

    def _save_state(self) -> None:
        self._read_clock()
        checkpoint.save_state(self.accelerator, self.states, self.position.step, self.about)
        self.kept.state_saved(self.position.best["step"] if self.position.best else None)

    def _log(self, record: dict[str, Any]) -> None:
        self.metrics.write(record)
        self.report(record)
        if self.accelerator.trackers:
            self.accelerator.log(flat(record), step=record["step"])

    def _finish(self) -> dict[str, Any]:
        """Save the best weights within the budget, if there are any, and return the facts."""
        if self.position.stopped == "diverged" and self.config.over_budget == "shrink":
            self.judge.now()  # the weights are those before the step that failed
        self.judge.shrink()
        position, best = self.position, self.position.best
        facts = outcome.Facts(self.config, self.base, self.save_dtype, self.about["config"], self.evaluator)
        if best is None:
            return facts.of(position, position.last)
        self.judge.restore(best["step"])
        checkpoint.round_weights(self.module, self.save_dtype)
        self._read_clock()
        if self.config.streaming:  # all other data were read, and bad records named, before the first step
            for line in self.training.skipped:
                self.report({"notice": line})
        self.method.save(self.module, self.tokenizer, self.output, best["step"], self.about["config"])
        result = facts.of(position, best)
        if self.config.skip_bad_records:
            result["skipped"] = list(self.training.skipped)
        self.training.hash_into(self.trained_on)
        if self.anchor_data is not None:
            self.anchor_data.hash_into(self.trained_on)
        if self.accelerator.is_main_process:
            self.trained_on.write(self.output)
            checkpoint.write_facts(self.output, result, self.files)
        return result
