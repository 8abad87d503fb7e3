"""Records as token ids, and the cutting of sequences from them. Knows nothing of files, splits and the model."""

from __future__ import annotations

import random
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from selfspec_tune.errors import UserError
from selfspec_tune.train.records import BadRecord, Parser, Record

POOL, LARGEST_POOL = 16, 20_000
"""Sequences are drawn from a pool of 16 times their number (up to 20 000): a few long records must not fill them."""


@dataclass(frozen=True)
class Layout:
    """How records lie in sequences.

    Args:
        tokenizer: a transformers tokenizer with an end-of-text token; a fast one if parts of records are predicted.
        length: T, tokens per sequence.
        packing: sequences are cut from records in a row; else each holds one record, cut or padded.

    Raises:
        UserError: the tokenizer has no end-of-text token.
    """

    tokenizer: Any
    length: int
    packing: bool = True

    def __post_init__(self) -> None:
        if self.tokenizer.eos_token_id is None:
            raise UserError("the tokenizer has no end-of-text token", allowed="a tokenizer with eos_token")

    def tokenize(self, record: Record) -> tuple[list[int], list[bool]]:
        """Return the ids of a record, end-of-text token included, and which of them are predicted."""
        tokenizer, spans = self.tokenizer, record.spans
        prompt = tokenizer(record.prompt, verbose=False)["input_ids"] if record.prompt else []
        # A template writes its own special tokens, and a completion continues its prompt.
        plain = not record.prompt and not record.templated
        found = tokenizer(
            record.text, add_special_tokens=plain, verbose=False, return_offsets_mapping=spans is not None
        )
        text, eos = found["input_ids"], tokenizer.eos_token_id
        said = [True] * len(text) if spans is None else _within(found["offset_mapping"], spans)
        if text[-1:] != [eos] and not (record.templated and record.text.rstrip().endswith(tokenizer.eos_token)):
            text, said = [*text, eos], [*said, spans is None]
        return [*prompt, *text], [False] * len(prompt) + said

    def lay(self, record: Record) -> tuple[list[int], list[bool]]:
        """Return the ids of a record and which of them are predicted: as they are, or as a sequence of T."""
        return self.tokenize(record) if self.packing else self.alone(record)

    def alone(self, record: Record) -> tuple[list[int], list[bool]]:
        """Return a sequence of T tokens that holds one record only, cut or padded with end-of-text tokens.

        Padding comes last, where no token of the record attends to it, and is not predicted.

        Raises:
            BadRecord: nothing of what is left is predicted.
        """
        ids, counted = self.tokenize(record)
        ids, counted = ids[: self.length], counted[: self.length]
        if not any(counted[1:]):
            raise BadRecord(
                f"{record.where}: nothing is to be predicted in its first {self.length} tokens",
                command="--sequence-length N",
            )
        missing = self.length - len(ids)
        return ids + [self.tokenizer.eos_token_id] * missing, counted + [False] * missing


@dataclass(frozen=True)
class Packed:
    """What `pack` returns: ids [N, T] int32, counted [N, T] bool, and the records of which they hold a part."""

    ids: torch.Tensor
    counted: torch.Tensor
    records: tuple[Record, ...]


def pack(records: Sequence[Record], layout: Layout, parser: Parser, limit: int, *, what: str) -> Packed:
    """Make `limit` sequences of records in turn, at most; not much more is tokenized than they need.

    Args:
        records: in an order of no meaning.
        layout: how they lie in sequences.
        parser: what to do with records that cannot be used.
        limit: N at most.
        what: the name of the data.

    Raises:
        UserError: less than one sequence, or a record that cannot be used and is not skipped.
    """
    if layout.packing:
        return _packed(records, layout, limit, what)
    rows: list[tuple[list[int], list[bool]]] = []
    used: list[Record] = []
    for record in records:
        try:
            rows.append(layout.alone(record))
            used.append(record)
        except BadRecord as error:
            parser.refuse(error)
        if len(rows) == limit:
            break
    if not rows:
        raise UserError(f"the {what} data have no record that can be used", command="--sequence-length N")
    ids, counted = zip(*rows, strict=True)
    return Packed(torch.tensor(ids, dtype=torch.int32), torch.tensor(counted), tuple(used))


def _packed(records: Sequence[Record], layout: Layout, limit: int, what: str) -> Packed:
    length = layout.length
    ids, counted, ends = array("i"), array("b"), array("q")
    pool = max(limit, min(POOL * limit, LARGEST_POOL))
    for record in records:
        record_ids, said = layout.tokenize(record)
        ids.extend(record_ids)
        counted.extend(said)
        ends.append(len(ids))
        if len(ids) >= length * pool:
            break
    count = min(pool, len(ids) // length)
    if count == 0:
        raise UserError(
            f"the {what} data are too short for one sequence",
            got=f"{len(ids)} tokens",
            allowed=f"at least sequence_length = {length} tokens",
            command="--sequence-length N",
        )
    drawn = sorted(random.Random(0).sample(range(count), min(limit, count)))
    return Packed(
        torch.tensor(ids[: count * length], dtype=torch.int32).view(count, length)[drawn],
        torch.tensor(counted[: count * length], dtype=torch.bool).view(count, length)[drawn],
        tuple(records[index] for index in _held(ends, drawn, length)),
    )


def _held(ends: Sequence[int], drawn: list[int], length: int) -> list[int]:
    """Return the indices of the records of which a drawn sequence holds a token; `ends` is where each one ends."""
    held: set[int] = set()
    for row in drawn:
        held.update(range(bisect_right(ends, row * length), bisect_left(ends, (row + 1) * length) + 1))
    return sorted(held)


def _within(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> list[bool]:
    """Return which tokens hold a character of a span; both are ascending."""
    found, index = [], 0
    for start, end in offsets:
        while index < len(spans) and spans[index][1] <= start:
            index += 1
        found.append(index < len(spans) and end > spans[index][0] and start < spans[index][1])
    return found
