"""Options: every field has help, layers win in order, bad keys and values are user errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from selfspec_tune import config
from selfspec_tune.config import DecodeConfig, DraftVocabConfig, RegressConfig, SweepConfig, TrainConfig
from selfspec_tune.errors import UserError

CONFIGS = [DecodeConfig, DraftVocabConfig, RegressConfig, SweepConfig, TrainConfig, config.CheckConfig]


@pytest.mark.parametrize("cls", CONFIGS)
def test_every_option_has_help_of_its_own(cls):
    texts = config.field_help(cls)
    assert set(texts) == set(config.field_types(cls))
    assert all(text.endswith(".") or text.endswith(")") for text in texts.values())
    assert len(set(texts.values())) == len(texts)


def test_later_layers_win_and_values_take_the_fields_type():
    built = config.build(TrainConfig, {"learning-rate": "1e-3", "exits": [2, 0.5]}, {"learning_rate": 2e-3})
    assert built.learning_rate == 2e-3 and built.exits == (2.0, 0.5)
    assert config.build(TrainConfig, {"exits": "6,10", "output": "x"}).output == Path("x")
    assert config.build(TrainConfig, {"train_data": "a,b.txt"}).train_data == ("a,b.txt",)
    assert config.build(SweepConfig, {"window": "0.1,0.6"}).window == (0.1, 0.6)


@pytest.mark.parametrize(
    "layer, message",
    [
        ({"learning_rat": 1}, "did you mean 'learning_rate'"),
        ({"max_steps": "many"}, "max_steps is not a valid int"),
        ({"max_steps": 3.7}, "max_steps is a whole number"),
        ({"max_steps": True}, "max_steps is a whole number"),
        ({"max_steps": None}, "max_steps needs a value"),
        ({"exit_loss": "kll"}, "exit_loss has no such value"),
        ({"freeze_embeddings": "yes"}, "freeze_embeddings is a switch"),
        ({"exits": "6,ten"}, "exits is not a valid float"),
    ],
)
def test_bad_keys_and_values(layer, message):
    with pytest.raises(UserError, match=message):
        config.build(TrainConfig, layer)


def test_assignments_are_read_as_yaml():
    parsed = config.parse_assignments(["a=1", "b=[1, 2]", "c=x=y"])
    assert parsed == {"a": 1, "b": [1, 2], "c": "x=y"}
    for bad in ("a", "a=[1"):
        with pytest.raises(UserError, match="--set"):
            config.parse_assignments([bad])


def test_recipes_that_are_none(tmp_path):
    for content in (b"- a\n", b"a: [1\n", b"\xff\xfe"):
        path = tmp_path / "recipe.yaml"
        path.write_bytes(content)
        with pytest.raises(UserError, match="recipe"):
            config.read_recipe(path)
    with pytest.raises(UserError, match="does not exist"):
        config.read_recipe(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("text", "value"), [("2%", 0.02), ("0.02", 0.02), (" 0.5 % ", 0.005), ("0", 0.0), ("150%", 1.5)]
)
def test_an_increase_is_read(text, value):
    assert config.parse_share("max_perplexity_increase", text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["", "%", "two", "-1%", "-0.01", "nan", "nan%", "inf", "inf%", "2", "2%%", "0,02"])
def test_a_bad_increase_is_refused(text):
    with pytest.raises(UserError, match="max_perplexity_increase"):
        config.parse_share("max_perplexity_increase", text)
