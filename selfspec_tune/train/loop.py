"""The training loop: steps, evaluations, states, and the end. Knows no terminal; progress goes to a function.

What is trained, the whole model or a head on it, and what is written at the end, `methods.py` says.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import torch

from selfspec_tune import trained_on
from selfspec_tune.config import TrainConfig
from selfspec_tune.errors import UserError
from selfspec_tune.model.families import describe
from selfspec_tune.model.load import load_model, load_tokenizer
from selfspec_tune.progress import Progress, silent
from selfspec_tune.train import checkpoint
from selfspec_tune.train.data import Sequences, load_sequences
from selfspec_tune.train.environment import interruption, make_accelerator
from selfspec_tune.train.methods import METHODS, Start
from selfspec_tune.train.metrics import Metrics, flat
from selfspec_tune.train.options import check_options
from selfspec_tune.train.schedule import active_exits, draw_dropped, learning_rate, resolve_exits


def train(config: TrainConfig, progress: Progress = silent) -> dict[str, Any]:
    """Train as `config` says and return the contents of output/training.json (of a head: output/exit_head.json).

    A finished output is returned as it is; a state of the same run is resumed. Interrupted by SIGINT, the run saves a
    state and raises KeyboardInterrupt; the same call then ends with the weights of an uninterrupted run, bit for bit on
    a CPU.

    Args:
        config: model, output and train_data are required.
        progress: called with ("train" | "evaluate" | "target states", done, total).

    Raises:
        UserError: a bad option, model or data set, or an output that holds another run.
        KeyboardInterrupt: after SIGINT, with the state saved.
    """
    check_options(config)
    done = checkpoint.finished(config)
    if done is not None:
        return done
    accelerator = make_accelerator(config)
    try:
        return _Run(config, accelerator, progress).to_the_end()
    finally:
        accelerator.end_training()


class _Position:
    """What is checkpointed besides model, optimizer and random states; registered with accelerate."""

    def __init__(self, seed: int) -> None:
        self.step = 0
        self.sequences = 0
        self.tokens = 0
        self.seconds = 0.0
        self.before: dict[str, Any] = {}
        self.generator = torch.Generator().manual_seed(seed)

    def state_dict(self) -> dict[str, Any]:
        return {**vars(self), "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])
        vars(self).update({name: value for name, value in state.items() if name != "generator"})


class _Run:
    """One training run: what lives from the first step to the last."""

    def __init__(self, config: TrainConfig, accelerator: Any, progress: Progress) -> None:
        self.config, self.accelerator, self.progress = config, accelerator, progress
        self.output, self.files = Path(str(config.output)), checkpoint.FILES[config.method]
        self.base = checkpoint.base_name(str(config.model))
        model = load_model(self.base, device="cpu")
        self.save_dtype = model.dtype if config.dtype == "auto" else getattr(torch, config.dtype)
        family = describe(model.config)
        if config.sequence_length > family.max_context:
            raise UserError(
                "sequence_length exceeds the context of the model",
                got=config.sequence_length,
                allowed=f"at most {family.max_context}",
            )
        self.exits = resolve_exits(config.chosen_exits, family.num_layers)
        self.trained_on = trained_on.read(checkpoint.files_of(self.base)) or trained_on.TrainedOn()
        self.tokenizer = load_tokenizer(self.base)
        training, held_out = _load_data(config, self.tokenizer, accelerator.num_processes)
        if int(training.ids.max()) >= family.vocab_size:
            raise UserError("the tokenizer has tokens that the model does not know", got=self.base)
        self.position = _Position(config.seed)
        self.method = METHODS[config.method](Start(config, model, self.base, self.exits, self.save_dtype, accelerator))
        self.training, self.held_out = self.method.prepare(training, held_out, progress)
        self.module, self.optimizer = self._prepare(self.method.module.train())
        self.started = time.monotonic()
        self.metrics = Metrics(self.output / self.files.metrics, enabled=accelerator.is_main_process)
        self.about = {
            "config": checkpoint.identity(config),
            "data": self.training.digest() + self.held_out.digest(),
            "processes": accelerator.num_processes,
        }

    def to_the_end(self) -> dict[str, Any]:
        """Resume or start, step until done, save the checkpoint and return the facts."""
        self.output.mkdir(parents=True, exist_ok=True)
        resumed = checkpoint.load_state(self.accelerator, self.output / self.files.states, self.about)
        self.metrics.rewind(self.position.step if resumed else None)
        self.started = time.monotonic() - self.position.seconds
        if not resumed:
            self.position.before = self._evaluate()
        with interruption() as interrupted:
            while not self._is_over():
                self._step()
                if self._agree(interrupted.is_set()):
                    self._save_state()
                    raise KeyboardInterrupt
                self._between_steps()
            self._save_state()
        checkpoint.round_weights(self.module, self.save_dtype)
        after = self._evaluate()
        self._read_clock()
        self.method.save(self.module, self.tokenizer, self.output, self.position.step, self.about["config"])
        facts = self._facts(after)
        if self.accelerator.is_main_process:
            self._write_trained_on()
            checkpoint.write_facts(self.output, facts, self.files)
        return facts

    def _write_trained_on(self) -> None:
        """Write what the base was trained on and what this run has read, held-out records left out."""
        for record in self.training.records:
            self.trained_on.add(record.parts)
        self.trained_on.write(self.output)

    def _prepare(self, module: Any) -> tuple[Any, Any]:
        config = self.config
        matrices = [p for p in module.parameters() if p.requires_grad and p.ndim >= 2]
        vectors = [p for p in module.parameters() if p.requires_grad and p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        adamw = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=True)
        module, optimizer = self.accelerator.prepare(module, adamw)
        self.accelerator.register_for_checkpointing(self.position)
        return module, optimizer

    def _step(self) -> None:
        """Do one optimiser step: draw its plan, accumulate gradients, clip, update, and write its metrics."""
        config, position, accelerator = self.config, self.position, self.accelerator
        began = time.monotonic()
        exits = active_exits(self.exits, config.exits_per_step, position.step)
        dropped = draw_dropped(self.method.drop_probabilities, position.generator)
        rate = learning_rate(
            position.step, peak=config.learning_rate, warmup_steps=config.warmup_steps, max_steps=config.max_steps
        )
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        losses = torch.zeros(2 + len(exits), device=accelerator.device)
        for _ in range(config.gradient_accumulation):
            ids, counted, *states = self._next_batch()
            with accelerator.accumulate(self.module):
                total, parts, _ = self.module(ids, counted, exits, dropped, *states)
                accelerator.backward(total)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(self.module.parameters(), config.max_grad_norm)
                self.optimizer.step()
                self.optimizer.zero_grad()
            losses += torch.cat([total.detach()[None], parts[: 1 + len(exits)]]) / config.gradient_accumulation
        values = accelerator.reduce(losses, "mean").tolist()
        if not math.isfinite(values[0]):
            raise UserError(f"the loss is {values[0]} at step {position.step + 1}", command="--learning-rate SMALLER")
        tokens = config.batch_size * config.gradient_accumulation * accelerator.num_processes * config.sequence_length
        position.step += 1
        position.tokens += tokens
        self._read_clock()
        self._log(
            {
                "step": position.step,
                "loss": values[0],
                "losses": dict(zip(["final", *map(str, exits)], values[1:], strict=True)),
                "learning_rate": rate,
                "layers_dropped": len(dropped),
                "tokens_per_second": tokens / (time.monotonic() - began),
                "seconds": position.seconds,
            }
        )
        self.progress("train", position.step, config.max_steps)

    def _next_batch(self) -> list[torch.Tensor]:
        """Return this rank's next [batch_size, T] of the stream; ranks take neighbouring pieces."""
        count, ranks = self.config.batch_size, self.accelerator.num_processes
        first = self.position.sequences + self.accelerator.process_index * count
        self.position.sequences += count * ranks
        batch = self.training.batch(first, count, seed=self.config.seed)
        return [tensor.to(self.accelerator.device) for tensor in batch]

    def _between_steps(self) -> None:
        step, over = self.position.step, self._is_over()
        if step % self.config.eval_every == 0 and not over:
            self._evaluate()
        if step % self.config.save_every == 0 and not over:
            self._save_state()

    def _evaluate(self) -> dict[str, Any]:
        """Return full-depth perplexity and alpha per exit on the held-out sequences; every rank does all of them."""
        device, size, total = self.accelerator.device, self.config.batch_size, len(self.held_out)
        counts = torch.zeros(2 + len(self.exits), dtype=torch.float64, device=device)
        self.module.eval()
        with torch.no_grad():
            for start in range(0, total, size):
                batch = self.held_out.read(list(range(start, min(start + size, total))))
                ids, counted, *states = [tensor.to(device) for tensor in batch]
                counts += self.module(ids, counted, self.exits, frozenset(), *states)[0]
                self.progress("evaluate", min(start + size, total), total)
        self.module.train()
        tokens, nll, *agreed = counts.tolist()
        if not tokens:
            raise UserError("the held-out data have no token to predict", got="prompts only")
        alpha = {str(layer): count / tokens for layer, count in zip(self.exits, agreed, strict=True)}
        record = {"perplexity": math.exp(min(nll / tokens, 700.0)), "alpha": alpha}
        self._log({"step": self.position.step, **record})
        return record

    def _is_over(self) -> bool:
        minutes = self.config.max_minutes
        late = minutes is not None and self.position.seconds >= 60 * minutes
        return self.position.step >= self.config.max_steps or self._agree(late)

    def _agree(self, flag: bool) -> bool:
        """Return whether any rank says so: clocks and signals differ between ranks, decisions must not."""
        if self.accelerator.num_processes == 1:
            return flag
        flags = torch.tensor([float(flag)], device=self.accelerator.device)
        return bool(self.accelerator.reduce(flags, "sum").item())

    def _read_clock(self) -> None:
        """Bring the accumulated seconds up to date; those of earlier processes are in `started`."""
        self.position.seconds = time.monotonic() - self.started

    def _save_state(self) -> None:
        self._read_clock()
        checkpoint.save_state(self.accelerator, self.output / self.files.states, self.position.step, self.about)

    def _log(self, record: dict[str, Any]) -> None:
        self.metrics.write(record)
        if self.accelerator.trackers:
            self.accelerator.log(flat(record), step=record["step"])

    def _facts(self, after: dict[str, Any]) -> dict[str, Any]:
        position, before = self.position, self.position.before
        return {
            "base": self.base,
            "steps": position.step,
            "stopped_by": "max_steps" if position.step >= self.config.max_steps else "max_minutes",
            "tokens": position.tokens,
            "seconds": position.seconds,
            "exits": list(self.exits),
            "alpha_before": before["alpha"],
            "alpha_after": after["alpha"],
            "perplexity_before": before["perplexity"],
            "perplexity_after": after["perplexity"],
            "held_out_tokens": self.held_out.ids.numel(),
            "dtype": str(self.save_dtype).removeprefix("torch."),
            "config": self.about["config"],
            "config_hash": checkpoint.identity_hash(self.about["config"]),
        }


def _load_data(config: TrainConfig, tokenizer: Any, ranks: int) -> tuple[Sequences, Sequences]:
    return load_sequences(
        config.train_data,
        config.eval_data,
        tokenizer,
        length=config.sequence_length,
        num_train=config.max_steps * config.batch_size * config.gradient_accumulation * ranks,
        num_eval=config.eval_sequences,
        text_field=config.text_field,
        messages_field=config.messages_field,
        seed=config.seed,
    )
