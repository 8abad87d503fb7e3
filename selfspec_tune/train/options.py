"""What options of a training run must satisfy before anything heavy is loaded."""

from __future__ import annotations

import importlib.util

from selfspec_tune.config import TrainConfig
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


def check_options(config: TrainConfig) -> None:
    """Raise a UserError for a missing option or a value that cannot work, naming the flag."""
    for name, example in (("model", "DIR_OR_HUB_NAME"), ("output", "DIR"), ("train_data", "FILE.jsonl")):
        if not getattr(config, name):
            flag = "--" + name.replace("_", "-")
            raise UserError(f"training needs {flag}", command=f"selfspec train {flag} {example}")
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
    if config.wandb and importlib.util.find_spec("wandb") is None:
        raise UserError("--wandb needs the package wandb", command="pip install wandb")


def _check(name: str, value: object, good: bool, allowed: str) -> None:
    if not good:
        raise UserError(f"{name} is out of range", got=value, allowed=allowed)
