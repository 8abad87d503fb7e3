"""Signals that stop a run: what is saved, which exit code follows, and what a second one does."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from selfspec_tune.cli import app
from selfspec_tune.config import TrainConfig
from selfspec_tune.train.environment import interruption
from selfspec_tune.train.loop import train

Make = Callable[..., TrainConfig]
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def test_sigterm_finishes_the_step_saves_a_state_and_exits_with_143(make_config: Make, tmp_path: Path) -> None:
    before = [signal.getsignal(number) for number in SIGNALS]

    def stop(stage: str, done: int, total: int) -> None:
        if (stage, done) == ("train", 2):
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit) as left:
        train(make_config(eval_sequences=2), stop)
    assert left.value.code == 143
    assert [path.name for path in (tmp_path / "out" / "state").glob("step-*")] == ["step-00000002"]
    assert not (tmp_path / "out" / "training.json").exists()
    assert [signal.getsignal(number) for number in SIGNALS] == before


@pytest.fixture
def handled() -> Iterator[None]:
    """SIGINT handled as in a terminal: a process started in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("handled")
@pytest.mark.parametrize("first", SIGNALS)
def test_the_first_signal_is_a_flag_and_the_second_acts_as_usual(first: int) -> None:
    with pytest.raises(KeyboardInterrupt), interruption() as interrupted:
        assert not interrupted.is_set()
        os.kill(os.getpid(), first)
        assert interrupted.is_set() and interrupted.signal == first
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize(
    ("error", "code"), [(KeyboardInterrupt(), 130), (SystemExit(143), 143)], ids=["SIGINT", "SIGTERM"]
)
def test_the_command_says_what_a_stopped_run_goes_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int
) -> None:
    output = tmp_path / "o"
    command = ["train", "--model", str(tmp_path), "--output", str(output), "--train-data", "t.jsonl"]

    def stopped(*arguments: object) -> None:
        raise error

    monkeypatch.setattr("selfspec_tune.train.loop.train", stopped)
    result = CliRunner().invoke(app, command)
    assert result.exit_code == code
    assert "stopped before a state was saved" in result.stderr

    def saved(*arguments: object) -> None:
        (output / "state" / "step-00000012").mkdir(parents=True)
        raise error

    monkeypatch.setattr("selfspec_tune.train.loop.train", saved)
    result = CliRunner().invoke(app, command)
    assert result.exit_code == code
    assert "stopped after step 12: the same command goes on from there" in result.stderr
