"""`selfspec train`: which layer of options wins, what is printed, and what the exit code says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from selfspec_tune.cli import train as command
from selfspec_tune.cli.train_view import RunView
from selfspec_tune.config import TrainConfig, build, read_recipe
from selfspec_tune.errors import UserError
from selfspec_tune.progress import Progress, Report


def estimate(score: float) -> dict[str, Any]:
    return {"speedup_model": score, "exit_layer": 6, "num_draft_tokens": 3, "alpha": 0.5, "cost_ratio": 0.4}


FACTS: dict[str, Any] = {
    "steps": 3,
    "stopped_by": "max_steps",
    "best_step": 3,
    "improved": True,
    "tokens": 1234,
    "seconds": 90.0,
    "alpha_before": {"6": 0.125, "10": 0.25},
    "alpha_after": {"6": 0.5, "10": 0.625},
    "perplexity_before": 8.5,
    "perplexity_after": 8.25,
    "general_perplexity_before": 19.75,
    "general_perplexity_after": 20.0,
    "speedup_estimate_before": estimate(0.75),
    "speedup_estimate_after": estimate(1.25),
}
RECORDS: list[dict[str, Any]] = [
    {
        "step": 0,
        "perplexity": 8.5,
        "general_perplexity": 20.0,
        "alpha": {"6": 0.125, "10": 0.25},
        "speedup_estimate": estimate(0.75),
    },
    {
        "step": 10,
        "loss": 2.5,
        "losses": {"final": 2.0, "6": 3.0},
        "running_alpha": {"6": 0.375},
        "tokens_per_second": 512.4,
        "seconds": 20.0,
    },
    {
        "step": 10,
        "perplexity": 8.25,
        "general_perplexity": 20.2,
        "alpha": {"6": 0.5, "10": 0.625},
        "speedup_estimate": estimate(1.25),
        "perplexity_increase": {"held_out": -0.029, "general": 0.01},
        "within_budget": True,
    },
    {"notice": "something to know"},
]
NEEDED = ["--model", "m", "--output", "o", "--train-data", "t.jsonl"]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[TrainConfig]:
    """Replace the training by one that records its config."""
    monkeypatch.chdir(tmp_path)
    configs: list[TrainConfig] = []

    def pretend(config: TrainConfig, progress: Progress, report: Report) -> dict[str, Any]:
        configs.append(config)
        for record in RECORDS:
            report(record)
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
    for text in (
        "exit 6",
        "0.125",
        "0.500",
        "exit 10",
        "0.625",
        "8.500",
        "8.250",
        "19.750",
        "20.000",
        "1.25",
        "1,234 tokens",
        "1.5 minutes",
    ):
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


def test_a_pipe_gets_plain_lines_on_stderr(seen: list[TrainConfig]) -> None:
    lines = call(*NEEDED, "--json").stderr.splitlines()
    assert lines == [
        "step 0/100: perplexity held-out 8.500, perplexity general 20.000, alpha 6: 0.12, 10: 0.25, "
        "speed-up 0.75 at exit 6, k = 3 (estimate)",
        "step 10/100: perplexity held-out 8.250 (-2.9% over the base), perplexity general 20.200 (+1.0% over the "
        "base), alpha 6: 0.50 (base 0.12), 10: 0.62 (base 0.25), speed-up 1.25 at exit 6, k = 3 (estimate; base 0.75), "
        "512 tokens/s, 3 min left",
        "something to know",
    ]


def test_ranks_but_the_first_say_nothing(seen: list[TrainConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    result = call(*NEEDED, "--lora-alpha", "8")
    assert (result.stdout, result.stderr, result.exit_code) == ("", "", 0)


def test_a_step_gets_a_line_every_quarter_of_a_minute() -> None:
    view, step = RunView(TrainConfig(max_steps=100, max_minutes=1.0)), RECORDS[1]
    assert view.take(step, now=100.0) == "step 10/100: loss 2.500, 512 tokens/s, 40 s left"
    assert view.take(step, now=114.0) is None
    assert view.take(step, now=115.0) is not None


def test_the_live_table_shows_what_is_known() -> None:
    view = RunView(TrainConfig(max_steps=100))
    assert view.rows() == []
    for record in RECORDS:
        view.take(record, now=0.0)
    rows = dict(view.rows())
    assert rows["loss"] == "2.500" and rows["accepted in training"] == "6: 0.38"
    assert rows["alpha per exit"] == "6: 0.50 (base 0.12), 10: 0.62 (base 0.25)"
    assert rows["best within budget"] == "step 10, 1.25" and rows["pace"] == "512 tokens/s, 3 min left"
    view.take({**RECORDS[2], "step": 20, "within_budget": False, "speedup_estimate": estimate(2.0)}, now=0.0)
    assert dict(view.rows())["best within budget"] == "step 10, 1.25"


@pytest.mark.parametrize(
    ("changes", "code", "said"),
    [
        ({}, 0, ""),
        ({"best_step": 2}, 0, "saved are the weights of step 2"),
        ({"share_kept": 0.75}, 0, "beyond 2% at the end: 75% of what was trained is kept"),
        ({"stopped_by": "diverged", "best_step": 2}, 2, "the loss or its gradient was not finite"),
        ({"improved": False}, 0, "training has bought nothing"),
        ({"best_step": None, "improved": False}, 1, "nothing is saved: no evaluation kept perplexity within 2%"),
    ],
)
@pytest.mark.parametrize("again", [False, True])
def test_the_exit_code_says_whether_it_was_worth_it(
    seen: list[TrainConfig], monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], code: int, said: str, again: bool
) -> None:
    facts = {**FACTS, **changes}
    monkeypatch.setattr("selfspec_tune.train.loop.train", lambda *_: facts)
    if again:
        monkeypatch.setattr("selfspec_tune.train.checkpoint.finished", lambda config: facts)
    result = call(*NEEDED, "--json")
    assert result.exit_code == code and said in result.stderr
    assert json.loads(result.stdout) == facts
    shown = call(*NEEDED).stdout
    assert ("after, not saved" in shown) == (facts["best_step"] is None) == ("next:" not in shown)


def test_facts_of_an_older_run_are_shown(seen: list[TrainConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    older = {
        name: value for name, value in FACTS.items() if not name.startswith(("best", "imp", "gen", "speed", "stop"))
    }
    monkeypatch.setattr("selfspec_tune.train.checkpoint.finished", lambda config: older)
    result = call(*NEEDED)
    assert result.exit_code == 0 and "8.250" in result.stdout


def test_an_option_without_effect_is_warned_of(seen: list[TrainConfig]) -> None:
    result = call(*NEEDED, "--lora-alpha", "8", "--json")
    assert "warning: --lora-alpha has no effect without --lora-rank" in result.stderr
    assert json.loads(result.stdout) == FACTS and len(seen) == 1


def test_print_config_is_a_recipe_that_names_the_source_of_each_value(seen: list[TrainConfig], tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("seed: 1\nbatch-size: 11\nlearning_rate: 3.0e-05\nmixed_precision: 'no'\n")
    given = (str(recipe), "--model", "a: b # c", "--set", "seed=5", "--exits", "4,0.5", "--max-minutes", "1.5")
    result = call(*given, "--train-data", "x, y.txt", "--train-data", "z.txt", "--print-config")
    assert result.exit_code == 0 and not seen
    lines = dict(line.split(": ", 1) for line in result.stdout.splitlines())
    assert lines["seed"] == "5  # --set" and lines["exits"] == "[4.0, 0.5]  # flag"
    assert lines["batch_size"] == f"11  # recipe {recipe}" and lines["warmup_steps"] == "10  # default"
    printed = tmp_path / "printed.yaml"
    printed.write_text(result.stdout)
    wanted = {"seed": 5, "batch_size": 11, "learning_rate": 3e-5, "mixed_precision": "no", "model": "a: b # c"}
    wanted |= {"exits": (4.0, 0.5), "max_minutes": 1.5, "train_data": ("x, y.txt", "z.txt")}
    assert build(TrainConfig, read_recipe(printed)) == TrainConfig(**wanted)


def test_print_config_needs_nothing_and_is_one_object_with_json(seen: list[TrainConfig]) -> None:
    values = json.loads(call("--print-config", "--json").stdout)
    assert values["model"] is None and values["exits"] == [0.2, 0.33, 0.5, 0.7]
    wrong = call("--print-config", "--set", "lerning_rate=1").exception
    assert isinstance(wrong, UserError) and "did you mean 'learning_rate'" in str(wrong)


def test_an_anchor_says_what_its_copy_takes_where_there_is_one(seen: list[TrainConfig], tiny: Path) -> None:
    given = ["--model", str(tiny), "--output", "o", "--train-data", "t.jsonl", "--device", "cpu"]
    given += ["--anchor-weight", "0.5", "--mixed-precision", "no"]
    # 4 layers of 7,744 weights, a norm of 32 and 288 tied embeddings of 32, 4 bytes each.
    assert "frozen copy of the base on every device, 0.00016 GB" in call(*given).stderr
    assert "frozen copy of the base on every device, 0.00012 GB" in call(*given, "--freeze-embeddings").stderr
    assert "frozen copy" not in call(*given, "--lora-rank", "2").stderr and len(seen) == 3
