"""What options of a training run must satisfy before anything heavy is loaded, and which of them mean nothing."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

from selfspec_tune.config import TrainConfig, field_defaults, flag, parse_share
from selfspec_tune.errors import UserError

AT_LEAST_ONE = (
    "batch_size",
    "gradient_accumulation",
    "max_steps",
    "exits_per_step",
    "eval_every",
    "eval_sequences",
    "save_every",
    "anchor_batch_size",
)

OF_LAYER_SKIP = (
    "anchor_batch_size",
    "anchor_data",
    "anchor_data_weight",
    "anchor_weight",
    "dropout_schedule",
    "exit_curriculum",
    "exit_loss_weight",
    "exit_weights",
    "exits_per_step",
    "freeze_embeddings",
    "general_data",
    "gradient_checkpointing",
    "layer_dropout",
    "lora_alpha",
    "lora_rank",
    "lora_targets",
    "max_perplexity_increase",
    "over_budget",
)
"""Options that mean nothing to a head on a frozen model."""


@dataclass(frozen=True)
class Idle:
    """An option that has no effect where another stands as it does.

    Attributes:
        name: of the option.
        when: whether the others leave it nothing to do; asked only if it is not at its default.
        why: half a sentence, after "has no effect".
    """

    name: str
    when: Callable[[TrainConfig], bool]
    why: str


def _trains_no_exit(config: TrainConfig) -> bool:
    return config.method == "layer-skip" and config.exit_loss_weight == 0


def _cannot_lower(config: TrainConfig) -> bool:
    return _trains_no_exit(config) and config.over_budget == "lower"


IDLE = (
    Idle("lora_alpha", lambda c: c.lora_rank == 0, "without --lora-rank"),
    Idle("lora_targets", lambda c: c.lora_rank == 0, "without --lora-rank"),
    Idle("freeze_embeddings", lambda c: c.lora_rank > 0, "with --lora-rank: only adapters are trained"),
    Idle("dropout_schedule", lambda c: c.layer_dropout == 0, "with --layer-dropout 0"),
    Idle("exits_per_step", lambda c: len(c.chosen_exits) == 1, "with one exit"),
    Idle("exit_curriculum", lambda c: len(c.chosen_exits) == 1, "with one exit"),
    Idle("exit_weights", lambda c: min(c.exits_per_step, len(c.chosen_exits)) == 1, "with one exit a step"),
    Idle("exits_per_step", _trains_no_exit, "with --exit-loss-weight 0: no exit is trained"),
    Idle("exit_curriculum", _trains_no_exit, "with --exit-loss-weight 0: no exit is trained"),
    Idle("exit_weights", _trains_no_exit, "with --exit-loss-weight 0: no exit is trained"),
    Idle("exit_loss", _trains_no_exit, "with --exit-loss-weight 0: no exit is trained"),
    Idle("anchor_batch_size", lambda c: not c.anchor_data, "without --anchor-data"),
    Idle("anchor_data_weight", lambda c: not c.anchor_data, "without --anchor-data"),
    Idle("over_budget", _cannot_lower, "with --exit-loss-weight 0: the exits' share cannot be lowered"),
    Idle("anchor_weight", lambda c: c.exit_loss_weight == 1, "with --exit-loss-weight 1: the final layer has no share"),
)
"""Options that do nothing in a combination that is allowed. Those of the other method are errors."""


def idle_options(config: TrainConfig) -> list[str]:
    """Return a sentence for every option that was changed and has no effect in this combination, one each."""
    defaults = field_defaults(TrainConfig)
    found: dict[str, str] = {}
    for row in IDLE:
        if row.name not in found and getattr(config, row.name) != defaults[row.name] and row.when(config):
            found[row.name] = f"{flag(row.name)} has no effect {row.why}"
    return list(found.values())


def check_options(config: TrainConfig) -> None:
    """Raise a UserError for a missing option or a value that cannot work, naming the flag."""
    for name, example in (("model", "DIR_OR_HUB_NAME"), ("output", "DIR"), ("train_data", "FILE.jsonl")):
        if not getattr(config, name):
            raise UserError(f"training needs {flag(name)}", command=f"selfspec train {flag(name)} {example}")
    for name in AT_LEAST_ONE:
        _check(name, getattr(config, name), getattr(config, name) >= 1, "1 or more")
    _check("sequence_length", config.sequence_length, config.sequence_length >= 2, "2 or more")
    for name in ("warmup_steps", "weight_decay", "lora_rank"):
        _check(name, getattr(config, name), getattr(config, name) >= 0, "0 or more")
    for name in ("learning_rate", "max_grad_norm", "lora_alpha", "anchor_data_weight"):
        _check(name, getattr(config, name), getattr(config, name) > 0, "above 0")
    for name in ("exit_loss_weight", "anchor_weight"):
        _check(name, getattr(config, name), 0 <= getattr(config, name) <= 1, "0..1")
    _check("layer_dropout", config.layer_dropout, 0 <= config.layer_dropout < 1, "0 or more, below 1")
    _check("max_minutes", config.max_minutes, config.max_minutes is None or config.max_minutes > 0, "above 0")
    _check("lora_targets", "none", bool(config.lora_targets) or not config.lora_rank, "one name or more")
    parse_share("max_perplexity_increase", config.max_perplexity_increase)
    _check_method(config)
    if config.tracker != "none" and importlib.util.find_spec(config.tracker) is None:
        raise UserError(
            f"--tracker {config.tracker} needs the package {config.tracker}", command=f"pip install {config.tracker}"
        )


def _check_method(config: TrainConfig) -> None:
    """Raise a UserError for an option that the other method has."""
    if config.method == "layer-skip":
        idle = ["cache_targets"] if config.cache_targets is not None else []
    else:
        idle = [name for name in OF_LAYER_SKIP if getattr(config, name) != field_defaults(TrainConfig)[name]]
        if len(config.chosen_exits) != 1:
            got = ", ".join(f"{given:g}" for given in config.chosen_exits)
            raise UserError("a head is trained for one exit", got=got, allowed="one", command="--exits 0.33")
    if config.cache_targets is not None and config.streaming:
        raise UserError("the states of streamed data cannot be kept", got="cache_targets and streaming", allowed="one")
    if idle:
        got = ", ".join(f"{name} = {getattr(config, name)}" for name in idle)
        raise UserError(f"{', '.join(idle)} has no meaning with --method {config.method}", got=got)


def _check(name: str, value: object, good: bool, allowed: str) -> None:
    if not good:
        raise UserError(f"{name} is out of range", got=value, allowed=allowed)
