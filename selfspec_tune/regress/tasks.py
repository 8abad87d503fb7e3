"""Downstream tasks before and after training, through the lm-eval library: the same documents for both models, paired.

A task is one that lm-eval knows (a group counts as one task: its documents together), or a local .jsonl file, which
needs no network. Its records hold a text in "question" or "prompt", and either "choices" and the right one as "answer"
(index or text), or only a text as "answer". With choices the model's is the likeliest after the text and a blank (acc).
Without, it writes one line greedily, which must be the answer but for case, punctuation and blanks (exact_match).
Neither uses a chat template. Knows nothing of drafts and of selfspec.json.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import statistics
import string
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from selfspec_tune.artifact import worst
from selfspec_tune.bootstrap import Z
from selfspec_tune.errors import UserError, did_you_mean
from selfspec_tune.files import read_jsonl
from selfspec_tune.progress import Progress, silent
from selfspec_tune.regress.quality import FEWEST_DOCUMENTS

LOCAL = ".jsonl"
TEXT_FIELDS = ("question", "prompt")
MAX_ANSWER_TOKENS = 128
SEED = 0
"""Of the examples in a prompt, and of everything else that a task draws."""
RULE_OF_THREE = 3.0
"""Of n documents without a change, up to this many in n may change elsewhere (95 %)."""
RECORDS = '{"question": "...", "choices": ["...", "..."], "answer": 0} or {"question": "...", "answer": "..."}'


@dataclass(frozen=True)
class TaskScores:
    """One model's scores in one task, a number per document in the documents' order; more is better."""

    name: str
    metric: str
    values: list[float]


@dataclass(frozen=True)
class TaskComparison:
    """A task's mean scores of base and trained, and their paired difference trained − base.

    Attributes:
        standard_error: of the difference, over documents; None with a single document.
        interval: 95 %, normal, but no narrower than `RULE_OF_THREE` allows; None without a standard error.
        allowed: the least difference that passes, −max_drop.
        status: passed: the interval lies at or above `allowed`; failed: below it; else undecided.
        needed: documents that would decide if difference and spread stayed as they are; None where decided or unknown.
    """

    name: str
    metric: str
    documents: int
    base: float
    trained: float
    difference: float
    standard_error: float | None
    interval: tuple[float, float] | None
    allowed: float
    status: str
    needed: int | None


@dataclass(frozen=True)
class Tasks:
    """What the comparison of all tasks found."""

    tasks: list[TaskComparison]

    @property
    def status(self) -> str:
        """failed if one task failed, else undecided if one is, else passed."""
        return worst(task.status for task in self.tasks)

    @property
    def passed(self) -> bool:
        """Whether every task passed."""
        return self.status == "passed"

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {"status": self.status, "passed": self.passed, "tasks": [asdict(task) for task in self.tasks]}


def check_tasks(names: Sequence[str]) -> None:
    """Raise a UserError unless every name is a task, group or tag of lm-eval or a local file with good records.

    Reads no data set. lm-eval reads its index of tasks first, some 15 s, unless all names are local files.
    """
    _require_library()
    for name in names:
        if name.endswith(LOCAL):
            read_local(Path(name))
        elif name not in (known := _index().all_tasks):
            raise UserError(
                f"lm-eval has no task of this name{did_you_mean(name, known)}",
                got=name,
                allowed=f"a task or group of lm-eval, or a {LOCAL} file",
                command="lm-eval ls tasks",
            )


def score_tasks(
    model: Any, tokenizer: Any, names: Sequence[str], *, limit: int | None = None, progress: Progress = silent
) -> list[TaskScores]:
    """Score a model in every task.

    Args:
        model: a loaded transformers causal language model.
        tokenizer: its tokenizer; lm-eval gives it a padding token if it has none.
        names: as `check_tasks` accepts.
        limit: documents per task at most, the first ones; of a group, per task in it.
        progress: told after every task.

    Returns:
        one for each name; more for a group whose tasks have different metrics, one for each metric.

    Raises:
        UserError: a task whose data cannot be had, that runs generated code, or that has no score per document.

    Seeds the generators of Python, NumPy and PyTorch, so that every call scores the same documents.
    """
    _require_library()
    with _quiet():
        from lm_eval.models.huggingface import HFLM

        # One text at a time: the logits of a batch would need more memory, and its padding could change bits.
        harness = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1)
    scores = []
    for done, name in enumerate(names, start=1):
        with _quiet():
            scores += _score(harness, name, limit)
        progress("tasks", done, len(names))
    return scores


def compare_tasks(
    trained: Sequence[TaskScores], base: Sequence[TaskScores], *, max_drop: float, same_weights: bool = False
) -> Tasks:
    """Compare two models' scores task by task, document by document.

    Args:
        trained, base: of the same tasks with the same documents.
        max_drop: by how much a mean score may fall, 0.01 for one point of accuracy.
        same_weights: both checkpoints have one fingerprint. What would be undecided passes then.
    """
    return Tasks([_compare(ours, theirs, max_drop, same_weights) for ours, theirs in zip(trained, base, strict=True)])


def read_local(path: Path) -> list[dict[str, Any]]:
    """Read a local task: documents {"text", "answer"} or {"text", "choices", "gold"}, all of one kind.

    Raises:
        UserError: no records, or a bad one; the message names file and line.
    """
    records = read_jsonl(path)
    if not records:
        raise UserError(f"{path} holds no records", allowed=RECORDS)
    lines = [number for number, line in enumerate(path.read_bytes().split(b"\n"), start=1) if line.strip()]
    documents: list[dict[str, Any]] = []
    for line, record in zip(lines, records, strict=True):
        document = _document(record, f"{path}:{line}")
        if documents and document.keys() != documents[0].keys():
            allowed = "choices in all records or in none"
            raise UserError(f"{path}:{line} is of another kind than the first record", allowed=allowed)
        documents.append(document)
    return documents


def _document(record: dict[str, Any], where: str) -> dict[str, Any]:
    text = next((record[name] for name in TEXT_FIELDS if name in record), None)
    if not isinstance(text, str) or not text.strip():
        got = ", ".join(record) or "an empty record"
        raise UserError(f"{where} has no text in 'question' or 'prompt'", got=got, allowed=RECORDS)
    answer = record.get("answer")
    if "choices" not in record:
        if not isinstance(answer, str) or not normalised(answer):
            raise UserError(f"{where} has no choices and no text in 'answer'", got=answer, allowed=RECORDS)
        return {"text": text, "answer": answer}
    choices = record["choices"]
    texts = isinstance(choices, list) and all(isinstance(choice, str) and choice for choice in choices)
    if not texts or len(choices) < 2 or len(set(choices)) < len(choices):
        raise UserError(f"{where}: 'choices' is no list of different texts, two or more", got=choices, allowed=RECORDS)
    index = choices.index(answer) if answer in choices else answer
    if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < len(choices):
        allowed = f"0..{len(choices) - 1} or the text of a choice"
        raise UserError(f"{where}: 'answer' is none of the choices", got=answer, allowed=allowed)
    return {"text": text, "choices": choices, "gold": index}


def normalised(text: str) -> str:
    """Return a text in small letters, without punctuation and with single blanks."""
    return " ".join(text.casefold().translate(str.maketrans("", "", string.punctuation)).split())


def _compare(trained: TaskScores, base: TaskScores, max_drop: float, same_weights: bool) -> TaskComparison:
    if (trained.name, trained.metric, len(trained.values)) != (base.name, base.metric, len(base.values)):
        raise ValueError(f"scores of {trained.name} do not belong together")
    changes = [ours - theirs for ours, theirs in zip(trained.values, base.values, strict=True)]
    count, difference = len(changes), statistics.fmean(changes)
    error = statistics.stdev(changes) / math.sqrt(count) if count > 1 else None
    interval, status, needed = None, "undecided", FEWEST_DOCUMENTS if count < FEWEST_DOCUMENTS else None
    if error is not None:
        # That no score changed in n documents does not say that fewer than 3/n change (the rule of three).
        half = max(Z * error, RULE_OF_THREE / count)
        interval = (difference - half, difference + half)
        margin = abs(difference + max_drop)
        if count >= FEWEST_DOCUMENTS and interval[0] >= -max_drop:
            status = "passed"
        elif count >= FEWEST_DOCUMENTS and interval[1] < -max_drop:
            status = "failed"
        elif margin > 0:
            by_error, by_rule = count * (Z * error / margin) ** 2, RULE_OF_THREE / margin
            needed = max(count + 1, FEWEST_DOCUMENTS, math.ceil(max(by_error, by_rule)))
    if same_weights and status == "undecided":
        status, needed = "passed", None
    return TaskComparison(
        name=trained.name,
        metric=trained.metric,
        documents=count,
        base=statistics.fmean(base.values),
        trained=statistics.fmean(trained.values),
        difference=difference,
        standard_error=error,
        interval=interval,
        allowed=-max_drop,
        status=status,
        needed=needed,
    )


def _require_library() -> None:
    try:
        import lm_eval  # noqa: F401
    except ImportError:
        raise UserError("downstream tasks need the lm-eval library", command="pip install 'selfspec[eval]'") from None


@cache
def _index() -> Any:
    """Return lm-eval's task manager with all its tasks."""
    from lm_eval.tasks import TaskManager

    with _quiet():
        return TaskManager()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep stdout clean, and stderr too unless it is a terminal: lm-eval logs, and its bars cannot be switched off."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    shown = sys.stderr if sys.stderr.isatty() else io.StringIO()
    try:
        with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
            yield
    finally:
        logging.disable(before)


def _score(harness: Any, name: str, limit: int | None) -> list[TaskScores]:
    from lm_eval import evaluate
    from transformers import set_seed

    set_seed(SEED)  # some tasks shuffle their choices when they are loaded
    loaded = _load(name)
    tasks = loaded["tasks"]
    for task in tasks.values():
        if getattr(task, "UNSAFE_CODE", False):
            raise UserError(f"the task {name} runs code that the model writes", command="another task")
        if getattr(task, "MULTIMODAL", False):
            raise UserError(f"the task {name} is not about text alone", command="another task")
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=SEED)
    samples = evaluate(harness, task_dict=loaded, limit=limit, bootstrap_iters=0, log_samples=True)["samples"]
    by_metric: dict[str, list[float]] = {}
    for task_name, task in tasks.items():
        metric, values = _values(task_name, task, samples[task_name])
        by_metric.setdefault(metric, []).extend(values)
    return [TaskScores(name, metric, values) for metric, values in by_metric.items()]


def _load(name: str) -> Any:
    """Return lm-eval's task objects of a name, with their data."""
    from lm_eval.tasks import TaskManager

    if name.endswith(LOCAL):
        return TaskManager(include_defaults=False).load(_local_config(Path(name)))
    try:
        return _index().load(name)
    except Exception as error:  # no network, or a package that this task needs: whatever it is, it is the task's
        raise UserError(
            f"the task {name} cannot be loaded: {type(error).__name__}: {str(error).strip()[:300]}",
            command=f"once with the hub in reach (HF_HUB_OFFLINE unset), which keeps its data, or a {LOCAL} file",
        ) from None


def _values(name: str, task: Any, samples: list[dict[str, Any]]) -> tuple[str, list[float]]:
    """Return the task's first metric that is a number per document, the more the better, and its values."""
    first = [sample for sample in samples if sample["filter"] == samples[0]["filter"]]
    first.sort(key=lambda sample: sample["doc_id"])
    better = task.higher_is_better()
    for metric in first[0]["metrics"]:
        values = [sample[metric] for sample in first]
        if better.get(metric, True) and all(hasattr(value, "__float__") for value in values):
            return metric, [float(value) for value in values]
    raise UserError(f"the task {name} has no score per document", got=", ".join(first[0]["metrics"]))


def _local_config(path: Path) -> dict[str, Any]:
    """Return lm-eval's description of a local task."""
    from datasets import Dataset

    documents = read_local(path)
    common = {
        "task": path.stem,
        "custom_dataset": lambda **_: {"test": Dataset.from_list(documents)},
        "test_split": "test",
        "num_fewshot": 0,
        "doc_to_text": lambda document: document["text"],
    }
    if "choices" in documents[0]:
        return common | {
            "output_type": "multiple_choice",
            "doc_to_choice": lambda document: document["choices"],
            "doc_to_target": lambda document: document["gold"],
            "metric_list": [{"metric": "acc"}],
        }
    return common | {
        "output_type": "generate_until",
        "doc_to_target": lambda document: document["answer"],
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": MAX_ANSWER_TOKENS, "do_sample": False},
        "process_results": lambda document, results: {
            "exact_match": float(normalised(results[0]) == normalised(document["answer"]))
        },
        "metric_list": [{"metric": "exact_match"}],
    }
