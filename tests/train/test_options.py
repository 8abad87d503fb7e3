"""Options of a run: ranges, those of the other method, and those that do nothing in a combination."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from selfspec_tune.config import TrainConfig, field_defaults
from selfspec_tune.errors import UserError
from selfspec_tune.train.options import IDLE, OF_LAYER_SKIP, check_options, idle_options

CONFIG = TrainConfig(model="m", output=Path("o"), train_data=("t.jsonl",))
# option and the value it is given → others that leave it nothing to do, others with which it has an effect
ROWS: list[tuple[str, Any, dict[str, Any], dict[str, Any]]] = [
    ("lora_alpha", 8.0, {}, {"lora_rank": 4}),
    ("lora_targets", ("q_proj",), {}, {"lora_rank": 4}),
    ("freeze_embeddings", True, {"lora_rank": 4}, {}),
    ("dropout_schedule", "uniform", {"layer_dropout": 0.0}, {"layer_dropout": 0.1}),
    ("exits_per_step", 2, {"exits": (0.5,)}, {"exits": (0.3, 0.5)}),
    ("exit_curriculum", "gradual", {"exits": (0.5,)}, {"exits": (0.3, 0.5)}),
    ("exit_weights", "linear", {"exits_per_step": 1}, {"exits_per_step": 2}),
    ("exits_per_step", 2, {"exit_loss_weight": 0.0}, {"exit_loss_weight": 0.1}),
    ("exit_curriculum", "gradual", {"exit_loss_weight": 0.0}, {"exit_loss_weight": 0.1}),
    ("exit_weights", "linear", {"exit_loss_weight": 0.0, "exits_per_step": 2}, {"exits_per_step": 2}),
    ("exit_loss", "tv", {"exit_loss_weight": 0.0}, {"exit_loss_weight": 0.1}),
    ("anchor_batch_size", 2, {}, {"anchor_data": ("general.txt",)}),
    ("anchor_data_weight", 0.5, {}, {"anchor_data": ("general.txt",)}),
    ("over_budget", "lower", {"exit_loss_weight": 0.0}, {"exit_loss_weight": 0.1}),
    ("anchor_weight", 0.5, {"exit_loss_weight": 1.0}, {"exit_loss_weight": 0.9}),
]


def test_every_row_of_the_table_is_tested() -> None:
    assert [row.name for row in IDLE] == [name for name, *_ in ROWS]


@pytest.mark.parametrize("number", range(len(ROWS)), ids=[f"{n}-{row[0]}" for n, row in enumerate(ROWS)])
def test_an_option_without_effect_is_named_with_the_reason(number: int) -> None:
    name, value, idle, busy = ROWS[number]
    asleep, awake = replace(CONFIG, **{name: value}, **idle), replace(CONFIG, **{name: value}, **busy)
    (said,) = [text for text in idle_options(asleep) if text.startswith(f"--{name.replace('_', '-')} ")]
    assert said.endswith(IDLE[number].why) and "has no effect" in said
    assert idle_options(awake) == []
    check_options(asleep)  # a warning, no error


def test_an_option_at_its_default_is_not_warned_of() -> None:
    assert idle_options(CONFIG) == []
    assert idle_options(replace(CONFIG, layer_dropout=0.0, exit_loss_weight=0.0, exits=(0.5,))) == []


def test_an_option_is_named_once_though_two_reasons_hold() -> None:
    said = idle_options(replace(CONFIG, exits=(0.5,), exit_loss_weight=0.0, exits_per_step=2))
    assert len(said) == 1 and "--exits-per-step" in said[0]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"lora_rank": -1}, "lora_rank"),
        ({"lora_alpha": 0.0}, "lora_alpha"),
        ({"lora_rank": 4, "lora_targets": ()}, "lora_targets"),
        ({"anchor_weight": 1.1}, "anchor_weight"),
        ({"anchor_weight": -0.1}, "anchor_weight"),
        ({"max_perplexity_increase": "2"}, "max_perplexity_increase"),
        ({"max_perplexity_increase": "-1%"}, "max_perplexity_increase"),
        ({"exit_loss_weight": float("nan")}, "exit_loss_weight"),
        ({"learning_rate": float("nan")}, "learning_rate"),
        ({"save_every": 0}, "save_every"),
        ({"weight_decay": -1.0}, "weight_decay"),
    ],
)
def test_values_out_of_range_are_user_errors(options: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError) as caught:
        check_options(replace(CONFIG, **options))
    assert named in str(caught.value)


CHANGED = {
    "anchor_batch_size": 2,
    "anchor_data": ("general.txt",),
    "anchor_data_weight": 0.5,
    "anchor_weight": 0.5,
    "dropout_schedule": "uniform",
    "exit_curriculum": "gradual",
    "exit_loss_weight": 0.1,
    "exit_weights": "linear",
    "exits_per_step": 2,
    "freeze_embeddings": True,
    "general_data": ("g.txt",),
    "gradient_checkpointing": True,
    "layer_dropout": 0.2,
    "lora_alpha": 8.0,
    "lora_rank": 4,
    "lora_targets": ("q_proj",),
    "max_perplexity_increase": "5%",
    "over_budget": "lower",
}


@pytest.mark.parametrize("name", OF_LAYER_SKIP)
def test_what_only_layer_skip_has_is_refused_for_a_head(name: str) -> None:
    assert CHANGED[name] != field_defaults(TrainConfig)[name]
    with pytest.raises(UserError, match=name):
        check_options(replace(CONFIG, method="exit-head", **{name: CHANGED[name]}))


@pytest.mark.parametrize("tracker", ["wandb", "tensorboard"])
def test_a_tracker_without_its_package_is_a_user_error(tracker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selfspec_tune.train.options.importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=f"pip install {tracker}"):
        check_options(replace(CONFIG, tracker=tracker))


def test_the_states_of_a_stream_are_not_kept() -> None:
    head = replace(CONFIG, method="exit-head", cache_targets=Path("c"))
    check_options(head)
    with pytest.raises(UserError, match="cannot be kept"):
        check_options(replace(head, streaming=True))
