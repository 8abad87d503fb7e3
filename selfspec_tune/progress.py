"""How long work reports on itself without knowing who listens: a function of (stage, done, total)."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called as `progress(stage, done, total)`; `stage` is a few words, `done` of `total` units are finished."""


def silent(stage: str, done: int, total: int) -> None:
    """The progress function that reports nothing."""
