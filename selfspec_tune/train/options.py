"""What options of a training run must satisfy before anything heavy is loaded."""

from __future__ import annotations

import importlib.util

from selfspec_tune.config import TrainConfig, field_defaults, flag
from selfspec_tune.errors import UserError

AT_LEAST_ONE = (
    "batch_size",
    "gradient_accumulation",
    "max_steps",
    "exits_per_step",
    "eval_every",
    "eval_sequences",
    "save_every",
)

OF_LAYER_SKIP = ("exits_per_step", "exit_loss_weight", "layer_dropout", "freeze_embeddings", "gradient_checkpointing")
"""Options that mean nothing to a head on a frozen model."""


def check_options(config: TrainConfig) -> None:
    """Raise a UserError for a missing option or a value that cannot work, naming the flag."""
    for name, example in (("model", "DIR_OR_HUB_NAME"), ("output", "DIR"), ("train_data", "FILE.jsonl")):
        if not getattr(config, name):
            raise UserError(f"training needs {flag(name)}", command=f"selfspec train {flag(name)} {example}")
    for name in AT_LEAST_ONE:
        _check(name, getattr(config, name), getattr(config, name) >= 1, "1 or more")
    _check("sequence_length", config.sequence_length, config.sequence_length >= 2, "2 or more")
    _check("warmup_steps", config.warmup_steps, config.warmup_steps >= 0, "0 or more")
    _check("learning_rate", config.learning_rate, config.learning_rate > 0, "above 0")
    _check("weight_decay", config.weight_decay, config.weight_decay >= 0, "0 or more")
    _check("max_grad_norm", config.max_grad_norm, config.max_grad_norm > 0, "above 0")
    _check("exit_loss_weight", config.exit_loss_weight, 0 <= config.exit_loss_weight <= 1, "0..1")
    _check("layer_dropout", config.layer_dropout, 0 <= config.layer_dropout < 1, "0 or more, below 1")
    _check("max_minutes", config.max_minutes, config.max_minutes is None or config.max_minutes > 0, "above 0")
    _check_method(config)
    if config.tracker == "wandb" and importlib.util.find_spec("wandb") is None:
        raise UserError("--tracker wandb needs the package wandb", command="pip install wandb")


def _check_method(config: TrainConfig) -> None:
    """Raise a UserError for an option that the other method has."""
    if config.method == "layer-skip":
        idle = ["cache_targets"] if config.cache_targets is not None else []
    else:
        idle = [name for name in OF_LAYER_SKIP if getattr(config, name) != field_defaults(TrainConfig)[name]]
        if len(config.chosen_exits) != 1:
            got = ", ".join(f"{given:g}" for given in config.chosen_exits)
            raise UserError("a head is trained for one exit", got=got, allowed="one", command="--exits 0.33")
    if idle:
        got = ", ".join(f"{name} = {getattr(config, name)}" for name in idle)
        raise UserError(f"{', '.join(idle)} has no meaning with --method {config.method}", got=got)


def _check(name: str, value: object, good: bool, allowed: str) -> None:
    if not good:
        raise UserError(f"{name} is out of range", got=value, allowed=allowed)
