"""Trackers of accelerate: a resumed run goes on in the run it began."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PROJECT = "selfspec"
FOLDERS = {"layer-skip": "tensorboard", "exit-head": "exit_head.tensorboard"}
"""Of the events of TensorBoard, in a run's output."""


def tracker_folder(output: Path, method: str) -> Path:
    """Return the folder for TensorBoard's events."""
    return output / FOLDERS[method]


def start_trackers(
    accelerator: Any, options: dict[str, Any], output: Path, run: str, *, resumed_at: int | None
) -> None:
    """Start what `--tracker` names; nothing where it names none. The output must exist.

    Args:
        accelerator: of the run.
        options: the run's identity, shown beside the curves.
        output: where wandb keeps its files, which is all there is of a run offline.
        run: id of the run, the same for all parts of it.
        resumed_at: step of the state the run goes on from; None at its start. TensorBoard drops what came after it;
            wandb takes no step twice, and goes on with the first new one.
    """
    accelerator.init_trackers(
        PROJECT,
        config={name: _plain(value) for name, value in options.items()} if resumed_at is None else None,
        init_kwargs={
            "wandb": {"id": run, "resume": "allow", "dir": str(output)},
            "tensorboard": {} if resumed_at is None else {"purge_step": resumed_at + 1},
        },
    )


def finish_trackers(accelerator: Any) -> None:
    """Have the trackers write what they hold."""
    for tracker in accelerator.trackers:
        tracker.finish()


def _plain(value: Any) -> bool | int | float | str:
    """Return a value as trackers take it: lists and None as JSON."""
    return value if isinstance(value, bool | int | float | str) else json.dumps(value)
