"""Endless rows of some sources in a shuffled order that can be resumed. Knows nothing of records and tokens.

The library `datasets` can shuffle a stream, but loses what is in its buffer when it is resumed. Here the rows of a
block are read together and put in an order drawn from the seed and the block's number, so that the beginning of the
block and a count say all: resumed rows read their block again, and go on with the same one.
"""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Sequence
from typing import Any

from selfspec_tune.errors import UserError
from selfspec_tune.train.sources import Row, Source

BLOCK, BLOCK_CHARACTERS = 10_000, 1 << 25
"""Rows that are shuffled together; fewer if they are longer than so many characters."""


class ShuffledRows:
    """Endless rows of some sources: each epoch has every row once, sources taking turns, shuffled in blocks.

    Args:
        sources: to read from.
        key: of the order, besides the numbers of epoch and block.
        block: rows of a block at most.

    Attributes:
        epoch: how often all rows were read before.
    """

    def __init__(self, sources: Sequence[Source], key: str, block: int = BLOCK) -> None:
        self.sources, self.key, self.size = sources, key, block
        self.epoch, self.number, self.taken = 0, -1, 0
        self.block: list[tuple[str, Row]] = []
        self.start: dict[str, Any] = {}
        self._begin([None] * len(sources), range(len(sources)))

    def next(self) -> tuple[str, Row]:
        """Return a row with its place.

        Raises:
            UserError: there is none at all, or a source cannot be read.
        """
        if self.taken == len(self.block):
            self._next_block()
        self.taken += 1
        return self.block[self.taken - 1]

    def state_dict(self) -> dict[str, Any]:
        """Return plain values that say where the rows are."""
        about = {"epoch": self.epoch, "number": self.number, "taken": self.taken, "start": self.start}
        return {**about, "digest": self._digest()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to where `state_dict` was taken.

        Raises:
            UserError: the sources have changed since.
        """
        self.epoch, self.number = state["epoch"], state["number"]
        if self.number >= 0:
            self._begin(state["start"]["positions"], state["start"]["turns"])
            self._read_block()
        if self._digest() != state["digest"]:
            raise UserError(
                "the training data are not what they were before", command="--output OTHER_DIR to start anew"
            )
        self.taken = state["taken"]

    def _begin(self, positions: Sequence[Any], turns: Sequence[int]) -> None:
        for source, position in zip(self.sources, positions, strict=True):
            source.go_to(position)
        self.iterators = [source.rows() for source in self.sources]
        self.turns = deque(turns)

    def _next_block(self) -> None:
        self.number += 1
        self._read_block()
        if not self.block:
            self.epoch, self.number = self.epoch + 1, 0
            self._begin([None] * len(self.sources), range(len(self.sources)))
            self._read_block()
        if not self.block:
            raise UserError("the training data have no record for this process", allowed="one per process at least")

    def _read_block(self) -> None:
        self.start = {"positions": [source.position() for source in self.sources], "turns": list(self.turns)}
        self.block, self.taken = [], 0
        characters = 0
        while self.turns and len(self.block) < self.size and characters < BLOCK_CHARACTERS:
            found = next(self.iterators[self.turns[0]], None)
            if found is None:
                self.turns.popleft()
                continue
            self.turns.rotate(-1)
            self.block.append(found)
            characters += len(found[1]) if isinstance(found[1], bytes | str) else len(str(found[1]))
        random.Random(f"{self.key} {self.epoch} {self.number}").shuffle(self.block)

    def _digest(self) -> str:
        return hashlib.sha256(repr(self.block).encode("utf-8", "surrogatepass")).hexdigest()
