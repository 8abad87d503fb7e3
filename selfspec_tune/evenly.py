"""Some of many, at even distances."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def spread_evenly(items: Sequence[T], count: int) -> list[T]:
    """Return `count` items at even distances, half of one before the first; all of them if there are no more."""
    if len(items) <= count:
        return list(items)
    return [items[(2 * index + 1) * len(items) // (2 * count)] for index in range(count)]
