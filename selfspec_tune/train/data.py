"""Training and held-out sequences from sources: read, split, shuffle, pack. Knows nothing of the model.

What is too large to be read at once is read by `stream.py`, with the same split.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Protocol

import torch

from selfspec_tune.errors import UserError
from selfspec_tune.train.packing import Layout, pack
from selfspec_tune.train.records import Parser, Record, make_parser, read_records
from selfspec_tune.trained_on import TrainedOn

HELD_OUT_ONE_IN = 50
"""Without eval_data, one record in so many is held out."""


class Training(Protocol):
    """What a run trains on: `Sequences`, or a stream of them."""

    @property
    def skipped(self) -> tuple[str, ...]: ...
    def digest(self) -> str: ...
    def check_vocabulary(self, vocab_size: int) -> None: ...
    def hash_into(self, seen: TrainedOn) -> None: ...
    def batch(self, first: int, count: int, *, seed: int) -> tuple[torch.Tensor, ...]: ...


@dataclass(frozen=True)
class Sequences:
    """Sequences of tokens.

    Attributes:
        ids: [N, T] int32 token ids.
        counted: [N, T] bool; False for tokens that are read but not predicted: a prompt's, padding.
        states: [N, 2, T, d] of a frozen target, see `targets.py`; None where they are not kept.
        records: those of which a sequence holds a part, in their order.
        skipped: what to say of bad records that were left out.
    """

    ids: torch.Tensor
    counted: torch.Tensor
    states: torch.Tensor | None = None
    records: tuple[Record, ...] = ()
    skipped: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.ids)

    def digest(self) -> str:
        """Return a SHA-256 of the tokens: a resumed run must read the same ones."""
        hashed = hashlib.sha256(self.ids.numpy().tobytes())
        hashed.update(self.counted.numpy().tobytes())
        return hashed.hexdigest()

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise a UserError if the model does not know a token."""
        check_vocabulary(self.ids, vocab_size)

    def hash_into(self, seen: TrainedOn) -> None:
        """Add what was read to the texts trained on. All ranks call this."""
        for record in self.records:
            seen.add(record.parts)

    def read(self, rows: list[int]) -> tuple[torch.Tensor, ...]:
        """Return ids and counted [rows, T] of some sequences, and their states where they are kept."""
        known = () if self.states is None else (self.states[rows],)
        return (self.ids[rows].long(), self.counted[rows], *known)

    def batch(self, first: int, count: int, *, seed: int) -> tuple[torch.Tensor, ...]:
        """Return sequences `first .. first + count - 1` of an endless shuffled stream, as `read` does.

        Every epoch is a permutation drawn from `seed` and the epoch's number: the position is all the state there is.
        """
        rows = []
        for position in range(first, first + count):
            epoch, index = divmod(position, len(self))
            rows.append(_permutation(len(self), seed, epoch)[index])
        return self.read(rows)


@lru_cache(maxsize=2)
def _permutation(size: int, seed: int, epoch: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order: list[int] = torch.randperm(size, generator=generator).tolist()
    return order


def load_sequences(
    train_data: Sequence[str],
    eval_data: Sequence[str],
    tokenizer: Any,
    *,
    length: int,
    num_train: int,
    num_eval: int,
    packing: bool = True,
    seed: int = 0,
    **reading: Any,
) -> tuple[Sequences, Sequences]:
    """Read, split and pack; return training and held-out sequences. No record is in both.

    Args:
        train_data: sources as in `sources.open_source`.
        eval_data: held-out sources; empty to hold out one training record in 50, chosen by a hash of its text.
        tokenizer: a transformers tokenizer with an end-of-text token.
        length: T, tokens per sequence.
        num_train: training sequences to return at most; not much more is tokenized than they need.
        num_eval: held-out sequences to return at most.
        packing: cut sequences from records in a row; else one record each, cut or padded.
        seed: of the order of training records; the held-out sequences do not depend on it.
        reading: options of `records.make_parser`; what was skipped, of the held-out data too, the first result says.

    Raises:
        UserError: a missing source, a bad record, no data, or less than one sequence of it.
    """
    layout, parser = Layout(tokenizer, length, packing), make_parser(tokenizer, **reading)
    records = read_all(train_data, parser)
    if eval_data:
        held_out = read_all(eval_data, parser)
        known = {record.digest() for record in held_out}
        training = [record for record in records if not is_held_out(record, known)]
    else:
        held_out = [record for record in records if is_held_out(record)]
        training = [record for record in records if not is_held_out(record)]
        if not held_out:
            raise nothing_held_out(len(records))
    if not training:
        raise nothing_left(train_data, parser)
    random.Random(0).shuffle(held_out)
    random.Random(seed).shuffle(training)
    evaluation = sequences_of(held_out, layout, parser, num_eval, what="held-out")
    trained = sequences_of(training, layout, parser, num_train, what="training")
    return replace(trained, skipped=parser.said()), evaluation


def load_general(
    sources: Sequence[str],
    tokenizer: Any,
    *,
    length: int,
    num: int,
    what: str = "general",
    measured: Collection[int] = (),
    **reading: Any,
) -> Sequences:
    """Return `num` packed sequences at most of general text, of every source as many.

    Args:
        sources: as in `sources.open_source`.
        tokenizer: a transformers tokenizer with an end-of-text token.
        length: T, tokens per sequence.
        num: sequences to return at most.
        what: name of the data, for errors.
        measured: digests of records to leave out, because perplexity is measured on them.
        reading: options of `records.make_parser`.

    Raises:
        UserError: a missing source, a bad record, or a source with less than one sequence of text.
    """
    layout, parser, parts = Layout(tokenizer, length, packing=True), make_parser(tokenizer, **reading), []
    for index, source in enumerate(sources):
        records = [record for record in read_all([source], parser) if record.digest() not in measured]
        if not records:
            raise UserError(f"no record of the {what} data is left: perplexity is measured on all of them", got=source)
        random.Random(0).shuffle(records)
        share = (num + index) // len(sources)  # adds up to num
        if share:
            parts.append(sequences_of(records, layout, parser, share, what=what))
    return Sequences(
        torch.cat([part.ids for part in parts]),
        torch.cat([part.counted for part in parts]),
        records=tuple(record for part in parts for record in part.records),
        skipped=parser.said(),
    )


def read_all(sources: Sequence[str], parser: Parser) -> list[Record]:
    """Return the records of all sources.

    Raises:
        UserError: a missing source, a bad record that is not skipped, or no record at all.
    """
    records: list[Record] = []
    for source in sources:
        records += read_records(source, parser)
    if not records:
        raise UserError("the data hold no text", got="\n".join([", ".join(sources), *parser.said()]))
    return records


def sequences_of(records: list[Record], layout: Layout, parser: Parser, limit: int, *, what: str) -> Sequences:
    """Return sequences of records; arguments and errors as of `packing.pack`."""
    packed = pack(records, layout, parser, limit, what=what)
    return Sequences(packed.ids, packed.counted, records=packed.records)


def is_held_out(record: Record, known: Collection[int] | None = None) -> bool:
    """Return whether a record is held out: because it is among the digests `known`, or by its own digest."""
    return record.digest() % HELD_OUT_ONE_IN == 0 if known is None else record.digest() in known


def nothing_held_out(num_records: int) -> UserError:
    """Return the error of training data with no record to hold out."""
    return UserError(
        f"none of the {num_records} training records fell into the held-out share (one in {HELD_OUT_ONE_IN})",
        command="--eval-data FILE",
    )


def nothing_left(sources: Sequence[str], parser: Parser) -> UserError:
    """Return the error of training data with no record to train on."""
    got = "\n".join([", ".join(sources), *parser.said()])
    return UserError("no training record is left: all of them are held out too", got=got)


def check_vocabulary(ids: torch.Tensor, vocab_size: int) -> None:
    """Raise a UserError if a model with `vocab_size` tokens does not know one of `ids`."""
    if int(ids.max()) >= vocab_size:
        raise UserError("the tokenizer has tokens that the model does not know", got=f"token {int(ids.max())}")
