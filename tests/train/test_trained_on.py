"""A run leaves hashes of what it was trained on beside the checkpoint, and sweep-exit warns of such prompts."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from selfspec_tune.artifact import fingerprint
from selfspec_tune.config import PromptConfig, RegressConfig, TrainConfig
from selfspec_tune.decode.prompts import prompt_text
from selfspec_tune.errors import UserError
from selfspec_tune.regress import report
from selfspec_tune.train.data import load_sequences
from selfspec_tune.train.loop import train
from selfspec_tune.trained_on import FILE_NAME, Overlap, overlap

Make = Callable[..., TrainConfig]


class Killed(Exception):
    """Stands for the process dying."""


def texts(file: Path) -> list[str]:
    return [json.loads(line)["text"] for line in file.read_text().splitlines()]


def kill_at(number: int) -> Callable[[str, int, int], None]:
    def progress(stage: str, done: int, total: int) -> None:
        if stage == "train" and done == number:
            raise Killed

    return progress


@pytest.fixture(scope="session")
def trained(tiny: Path, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, trained on all records of the corpus."""
    output = tmp_path_factory.mktemp("trained")
    train(
        TrainConfig(
            model=str(tiny),
            output=output,
            train_data=(str(corpus / "train.jsonl"), str(corpus / "heldout.jsonl")),
            eval_data=(str(corpus / "heldout.jsonl"),),
            device="cpu",
            sequence_length=48,
            batch_size=8,
            max_steps=40,
            exits=(1, 2),
            eval_sequences=4,
        )
    )
    return output


def test_what_was_trained_on_is_in_the_file_and_what_was_held_out_is_not(trained: Path, corpus: Path) -> None:
    # The held-out file was among the training data too, and records of it were taken out again.
    seen, held_out = texts(corpus / "train.jsonl"), texts(corpus / "heldout.jsonl")
    assert overlap(trained, seen) == Overlap(len(seen), len(seen))
    assert overlap(trained, held_out) == Overlap(0, len(held_out))


def test_records_held_out_of_the_training_data_are_not_in_the_file(
    make_config: Make, corpus: Path, tokenizer: Any
) -> None:
    config = make_config(eval_data=(), max_steps=40, batch_size=8)
    train(config)
    _, evaluation = load_sequences(config.train_data, (), tokenizer, length=48, num_train=1, num_eval=1000)
    held_out = {record.text for record in evaluation.records}
    assert held_out
    output = Path(str(config.output))
    assert overlap(output, sorted(held_out)) == Overlap(0, len(held_out))
    rest = [text for text in texts(corpus / "train.jsonl") if text not in held_out]
    found = overlap(output, rest)
    assert found is not None and found.found >= len(rest) - 1  # the end of the last one fills no sequence


def test_only_records_that_were_drawn_are_in_the_file(make_config: Make, corpus: Path, tokenizer: Any) -> None:
    config = make_config(max_steps=2)
    train(config)
    training, _ = load_sequences(config.train_data, config.eval_data, tokenizer, length=48, num_train=4, num_eval=1)
    # 4 sequences of 48 bytes, of records of about 90: each holds parts of one or two.
    drawn = {record.text for record in training.records}
    assert 3 <= len(drawn) <= 8
    shown = "".join(tokenizer.decode(row) for row in training.ids)
    assert all(any(text[start : start + 10] in shown for start in range(len(text) - 10)) for text in drawn)
    left = [text for text in texts(corpus / "train.jsonl") if text not in drawn]
    output = Path(str(config.output))
    assert overlap(output, sorted(drawn)) == Overlap(len(drawn), len(drawn))
    assert overlap(output, left) == Overlap(0, len(left))


def test_a_resumed_run_keeps_what_was_read_before(make_config: Make, tmp_path: Path) -> None:
    train(make_config(output=tmp_path / "straight"))
    config = make_config(save_every=3)
    with pytest.raises(Killed):
        train(config, kill_at(5))
    assert not (tmp_path / "out" / FILE_NAME).exists()
    train(config)
    assert (tmp_path / "out" / FILE_NAME).read_bytes() == (tmp_path / "straight" / FILE_NAME).read_bytes()


@pytest.mark.parametrize("method", ["layer-skip", "exit-head"])
def test_training_onwards_adds_to_what_the_base_was_trained_on(
    make_config: Make, trained: Path, corpus: Path, tmp_path: Path, jsonl: Callable[..., Path], method: str
) -> None:
    new = [f"{number} " * 8 + "bottles hang on the wall" for number in range(100, 140)]
    file = jsonl(tmp_path / "new.jsonl", [{"text": text} for text in new])
    options: dict[str, Any] = {}
    if method == "exit-head":
        options = {"exits": (2,), "exits_per_step": 1, "layer_dropout": 0.1}
    options |= {"max_steps": 16, "batch_size": 8}
    train(make_config(model=str(trained), method=method, train_data=(str(file),), **options))
    output, seen, held_out = tmp_path / "out", texts(corpus / "train.jsonl"), texts(corpus / "heldout.jsonl")
    assert overlap(output, [*seen, *new]) == Overlap(len(seen) + len(new), len(seen) + len(new))
    assert overlap(output, held_out) == Overlap(0, len(held_out))
    assert overlap(trained, new) == Overlap(0, len(new))


def test_a_damaged_file_of_the_base_stops_a_run_before_it_trains(
    make_config: Make, tmp_path: Path, model_maker: Callable[..., Any], tokenizer_maker: Callable[..., Any]
) -> None:
    base = tmp_path / "base"
    model_maker(base)
    tokenizer_maker(base)
    mark = fingerprint(base)
    (base / FILE_NAME).write_bytes(b"\x93NUMPY")
    assert fingerprint(base) == mark, "the file is no part of the weights"
    with pytest.raises(UserError, match=r"base/trained_on\.npy is damaged"):
        train(make_config(model=str(base)), kill_at(1))


def test_prompts_and_chats_are_compared_without_their_template(
    make_config: Make, tmp_path: Path, jsonl: Callable[..., Path]
) -> None:
    def chat(name: str, count: int) -> list[dict[str, str]]:
        turns = [("system", "You are a helpful robot, " * 20)]
        turns += [(("user", "assistant")[n % 2], f"{name} says {n} " * 6) for n in range(count)]
        return [{"role": role, "content": content} for role, content in turns]

    data: list[dict[str, Any]] = [{"messages": chat(f"chat{n}", 4)} for n in range(6)]
    data += [{"prompt": f"question {n}?", "completion": f"answer {n} is long " * 5} for n in range(6)]
    train(make_config(train_data=(str(jsonl(tmp_path / "a.jsonl", data)),), max_steps=20, batch_size=8))
    asked: list[dict[str, Any]] = [
        {"messages": chat("chat1", 3)},
        {"messages": chat("chat1", 4)},
        {"messages": chat("chat1", 1)},
        {"prompt": "Question 2?"},
        {"prompt": f"{'answer 3 is long ' * 5}"},
        {"messages": chat("other", 3)},
        {"prompt": "question 9?"},
        {"prompt": "You are a helpful robot, " * 20},
    ]
    assert overlap(tmp_path / "out", [prompt_text(record, PromptConfig()) for record in asked]) == Overlap(5, 8)


def test_sweep_exit_warns_of_prompts_that_were_trained_on(
    trained: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from selfspec_tune.cli import main

    def warnings(prompts: list[str]) -> list[str]:
        file = tmp_path / "prompts.jsonl"
        file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts), encoding="utf-8")
        options = ["--raw", "--num-prompts", 6, "--max-new-tokens", 8, "--max-draft-tokens", 2, "--repeats", 1]
        options += ["--context-lengths", 32, "--confirm", 0, "--drafters", "copy", "--numerics", "fast", "--json"]
        command = ["selfspec", "sweep-exit", model, "--prompts", file, *options]
        monkeypatch.setattr(sys, "argv", list(map(str, command)))
        with pytest.raises(SystemExit) as stopped:
            main()
        out, err = capsys.readouterr()
        assert not stopped.value.code, err
        assert json.loads(out)
        return [line for line in err.splitlines() if "trained on" in line]

    model = shutil.copytree(trained, tmp_path / "model")
    held_out = texts(corpus / "heldout.jsonl")
    seen = [" ".join(text.split()[:12]) for text in texts(corpus / "train.jsonl")]
    [line] = warnings([*seen[:2], *held_out[:4]])
    assert line.startswith("2 of 6 prompts occur in the data this checkpoint was trained on")
    assert warnings(held_out[:6]) == []


def test_regress_warns_of_texts_that_were_trained_on(trained: Path, tiny: Path, corpus: Path, tmp_path: Path) -> None:
    model = shutil.copytree(trained, tmp_path / "model")

    def warnings(name: str) -> list[str]:
        config = RegressConfig(base=str(tiny), text=(corpus / f"{name}.jsonl",), max_documents=4, window_length=128)
        _, said = report.run(str(model), config)
        return [line for line in said if "trained on" in line]

    [line] = warnings("train")
    assert line.startswith("4 of 4 texts occur in ") and "perplexity is flattered" in line
    assert warnings("heldout") == []
