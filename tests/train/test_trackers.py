"""Trackers: what they are told, and that a resumed run goes on in the run it began."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from selfspec_tune.config import TrainConfig
from selfspec_tune.train import loop
from selfspec_tune.train.trackers import start_trackers

Make = Callable[..., TrainConfig]
SHORT: dict[str, Any] = {"max_steps": 4, "eval_every": 3, "eval_sequences": 2, "batch_size": 1, "save_every": 2}


class Killed(Exception):
    """Stands for the process dying."""


def killed_at(number: int) -> Callable[[str, int, int], None]:
    def progress(stage: str, done: int, total: int) -> None:
        if (stage, done) == ("train", number):
            raise Killed

    return progress


def test_a_resumed_run_keeps_its_id_and_says_where_it_goes_on(
    make_config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[str, int | None]] = []

    def record(accelerator: Any, options: Any, output: Path, run: str, *, resumed_at: int | None) -> None:
        started.append((run, resumed_at))

    monkeypatch.setattr(loop, "start_trackers", record)
    config = make_config(**SHORT)
    with pytest.raises(Killed):
        loop.train(config, killed_at(3))
    loop.train(config)
    (first, nowhere), (second, at) = started
    assert nowhere is None and at == 2 and first == second
    loop.train(make_config(**{**SHORT, "output": Path(str(config.output)).with_name("other")}))
    assert started[-1][0] != first and started[-1][1] is None


def test_options_reach_trackers_as_plain_values(tmp_path: Path) -> None:
    told: dict[str, Any] = {}

    class Accelerator:
        def init_trackers(self, project: str, *, config: Any, init_kwargs: Any) -> None:
            told.update(project=project, config=config, arguments=init_kwargs)

    start_trackers(Accelerator(), {"exits": [1, 2], "seed": 3, "max_minutes": None}, tmp_path, "abc", resumed_at=None)
    assert told["config"] == {"exits": "[1, 2]", "seed": 3, "max_minutes": "null"}
    assert told["arguments"]["wandb"] == {"id": "abc", "resume": "allow", "dir": str(tmp_path)}
    assert told["arguments"]["tensorboard"] == {}
    start_trackers(Accelerator(), {"seed": 3}, tmp_path, "abc", resumed_at=7)
    assert told["config"] is None and told["arguments"]["tensorboard"] == {"purge_step": 8}


def test_tensorboard_shows_every_step_once(make_config: Make) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    config = make_config(tracker="tensorboard", **SHORT)
    with pytest.raises(Killed):
        loop.train(config, killed_at(3))
    loop.train(config)
    events = accumulators.EventAccumulator(str(Path(str(config.output)) / "tensorboard" / "selfspec")).Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3, 4]
    assert {"losses/final", "perplexity", "alpha/3", "tokens_per_second"} <= set(events.Tags()["scalars"])


def test_wandb_offline_goes_on_in_the_same_run(make_config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    config = make_config(tracker="wandb", **SHORT)

    def stop(stage: str, done: int, total: int) -> None:
        if (stage, done) == ("train", 2):
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        loop.train(config, stop)
    loop.train(config)
    parts = sorted((Path(str(config.output)) / "wandb").glob("offline-run-*"))
    assert len(parts) == 2 and len({path.name.rpartition("-")[2] for path in parts}) == 1, parts
