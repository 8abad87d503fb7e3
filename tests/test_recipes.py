"""Every shipped recipe resolves, holds known keys only, and says in its header how to run it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from selfspec_tune.config import (
    RegressConfig,
    TrainConfig,
    build,
    field_types,
    parse_assignments,
    parse_share,
    read_recipe,
)
from selfspec_tune.errors import UserError
from selfspec_tune.model.families import describe
from selfspec_tune.train.lora import add_adapters
from selfspec_tune.train.options import check_options, idle_options
from selfspec_tune.train.schedule import resolve_exits

RECIPES = Path(__file__).parent.parent / "recipes"
PATHS = sorted(RECIPES.glob("*.y*ml"))


@dataclass(frozen=True)
class Command:
    """How a command takes a recipe: its options, what belongs on the command line, what all examples must give."""

    config: type
    recipe_after: str
    flags: dict[str, Any]
    not_in_recipe: set[str]
    check: Callable[[Any], object]


COMMANDS = {
    "train": Command(
        TrainConfig,
        "train",
        {"model": "MODEL", "output": "DIR", "train_data": ["FILE.jsonl"]},
        {"model", "output", "train_data", "eval_data", "device"},
        check_options,
    ),
    "regress": Command(
        RegressConfig,
        "--config",
        {"base": "MODEL", "text": ["FILE.jsonl"], "prompts": "FILE.jsonl"},
        {"base", "text", "prompts", "report", "device"},
        lambda config: parse_share("max_perplexity_increase", config.max_perplexity_increase),
    ),
}


def header(path: Path) -> str:
    """Return the comment at the top, continued lines joined."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").strip())
    return "\n".join(lines).replace("\\\n", " ")


def commands(path: Path) -> list[list[str]]:
    """Return the header's commands; those started through accelerate as if they were not."""
    lines = [re.sub("^accelerate launch .* -m selfspec_tune ", "selfspec ", line) for line in header(path).splitlines()]
    return [shlex.split(line) for line in lines if line.startswith("selfspec ")]


def command_of(path: Path) -> Command:
    """Return the command that a recipe is for, which its header names first."""
    return COMMANDS[commands(path)[0][1]]


def test_there_are_recipes_and_nothing_else_in_the_folder() -> None:
    assert PATHS
    assert {p.name for p in RECIPES.iterdir()} == {p.name for p in PATHS}


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.name)
def test_a_recipe_resolves_with_known_keys_and_values_that_work(path: Path) -> None:
    recipe = read_recipe(path)
    command = command_of(path)
    config = build(command.config, recipe, command.flags)
    command.check(config)
    for key, value in recipe.items():
        got = getattr(config, key)
        assert list(got) == value if isinstance(value, list) else got == value, key
    assert set(recipe) <= set(field_types(command.config))
    assert not set(recipe) & command.not_in_recipe, "these belong on the command line"


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.name)
def test_the_header_says_what_it_is_needs_and_how_to_run_and_override_it(path: Path) -> None:
    text = header(path)
    assert "What it is:" in text and "What it needs:" in text
    command, (run, override, *_) = command_of(path), commands(path)
    for words in (run, override):
        assert COMMANDS[words[1]] is command, "all examples are of one command"
        assert words[words.index(command.recipe_after) + 1] == f"recipes/{path.name}"
        flags = {word.removeprefix("--").replace("-", "_") for word in words if word.startswith("--")}
        assert set(command.flags) <= flags <= set(field_types(command.config)) | {"set", "config"}
    given = {
        word.removeprefix("--").replace("-", "_"): value
        for word, value in pairwise(override)
        if word.startswith("--") and word not in ("--set", "--config") and not value.startswith("--")
    }
    assignments = [after for word, after in pairwise(override) if word == "--set"]
    changes = {**parse_assignments(assignments), **{k: v for k, v in given.items() if k not in command.not_in_recipe}}
    assert changes, "the second example overrides something"
    assert build(command.config, read_recipe(path), changes) != build(command.config, read_recipe(path))


# What the models of the recipes are like, from their config.json files.
MODELS: dict[str, dict[str, Any]] = {
    "SmolLM2-135M": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    "Llama-3.2-1B": {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
    "Llama-3.1-8B": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    },
}


@pytest.mark.parametrize("path", [p for p in PATHS if commands(p)[0][1] == "train"], ids=lambda path: path.name)
def test_a_training_recipe_fits_the_model_it_names(path: Path) -> None:
    """Its exits are layers, its sequences fit the context, its adapters find their matrices: no weights are needed."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    (name,) = (name for name in MODELS if name in header(path))
    of_model = AutoConfig.for_model("llama", **MODELS[name])
    family = describe(of_model)
    recipe = build(TrainConfig, read_recipe(path), COMMANDS["train"].flags)
    assert recipe.sequence_length <= family.max_context
    exits = resolve_exits(recipe.chosen_exits, family.num_layers)
    assert recipe.exits_per_step <= len(exits)
    assert not idle_options(recipe)
    if recipe.lora_rank:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(of_model)
            add_adapters(model, rank=recipe.lora_rank, alpha=recipe.lora_alpha, targets=recipe.lora_targets)
        trained = [parameter.numel() for parameter in model.parameters() if parameter.requires_grad]
        assert len(trained) == 2 * 7 * family.num_layers


def test_an_unknown_key_in_a_recipe_is_refused_with_a_suggestion(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("lerning_rate: 1.0\n")
    with pytest.raises(UserError, match=re.escape("did you mean 'learning_rate'")):
        build(TrainConfig, read_recipe(tmp_path / "bad.yaml"))
