"""How long work reports on itself without knowing who listens: functions of what it has done and of what it found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Progress = Callable[[str, int, int], None]
"""Called as `progress(stage, done, total)`; `stage` is a few words, `done` of `total` units are finished."""

Report = Callable[[dict[str, Any]], None]
"""Called with a JSON object for every step and evaluation of a training run, or {"notice": a sentence}."""


def silent(stage: str, done: int, total: int) -> None:
    """The progress function that reports nothing."""


def unheard(record: dict[str, Any]) -> None:
    """The report function that tells nobody."""
