"""What a run that was stopped, killed or out of room goes on from: it ends in the bits of the run that was not."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from forked import fork, needs_fork, wait

from selfspec_tune.config import TrainConfig
from selfspec_tune.errors import UserError
from selfspec_tune.train.loop import train
from selfspec_tune.train.metrics import Metrics
from selfspec_tune.train.position import Position
from selfspec_tune.train.writing import failed_write

Make = Callable[..., TrainConfig]
SCHEDULES: dict[str, Any] = {
    "gradient_accumulation": 2,
    "layer_dropout": 0.5,
    "exits": (1, 2, 3),
    "exits_per_step": 2,
    "exit_curriculum": "gradual",
    "exit_loss": "mixture",
    "max_steps": 20,
    "eval_every": 5,
    "save_every": 10,
    "over_budget": "lower",
}
MATTERS = ("step", "sequences", "tokens", "evaluated", "before", "best", "exit_share", "alpha", "generator")
# `last` and `stopped` matter only where a run ended, `lowered` where the share was halved four times.
# `seconds` and `run` are no part of the result.
OTHERS = ("last", "stopped", "lowered", "seconds", "run")


class Killed(Exception):
    """Stands for the process dying where that is all there is to it."""


def at_step(number: int, act: Callable[[], None]) -> Callable[[str, int, int], None]:
    def progress(stage: str, done: int, total: int) -> None:
        if stage == "train" and done == number:
            act()

    return progress


def die() -> None:
    raise Killed


def outcome(output: Path) -> dict[str, Any]:
    """Return all that a run leaves, but times."""
    from safetensors.torch import load_file

    weights = load_file(output / "model.safetensors")
    facts = json.loads((output / "training.json").read_text())
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    for record in (facts, *records):
        for name in ("seconds", "tokens_per_second"):
            record.pop(name, None)
    facts["config"].pop("output", None)
    return {
        "weights": {name: weight.view(torch.uint8).numpy().tobytes() for name, weight in weights.items()},
        "facts": facts,
        "metrics": records,
        # A process that is killed may leave a hidden temporary file behind.
        "files": sorted(str(path.relative_to(output)) for path in output.rglob("*") if path.suffix != ".tmp"),
    }


def different(left: dict[str, Any], right: dict[str, Any]) -> list[str]:
    return [name for name in left if left[name] != right[name]]


@pytest.fixture(scope="module")
def settings(tiny: Path, tmp_path_factory: pytest.TempPathFactory, jsonl: Callable[..., Path]) -> dict[str, Any]:
    """Options under which everything that a position holds changes: epochs, best weights, the exits' share.

    The base knows text in capitals, and is trained on small letters: perplexity of the first rises at every step.
    """
    directory = tmp_path_factory.mktemp("data")
    train_data = jsonl(directory / "t.jsonl", [{"text": f"the {n} old cats of house {n * 7 % 31}"} for n in range(60)])
    held_out = jsonl(
        directory / "h.jsonl", [{"text": f"the {n} old cats of house {n * 5 % 29}"} for n in range(60, 80)]
    )
    known = jsonl(directory / "k.jsonl", [{"text": f"{n} HOUSES, {n % 9} OTHERS, ALL IN ALL"} for n in range(90)])
    general = jsonl(directory / "g.jsonl", [{"text": f"{n} HOUSES, {n % 9} OTHERS, ALL IN ALL"} for n in range(90, 99)])
    common: dict[str, Any] = {"device": "cpu", "sequence_length": 48, "batch_size": 2, "warmup_steps": 2}
    common |= {"learning_rate": 3e-3, "eval_sequences": 4, "max_steps": 20, "exits": (1, 2, 3)}
    base = directory / "base"
    train(TrainConfig(model=str(tiny), output=base, train_data=(str(known),), eval_data=(str(general),), **common))
    data = {"train_data": (str(train_data),), "eval_data": (str(held_out),), "general_data": (str(general),)}
    options = {**common, "model": str(base), **data, **SCHEDULES}
    scout = TrainConfig(output=directory / "scout", max_perplexity_increase="100000%", **options)
    with pytest.raises(Killed):
        train(scout, at_step(11, die))
    records = [json.loads(line) for line in (directory / "scout" / "metrics.jsonl").read_text().splitlines()]
    five, ten = (r["perplexity_increase"]["general"] for r in records if "perplexity_increase" in r)
    assert 0 < five < ten
    return {**options, "max_perplexity_increase": f"{50 * (five + ten):.3f}%"}  # step 5 is within, step 10 beyond


@pytest.fixture(scope="module")
def straight(settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The outcome of 20 steps without a stop."""
    output = tmp_path_factory.mktemp("straight") / "out"
    train(TrainConfig(output=output, **settings))
    return outcome(output)


@pytest.fixture(scope="module")
def half(settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a run that died after step 12, with the state of step 10."""
    output = tmp_path_factory.mktemp("half") / "out"
    with pytest.raises(Killed):
        train(TrainConfig(output=output, **settings), at_step(12, die))
    return output


def test_ten_steps_resumed_for_ten_are_twenty_steps_to_the_bit(
    settings: dict[str, Any], straight: dict[str, Any], half: Path, tmp_path: Path
) -> None:
    shutil.copytree(half, tmp_path / "out")
    steps: list[int] = []
    train(
        TrainConfig(output=tmp_path / "out", **settings),
        lambda stage, done, total: steps.append(done) if stage == "train" else None,
    )
    assert steps == list(range(11, 21))
    assert different(outcome(tmp_path / "out"), straight) == []
    # The data were read more than once, and what a position holds had changed by step 10 and went on to change.
    facts, records = straight["facts"], straight["metrics"]
    evaluations = [record for record in records if "within_budget" in record]
    assert [(r["step"], r["within_budget"]) for r in evaluations[:2]] == [(5, True), (10, False)], evaluations
    assert facts["exit_share"] < 0.5 and facts["best_step"] is not None


@pytest.mark.parametrize("field", MATTERS)
def test_every_field_of_a_position_is_needed(
    settings: dict[str, Any],
    straight: dict[str, Any],
    half: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    field: str,
) -> None:
    load = Position.load_state_dict

    def forgetful(self: Position, state: dict[str, Any]) -> None:
        fresh = self.state_dict()
        load(self, {**state, field: fresh[field]})

    monkeypatch.setattr(Position, "load_state_dict", forgetful)
    shutil.copytree(half, tmp_path / "out")
    try:
        train(TrainConfig(output=tmp_path / "out", **settings))
    except (KeyError, FileNotFoundError):  # the loss of some is seen at once
        return
    assert different(outcome(tmp_path / "out"), straight) != []


def test_a_position_holds_nothing_else() -> None:
    assert sorted(Position(0, 0.5).state_dict()) == sorted([*MATTERS, *OTHERS])


OPERATIONS = ("os.rename", "os.remove", "os.rmdir", "os.mkdir")
SHORT: dict[str, Any] = {"max_steps": 4, "save_every": 2, "eval_every": 2, "eval_sequences": 2, "batch_size": 1}


def killed_before(config: TrainConfig, number: int | None, log: Path) -> list[str]:
    """Train in a fork that is killed before its operation `number` on directories; return those it did."""

    def act() -> None:
        done: list[str] = []

        def watch(event: str, arguments: tuple[Any, ...]) -> None:
            if event in OPERATIONS:
                if len(done) == number:
                    os.kill(os.getpid(), signal.SIGKILL)
                done.append(event)
                os.write(1, f"{event} {arguments[0]}\n".encode())

        train(config, at_step(1, lambda: sys.addaudithook(watch)))

    expected = 0 if number is None else -signal.SIGKILL
    assert wait([fork(act, log)]) == [expected], log.read_text()
    return [line for line in log.read_text().splitlines() if line.startswith("os.")]


@needs_fork
def test_a_run_killed_at_any_point_goes_on_from_its_last_state(make_config: Make, tmp_path: Path) -> None:
    config = make_config(output=tmp_path / "straight", **SHORT)
    log = tmp_path / "log"
    operations = killed_before(config, None, log)
    expected = outcome(tmp_path / "straight")
    renamed = [n for n, each in enumerate(operations) if each.startswith("os.rename") and each.endswith("/incomplete")]
    assert len(renamed) == 2, operations
    kinds = ["", *(each.split()[0] for each in operations), ""]
    ends = [n for n in range(len(operations)) if kinds[n] != kinds[n + 1] or kinds[n + 1] != kinds[n + 2]]
    for number in ends:  # the first and the last of many removals or renamings stand for those between
        output = tmp_path / f"killed-{number}"
        config = make_config(output=output, **SHORT)
        killed_before(config, number, log)
        steps: list[int] = []
        train(config, lambda stage, done, total, seen=steps: seen.append(done) if stage == "train" else None)
        where = f"before {operations[number]}"
        assert different(outcome(output), expected) == [], where
        assert steps == ([1, 2, 3, 4] if number <= renamed[0] else [3, 4] if number <= renamed[1] else []), where


@contextmanager
def limits_restored() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def fill_disk(size: int = 20_000) -> None:
    """Let no file of this process grow beyond `size` bytes; writing more is an OSError, as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@pytest.mark.parametrize("eval_every", [2, 100], ids=["best weights", "state"])
def test_a_full_disk_is_a_clear_error_that_keeps_the_state_before(
    make_config: Make, tmp_path: Path, eval_every: int
) -> None:
    options = {**SHORT, "eval_every": eval_every, "max_steps": 6}
    train(make_config(output=tmp_path / "straight", **options))
    config = make_config(**options)
    with limits_restored(), pytest.raises(UserError) as caught:
        train(config, at_step(3, fill_disk))
    assert f"{tmp_path / 'out' / 'state'} cannot be written" in str(caught.value)
    assert "MiB free" in str(caught.value) and "the same command again" in str(caught.value)
    if eval_every == 100:
        assert "step-00000002 is kept" in str(caught.value)
    steps: list[int] = []
    train(config, lambda stage, done, total: steps.append(done) if stage == "train" else None)
    assert steps == [3, 4, 5, 6]
    assert different(outcome(tmp_path / "out"), outcome(tmp_path / "straight")) == []


def test_what_libraries_say_of_a_full_disk_is_understood(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    weight = torch.zeros(4000)

    def to_handle() -> None:
        with (tmp_path / "handle").open("wb") as handle:
            torch.save(weight, handle)

    def to_checkpoint() -> None:
        torch.distributed.checkpoint.save({"weight": weight}, checkpoint_id=tmp_path / "sharded", no_dist=True)

    writers: list[Callable[[], object]] = [
        lambda: (tmp_path / "bytes").write_bytes(bytes(8000)),
        lambda: torch.save(weight, tmp_path / "torch"),
        to_handle,
        lambda: save_file({"weight": weight}, tmp_path / "safe"),
        to_checkpoint,
    ]
    for number, write in enumerate(writers):
        with limits_restored(), pytest.raises(BaseException) as caught:
            fill_disk(1000)
            write()
        assert failed_write(caught.value) is not None, number
    assert failed_write(RuntimeError("shapes do not match")) is None


def test_a_metrics_file_that_cannot_grow_is_a_user_error(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "metrics.jsonl")
    with limits_restored(), pytest.raises(UserError, match=r"metrics.jsonl cannot be written"):
        fill_disk(10)
        metrics.write({"step": 1, "loss": 0.5})
