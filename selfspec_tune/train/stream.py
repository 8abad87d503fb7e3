"""Training sequences read while training, and resumed where they were; each process reads its own part of the data."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from selfspec_tune.train.data import (
    Sequences,
    check_vocabulary,
    is_held_out,
    nothing_held_out,
    nothing_left,
    read_all,
    sequences_of,
)
from selfspec_tune.train.packing import Layout
from selfspec_tune.train.records import BadRecord, Parser, Record, Skipped, make_parser
from selfspec_tune.train.shuffle import BLOCK, ShuffledRows
from selfspec_tune.train.sources import Source, open_source
from selfspec_tune.trained_on import TrainedOn

HELD_OUT_POOL = 2
"""Held-out sequences are drawn from so many times their number."""


def open_stream(
    train_data: Sequence[str],
    eval_data: Sequence[str],
    tokenizer: Any,
    *,
    length: int,
    num_eval: int,
    packing: bool = True,
    seed: int = 0,
    rank: int = 0,
    ranks: int = 1,
    block: int = BLOCK,
    **reading: Any,
) -> tuple[Stream, Sequences]:
    """Return a stream of training sequences and held-out ones. No record is in both. All ranks hold out the same.

    Without eval_data the beginning of the data is read until enough of it is held out.

    Args:
        rank: of this process.
        ranks: number of processes.
        block: rows that are shuffled together.

    Other arguments and errors as of `data.load_sequences`.
    """
    layout, parser = Layout(tokenizer, length, packing), make_parser(tokenizer, **reading)
    if eval_data:
        held_out = read_all(eval_data, parser)
        known = {record.digest() for record in held_out}
    else:
        held_out, known = _hold_out(_open(train_data, 0, 1), parser, layout, num_eval), None
    random.Random(0).shuffle(held_out)
    evaluation = sequences_of(held_out, layout, parser, num_eval, what="held-out")
    rows = ShuffledRows(_open(train_data, rank, ranks), f"{seed} {rank}", block)
    return Stream(rows, parser, layout, known, train_data, rank=rank, ranks=ranks), evaluation


def _open(sources: Sequence[str], rank: int, ranks: int) -> list[Source]:
    # A small source is not always the first process's.
    return [
        open_source(source, streaming=True, rank=(rank + index) % ranks, ranks=ranks)
        for index, source in enumerate(sources)
    ]


def _hold_out(sources: list[Source], parser: Parser, layout: Layout, num: int) -> list[Record]:
    """Return held-out records from the beginning of the data, enough for `num` sequences if there are."""
    rows = ShuffledRows(sources, "held out")
    quiet = replace(parser, skipped=None if parser.skipped is None else Skipped())  # all of them are read again
    found: list[Record] = []
    tokens = number = 0
    while tokens < HELD_OUT_POOL * num * layout.length:
        row = rows.next()
        if rows.epoch > 0:
            break
        number += 1
        record = quiet.parse(*row)
        if record is not None and is_held_out(record):
            found.append(record)
            tokens += len(layout.tokenize(record)[0]) if layout.packing else layout.length
    if not found:
        raise nothing_held_out(number)
    return found


class Stream:
    """Training sequences in the order of `rows`; its methods are those of `Sequences`, but it only goes forward.

    Args:
        rows: this rank's part of the data.
        parser: makes records of them.
        layout: how records lie in sequences.
        held_out: digests of records that are not trained on; None for those chosen by their own digest.
        sources: names of the data.
        rank: of this process.
        ranks: number of processes; each has a stream of its own, and all of them one state.
    """

    def __init__(
        self,
        rows: ShuffledRows,
        parser: Parser,
        layout: Layout,
        held_out: Collection[int] | None,
        sources: Sequence[str],
        *,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        self.rows, self.parser, self.layout, self.held_out = rows, parser, layout, held_out
        self.sources, self.rank, self.ranks = tuple(sources), rank, ranks
        # Records that are bad are bad in every epoch, and counted in the first.
        self.again = replace(parser, skipped=None if parser.skipped is None else Skipped())
        self.vocab_size: int | None = None
        self.seen = TrainedOn()
        self.num_read = 0
        self.last_used = -1
        self.ids: list[int] = []
        self.counted: list[bool] = []

    @property
    def skipped(self) -> tuple[str, ...]:
        """What to say of this rank's bad records so far."""
        return self.parser.said()

    def digest(self) -> str:
        """Return a hash of the files' sizes; that their contents are the same is checked when a state is loaded."""
        sizes = [Path(name).stat().st_size if Path(name).is_file() else None for name in self.sources]
        return hashlib.sha256(json.dumps([self.sources, sizes]).encode()).hexdigest()

    def check_vocabulary(self, vocab_size: int) -> None:
        """Have every batch raise a UserError if the model does not know one of its tokens."""
        self.vocab_size = vocab_size

    def hash_into(self, seen: TrainedOn) -> None:
        """Add what all ranks have read to the texts trained on. All ranks call this."""
        for stored in self._of_all_ranks(self.seen.hashes()):
            seen.merge(stored)

    def batch(self, first: int, count: int, *, seed: int) -> tuple[torch.Tensor, ...]:
        """Return ids [count, T] and counted [count, T] bool of this rank's next sequences.

        Args:
            first: how many sequences all ranks have read before, and the ranks before this one now.
            count: number of sequences; the same in all calls, and on all ranks.
            seed: of no use here: the rows are in their order.

        Raises:
            UserError: a bad record that is not skipped, or no record to train on.
            ValueError: `first` is not where the stream is.
        """
        if first != self.num_read * self.ranks + self.rank * count:
            raise ValueError(f"the stream is at sequence {self.num_read} of rank {self.rank}, not at {first}")
        self.num_read += count
        found = [self._sequence() for _ in range(count)]
        ids = torch.tensor([ids for ids, _ in found])
        if self.vocab_size is not None:
            check_vocabulary(ids, self.vocab_size)
        return ids, torch.tensor([counted for _, counted in found])

    def state_dict(self) -> dict[str, Any]:
        """Return where the streams of all ranks are. All ranks call this, and get the same."""
        skipped = self.parser.skipped
        own = {
            "rows": self.rows.state_dict(),
            "num_read": self.num_read,
            "last_used": self.last_used,
            "left": len(self.ids),
            "skipped": None if skipped is None else (skipped.total, list(skipped.named)),
            "seen": torch.from_numpy(self.seen.hashes().view(np.int64)),
        }
        return {"ranks": self._of_all_ranks(own)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to where `state_dict` was taken.

        Raises:
            UserError: the sources have changed since.
        """
        own = state["ranks"][self.rank]
        self.rows.load_state_dict(own["rows"])
        self.num_read, self.last_used = own["num_read"], own["last_used"]
        self.seen = TrainedOn(own["seen"].numpy().view(np.uint64))
        self.ids, self.counted = [], []
        if own["left"]:  # what is left is the end of the record read last
            record = self.parser.parse(*self.rows.block[self.rows.taken - 1])
            assert record is not None
            ids, counted = self.layout.lay(record)
            self.ids, self.counted = ids[-own["left"] :], counted[-own["left"] :]
        if self.parser.skipped is not None and own["skipped"] is not None:
            self.parser.skipped.total, self.parser.skipped.named = own["skipped"][0], list(own["skipped"][1])

    def _sequence(self) -> tuple[list[int], list[bool]]:
        length = self.layout.length
        while len(self.ids) < length:
            ids, counted = self._next()
            self.ids += ids
            self.counted += counted
        found = self.ids[:length], self.counted[:length]
        self.ids, self.counted = self.ids[length:], self.counted[length:]
        return found

    def _next(self) -> tuple[list[int], list[bool]]:
        """Return the tokens of the next record to train on, and note that it was read."""
        while True:
            row = self.rows.next()
            if self.rows.epoch > self.last_used + 1:
                raise nothing_left(self.sources, self.parser)
            parser = self.parser if self.rows.epoch == 0 else self.again
            record = parser.parse(*row)
            if record is None or is_held_out(record, self.held_out):
                continue
            try:
                found = self.layout.lay(record)
            except BadRecord as error:
                parser.refuse(error)
                continue
            self.last_used = self.rows.epoch
            self.seen.add(record.parts)
            return found

    def _of_all_ranks(self, own: Any) -> list[Any]:
        if self.ranks == 1:
            return [own]
        every: list[Any] = [None] * self.ranks
        torch.distributed.all_gather_object(every, own)
        return every
