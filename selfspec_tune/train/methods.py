"""The two methods of training: what is trained, and what is written at the end. Their loop is one, in `loop.py`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from selfspec_tune.artifact import fingerprint
from selfspec_tune.config import TrainConfig
from selfspec_tune.errors import UserError
from selfspec_tune.model.exit_head import ExitHead, HeadFacts, save_exit_head
from selfspec_tune.model.layer import widens
from selfspec_tune.progress import Progress
from selfspec_tune.train import checkpoint
from selfspec_tune.train.anchor import frozen_copy, widen
from selfspec_tune.train.data import Sequences, Training
from selfspec_tune.train.lora import add_adapters
from selfspec_tune.train.module import EarlyExitModule, ExitHeadModule
from selfspec_tune.train.schedule import drop_probabilities
from selfspec_tune.train.targets import cached_states
from selfspec_tune.train.writing import write_together


@dataclass(frozen=True)
class Start:
    """What a method starts from.

    Attributes:
        config: of the run.
        model: the transformers model as loaded, on the CPU.
        base: the directory or hub name it was loaded from.
        exits: exit layers.
        save_dtype: of the weights to be written.
        accelerator: of the run.
    """

    config: TrainConfig
    model: Any
    base: str
    exits: tuple[int, ...]
    save_dtype: torch.dtype
    accelerator: Any


class LayerSkip:
    """Train the model's weights or adapters on them, so that its own early layers draft; write it as a new checkpoint.

    Attributes:
        module: what accelerate shall wrap.
        drop_probabilities: of every layer, at a step.
    """

    def __init__(self, start: Start) -> None:
        config, model = start.config, start.model
        self.start = start
        self.drop_probabilities = drop_probabilities(
            len(model.model.layers), config.layer_dropout, config.dropout_schedule
        )
        compute = torch.bfloat16 if start.accelerator.mixed_precision == "bf16" else torch.float32
        base = None
        if config.lora_rank:
            add_adapters(model, rank=config.lora_rank, alpha=config.lora_alpha, targets=config.lora_targets)
        elif config.freeze_embeddings:
            model.get_input_embeddings().requires_grad_(False)
            model.get_output_embeddings().requires_grad_(False)
        if (config.anchor_weight or config.anchor_data) and not config.lora_rank:
            base = frozen_copy(model, share_embeddings=config.freeze_embeddings, compute=compute)
            base.to(start.accelerator.device)
        widen(model, keep_frozen=model.dtype == start.save_dtype == compute)
        self.module: nn.Module = EarlyExitModule(
            model,
            exit_loss_weight=config.exit_loss_weight,
            exit_loss=config.exit_loss,
            exit_weights=config.exit_weights,
            anchor_weight=config.anchor_weight,
            base=base,
            gradient_checkpointing=config.gradient_checkpointing,
        )

    def prepare(self, training: Training, held_out: Sequences, progress: Progress) -> tuple[Training, Sequences]:
        """Return training and held-out sequences with all that the module reads."""
        return training, held_out

    def save(self, module: nn.Module, tokenizer: Any, output: Path, steps: int, options: dict[str, Any]) -> None:
        """Write what was trained. All ranks call this; the main one writes."""
        checkpoint.save_checkpoint(self.start.accelerator, module, tokenizer, output, self.start.save_dtype)


class FrozenHead:
    """Train a head on a model that stays as it is, and write the head beside the model's files.

    The target runs in its own dtype, or in fp32 where that is a bf16 that the CPU only emulates; its hidden states are
    rounded to its own dtype either way. Every rank holds all of it. Attributes as those of `LayerSkip`.
    """

    def __init__(self, start: Start) -> None:
        model, (exit_layer,) = start.model, start.exits
        self.start, self.exit_layer = start, exit_layer
        self.source = checkpoint.files_of(start.base)
        self.fingerprint = fingerprint(self.source)
        self.states_dtype = model.dtype
        self.drop_probabilities: list[float] = []
        model.requires_grad_(False).to(start.accelerator.device)
        head = ExitHead(model, exit_layer, torch.float32)
        target = EarlyExitModule(model.float() if widens(model) else model).eval()
        self.module: nn.Module = ExitHeadModule(
            target, head, states_dtype=self.states_dtype, exit_loss=start.config.exit_loss
        )

    def prepare(self, training: Training, held_out: Sequences, progress: Progress) -> tuple[Training, Sequences]:
        """Return training and held-out sequences, with the target's states if they are to be kept on disk."""
        directory = self.start.config.cache_targets
        if directory is None:
            return training, held_out
        assert isinstance(training, Sequences)
        both = [replace(data, states=self._states(directory, data, progress)) for data in (training, held_out)]
        assert isinstance(self.module, ExitHeadModule)
        self.module.release_target()
        return both[0], both[1]

    def save(self, module: nn.Module, tokenizer: Any, output: Path, steps: int, options: dict[str, Any]) -> None:
        """Complete `output` to a checkpoint with the target's own files, then write the head. All ranks call this."""
        start = self.start

        def write() -> None:
            if not start.accelerator.is_main_process:
                return
            checkpoint.link_files(self.source, output)
            if fingerprint(output) != self.fingerprint:
                raise UserError(f"the files of {self.source} changed while the head was trained", command="train anew")
            facts = HeadFacts(self.exit_layer, self.fingerprint, start.config.exit_loss, steps, options)
            head = start.accelerator.unwrap_model(module).head
            save_exit_head(output, head, facts, start.save_dtype)

        write_together(start.accelerator, write, output)

    def _states(self, directory: Path, data: Sequences, progress: Progress) -> torch.Tensor:
        assert isinstance(self.module, ExitHeadModule)
        return cached_states(
            directory,
            data,
            self.module.target_states,
            {"checkpoint_fingerprint": self.fingerprint, "exit_layer": self.exit_layer},
            hidden_size=self.module.head.norm.weight.shape[0],
            dtype=self.states_dtype,
            batch_size=self.start.config.batch_size,
            device=self.start.accelerator.device,
            progress=progress,
        )


METHODS: dict[str, type[LayerSkip] | type[FrozenHead]] = {"layer-skip": LayerSkip, "exit-head": FrozenHead}
