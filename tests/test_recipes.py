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
from selfspec_tune.train.options import check_options

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
    return [shlex.split(line) for line in header(path).splitlines() if line.startswith("selfspec ")]


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


def test_an_unknown_key_in_a_recipe_is_refused_with_a_suggestion(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("lerning_rate: 1.0\n")
    with pytest.raises(UserError, match=re.escape("did you mean 'learning_rate'")):
        build(TrainConfig, read_recipe(tmp_path / "bad.yaml"))
