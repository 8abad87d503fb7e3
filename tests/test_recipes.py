"""Every shipped recipe resolves, holds known keys only, and says in its header how to run it."""

from __future__ import annotations

import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest

from selfspec_tune.config import TrainConfig, build, field_types, parse_assignments, read_recipe
from selfspec_tune.errors import UserError
from selfspec_tune.train.options import check_options

RECIPES = Path(__file__).parent.parent / "recipes"
PATHS = sorted(RECIPES.glob("*.y*ml"))
FLAGS = {"model": "MODEL", "output": "DIR", "train_data": ["FILE.jsonl"]}


def header(path: Path) -> str:
    """Return the comment at the top, continued lines joined."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").strip())
    return "\n".join(lines).replace("\\\n", " ")


def commands(path: Path) -> list[list[str]]:
    return [shlex.split(line) for line in header(path).splitlines() if line.startswith("selfspec train ")]


def test_there_are_recipes_and_nothing_else_in_the_folder() -> None:
    assert PATHS
    assert {p.name for p in RECIPES.iterdir()} == {p.name for p in PATHS}


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.name)
def test_a_recipe_resolves_with_known_keys_and_values_that_work(path: Path) -> None:
    recipe = read_recipe(path)
    config = build(TrainConfig, recipe, FLAGS)
    check_options(config)
    for key, value in recipe.items():
        got = getattr(config, key)
        assert list(got) == value if isinstance(value, list) else got == value, key
    assert set(recipe) <= set(field_types(TrainConfig))
    assert not set(recipe) & {"model", "output", "train_data", "eval_data", "device"}, (
        "these belong on the command line"
    )


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.name)
def test_the_header_says_what_it_is_needs_and_how_to_run_and_override_it(path: Path) -> None:
    text = header(path)
    assert "What it is:" in text and "What it needs:" in text
    run, override, *_ = commands(path)
    for command in (run, override):
        assert command[2] == f"recipes/{path.name}"
        assert {"--model", "--output", "--train-data"} <= set(command)
        flags = [word.removeprefix("--").replace("-", "_") for word in command if word.startswith("--")]
        assert set(flags) - {"set"} <= set(field_types(TrainConfig))
    assignments = [after for word, after in pairwise(override) if word == "--set"]
    assert assignments
    changed = build(TrainConfig, read_recipe(path), parse_assignments(assignments), FLAGS)
    assert changed != build(TrainConfig, read_recipe(path), FLAGS)


def test_an_unknown_key_in_a_recipe_is_refused_with_a_suggestion(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("lerning_rate: 1.0\n")
    with pytest.raises(UserError, match=re.escape("did you mean 'learning_rate'")):
        build(TrainConfig, read_recipe(tmp_path / "bad.yaml"))
