"""`selfspec train`: which layer of options wins, and what is printed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from selfspec_tune.cli import train as command
from selfspec_tune.config import TrainConfig
from selfspec_tune.errors import UserError

FACTS: dict[str, Any] = {
    "steps": 3,
    "tokens": 1234,
    "seconds": 90.0,
    "alpha_before": {"6": 0.125, "10": 0.25},
    "alpha_after": {"6": 0.5, "10": 0.625},
    "perplexity_before": 8.5,
    "perplexity_after": 8.25,
}
NEEDED = ["--model", "m", "--output", "o", "--train-data", "t.jsonl"]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[TrainConfig]:
    """Replace the training by one that records its config."""
    monkeypatch.chdir(tmp_path)
    configs: list[TrainConfig] = []

    def pretend(config: TrainConfig, progress: Any) -> dict[str, Any]:
        configs.append(config)
        return FACTS

    monkeypatch.setattr("selfspec_tune.train.loop.train", pretend)
    return configs


def call(*arguments: str) -> Any:
    app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(command.train)
    return CliRunner().invoke(app, list(arguments))


def test_flags_win_over_set_over_recipe_over_defaults(seen: list[TrainConfig], tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("seed: 1\nbatch_size: 11\nmax_steps: 111\nexits: [2, 3]\n")
    result = call(
        str(recipe),
        *NEEDED,
        "--set",
        "batch_size=22",
        "--set",
        "max_steps=222",
        "--max-steps",
        "333",
        "--exits",
        "4,0.5",
    )
    assert result.exit_code == 0, result.output
    (config,) = seen
    assert (config.seed, config.batch_size, config.max_steps) == (1, 22, 333)
    assert config.exits == (4.0, 0.5) and config.sequence_length == 512
    assert config.train_data == ("t.jsonl",) and config.output == Path("o")


def test_the_table_shows_alpha_and_perplexity_before_and_after(seen: list[TrainConfig]) -> None:
    output = call(*NEEDED).stdout
    for text in ("exit 6", "0.125", "0.500", "exit 10", "0.625", "8.500", "8.250", "1,234 tokens", "1.5 minutes"):
        assert text in output, text


def test_json_is_one_object_on_stdout(seen: list[TrainConfig]) -> None:
    assert json.loads(call(*NEEDED, "--json").stdout) == FACTS


def test_a_finished_output_is_reported_without_training(
    seen: list[TrainConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("selfspec_tune.train.checkpoint.finished", lambda config: FACTS)
    result = call(*NEEDED, "--json")
    assert not seen
    assert json.loads(result.stdout) == FACTS
    assert "o is finished" in result.stderr


def test_mistakes_are_user_errors(seen: list[TrainConfig]) -> None:
    assert isinstance(call().exception, UserError)
    wrong = call(*NEEDED, "--set", "lerning_rate=1").exception
    assert isinstance(wrong, UserError) and "did you mean 'learning_rate'" in str(wrong)
    assert isinstance(call("missing.yaml", *NEEDED).exception, UserError)
    assert not seen


def test_help_names_every_option_and_shows_examples(seen: list[TrainConfig]) -> None:
    output = call("--help").stdout
    for text in ("Examples:", "recipes/demo.yaml", "--set", "--exit-loss-weight", "--max-minutes", "RECIPE"):
        assert text in output, text
