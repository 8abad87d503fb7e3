"""Downstream tasks: local files are scored as a plain computation says, bad ones are named, the gate shuts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import byte_tokenizer, tiny_model

from selfspec_tune.errors import UserError
from selfspec_tune.regress import tasks

pytest.importorskip("lm_eval")

NUMBERS = ["two", "three", "a lot more"]
CHOICES = [
    {"question": f"{number} + 1 is", "choices": NUMBERS[: 2 + number % 2], "answer": number % 2} for number in range(8)
]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model(late=0.3)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_tokenizer()


def likelihood(model: Any, text: str, continuation: str) -> float:
    """Log-likelihood of the bytes of a continuation."""
    start, tokens = len(text.encode()), torch.tensor([list((text + continuation).encode())])
    with torch.inference_mode():
        logs = model(tokens).logits.float().log_softmax(-1)[0, start - 1 : -1]
    return float(logs.gather(1, tokens[0, start:, None]).sum())


def test_choices_are_scored_by_their_likelihood(model: Any, tokenizer: Any, tmp_path: Path, jsonl: Callable) -> None:
    path = str(jsonl(tmp_path / "sums.jsonl", CHOICES))
    expected = []
    for record in CHOICES:
        values = [likelihood(model, record["question"], " " + choice) for choice in record["choices"]]
        expected.append(float(values.index(max(values)) == record["answer"]))
    assert 0 < sum(expected) < len(expected)
    calls: list[tuple[str, int, int]] = []
    [found] = tasks.score_tasks(model, tokenizer, [path], progress=lambda *call: calls.append(call))
    assert found == tasks.TaskScores(path, "acc", expected)
    assert calls == [("tasks", 1, 1)]
    [limited] = tasks.score_tasks(model, tokenizer, [path], limit=3)
    assert limited.values == expected[:3]


def test_a_written_line_must_be_the_answer(model: Any, tokenizer: Any, tmp_path: Path, jsonl: Callable) -> None:
    questions = ["one", "two of them", "three"]
    written = []
    for question in questions:
        tokens = list(question.encode())
        with torch.inference_mode():
            while len(tokens) < len(question) + tasks.MAX_ANSWER_TOKENS and tokens[-1] not in (ord("\n"), 256):
                tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        end = len(question)
        written.append(tokenizer.decode([t for t in tokens[end:] if t not in (ord("\n"), 256)]))
    # The first answer as it is written, the second with other case and blanks, the third something else.
    answers = [written[0], "  " + written[1].swapcase(), "nothing of the kind"]
    assert all(tasks.normalised(answer) for answer in answers)
    records = [{"prompt": text, "answer": answer} for text, answer in zip(questions, answers, strict=True)]
    [found] = tasks.score_tasks(model, tokenizer, [str(jsonl(tmp_path / "x.jsonl", records))])
    assert (found.metric, found.values) == ("exact_match", [1.0, 1.0, 0.0])


def test_nothing_is_printed(checkpoint: Path, tmp_path: Path, jsonl: Callable) -> None:
    path = jsonl(tmp_path / "sums.jsonl", CHOICES[:2])
    code = (
        "import sys\n"
        "from selfspec_tune.model.load import load_model, load_tokenizer\n"
        "from selfspec_tune.regress import tasks\n"
        "model, tokenizer = load_model(sys.argv[1]), load_tokenizer(sys.argv[1])\n"
        "print('begin', file=sys.stderr)\n"
        "tasks.check_tasks(sys.argv[2:])\n"
        "tasks.score_tasks(model, tokenizer, sys.argv[2:])\n"
    )
    command = [sys.executable, "-c", code, str(checkpoint), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr.partition("begin\n")[2]) == (0, "", ""), done.stderr


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"answer": "x"}, "no text in 'question' or 'prompt'"),
        ({"question": "  ", "answer": "x"}, "no text in 'question' or 'prompt'"),
        ({"question": "x"}, "no choices and no text in 'answer'"),
        ({"question": "x", "answer": 3}, "no choices and no text in 'answer'"),
        ({"question": "x", "answer": " .! "}, "no choices and no text in 'answer'"),
        ({"question": "x", "choices": ["a"], "answer": 0}, "'choices' is no list"),
        ({"question": "x", "choices": ["a", "a"], "answer": 0}, "'choices' is no list"),
        ({"question": "x", "choices": ["a", 1], "answer": 0}, "'choices' is no list"),
        ({"question": "x", "choices": {"a": 1, "b": 2}, "answer": 0}, "'choices' is no list"),
        ({"question": "x", "choices": ["a", "b"], "answer": 2}, "'answer' is none of the choices"),
        ({"question": "x", "choices": ["a", "b"], "answer": -1}, "'answer' is none of the choices"),
        ({"question": "x", "choices": ["a", "b"], "answer": True}, "'answer' is none of the choices"),
        ({"question": "x", "choices": ["a", "b"], "answer": "c"}, "'answer' is none of the choices"),
        ({"question": "x", "choices": ["a", "b"]}, "'answer' is none of the choices"),
        ({"question": "x", "answer": "a"}, "another kind"),
    ],
)
def test_a_bad_record_is_named(tmp_path: Path, record: dict[str, Any], message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(CHOICES[0]) + "\n\n" + json.dumps(record) + "\n", encoding="utf-8")
    with pytest.raises(UserError) as caught:
        tasks.check_tasks([str(path)])
    assert caught.value.what.startswith(f"{path}:3") and message in caught.value.what


def test_an_answer_may_be_the_text_of_a_choice(tmp_path: Path, jsonl: Callable) -> None:
    # Of choices that look like numbers the text is meant.
    path = jsonl(tmp_path / "x.jsonl", [{"prompt": "x", "choices": ["1", "0"], "answer": "0"}])
    assert tasks.read_local(path) == [{"text": "x", "choices": ["1", "0"], "gold": 1}]


def test_a_file_without_records_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(UserError, match=r"empty.jsonl holds no records"):
        tasks.check_tasks([str(tmp_path / "empty.jsonl")])
    with pytest.raises(UserError, match=r"missing.jsonl does not exist"):
        tasks.check_tasks([str(tmp_path / "missing.jsonl")])


def test_names_of_the_library(model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    tasks.check_tasks(["hellaswag", "mmlu"])
    with pytest.raises(UserError, match=r"no task of this name \(did you mean 'hellaswag'\?\)"):
        tasks.check_tasks(["helaswag"])

    def offline(*_: Any, **__: Any) -> None:
        raise ConnectionError("Couldn't reach the hub")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(UserError, match="the task hellaswag cannot be loaded: ConnectionError") as caught:
        tasks.score_tasks(model, tokenizer, ["hellaswag"])
    assert caught.value.command is not None and ".jsonl" in caught.value.command


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch, model: Any, tokenizer: Any) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    for call in (lambda: tasks.check_tasks([]), lambda: tasks.score_tasks(model, tokenizer, [])):
        with pytest.raises(UserError) as caught:
            call()
        assert caught.value.command == "pip install 'selfspec[eval]'"


def compare(trained: list[float], base: list[float], max_drop: float = 0.02) -> tasks.TaskComparison:
    ours, theirs = ([tasks.TaskScores("x", "acc", values)] for values in (trained, base))
    return tasks.compare_tasks(ours, theirs, max_drop=max_drop).tasks[0]


def test_equal_scores_pass() -> None:
    values = [1.0, 0.0] * 100
    found = compare(values, values, max_drop=0.02)
    assert (found.difference, found.standard_error) == (0.0, 0.0)
    assert found.interval == pytest.approx((-0.015, 0.015)) and found.status == "passed" and found.needed is None


@pytest.mark.parametrize(("count", "needed"), [(1, 8), (5, 150), (100, 150)])
def test_no_change_in_few_documents_proves_little(count: int, needed: int) -> None:
    found = compare([1.0] * count, [1.0] * count, max_drop=0.02)
    assert (found.status, found.needed) == ("undecided", needed)
    same = [tasks.TaskScores("x", "acc", [1.0] * count)]
    assert tasks.compare_tasks(same, same, max_drop=0.02, same_weights=True).status == "passed"


def test_the_difference_is_paired() -> None:
    base = [1.0, 0.0] * 200
    better, same = [1.0, 0.0] * 196 + [1.0] * 8, [0.0] * 4 + [1.0, 0.0] * 196 + [1.0] * 4
    assert compare(better, base).status == "passed"
    found = compare(same, base, max_drop=0.03)
    # Two documents lost, two gained of 400: unpaired, the standard error would be 0.035.
    assert found.difference == 0 and found.standard_error == pytest.approx((4 / 399 / 400) ** 0.5)
    assert found.interval == pytest.approx((-0.0098, 0.0098), abs=1e-4) and found.status == "passed"
    assert (found.base, found.trained, found.documents, found.allowed) == (0.5, 0.5, 400, -0.03)


def test_a_drop_fails() -> None:
    base = [1.0] * 200
    assert compare([0.0] * 40 + [1.0] * 160, base).status == "failed"
    assert compare([0.0] * 40 + [1.0] * 160, base, max_drop=0.3).status == "passed"
    assert compare([0.0] * 9, [1.0] * 9).status == "failed"
    assert compare([0.0] * 3, [1.0] * 3).status == "undecided"


def test_too_few_documents_are_undecided() -> None:
    base, trained = [1.0] * 50, [0.0] * 2 + [1.0] * 48
    found = compare(trained, base)
    assert found.status == "undecided" and found.needed is not None and found.needed > 50
    times = found.needed // 50 + 1
    assert compare(trained * times, base * times).status == "failed"
    assert compare(trained * (times - 2), base * (times - 2)).status == "undecided"
    # A difference within the limit does not pass by itself either: one document of 50 is no proof.
    within = compare([0.0] + [1.0] * 49, base, max_drop=0.03)
    assert within.status == "undecided" and within.needed is not None
    times = within.needed // 50 + 1
    assert compare(([0.0] + [1.0] * 49) * times, base * times, max_drop=0.03).status == "passed"
    # Nothing can be said from one document, nor where the difference is the limit itself.
    assert (compare([0.0], [1.0]).status, compare([0.0], [1.0]).needed) == ("undecided", 8)
    assert compare([0.0] * 2 + [1.0] * 6, [1.0] * 8, max_drop=0.25).needed is None


def test_the_worst_task_decides() -> None:
    good, bad = tasks.TaskScores("good", "acc", [1.0] * 400), tasks.TaskScores("bad", "acc", [0.0] * 400)
    unclear = tasks.TaskScores("unclear", "acc", [0.0] * 4 + [1.0] * 396)
    base = {task.name: tasks.TaskScores(task.name, "acc", [1.0] * 400) for task in (good, bad, unclear)}

    def status(*scores: tasks.TaskScores) -> tuple[str, bool]:
        found = tasks.compare_tasks(scores, [base[score.name] for score in scores], max_drop=0.01)
        return found.status, found.passed

    assert status(good) == ("passed", True)
    assert status(good, unclear) == ("undecided", False)
    assert status(unclear, bad, good) == ("failed", False)
    with pytest.raises(ValueError, match="do not belong together"):
        tasks.compare_tasks([good], [bad], max_drop=0.01)


def test_a_json_object() -> None:
    score = [tasks.TaskScores("x", "acc", [1.0, 0.0] * 200)]
    found = json.loads(json.dumps(tasks.compare_tasks(score, score, max_drop=0.01).to_dict()))
    assert (found["status"], found["passed"]) == ("passed", True)
    assert found["tasks"] == [
        {"name": "x", "metric": "acc", "documents": 400, "base": 0.5, "trained": 0.5, "difference": 0.0}
        | {"standard_error": 0.0, "interval": [-0.0075, 0.0075], "allowed": -0.01, "status": "passed", "needed": None}
    ]
