"""From records to packed sequences of token ids: split, shuffle, tokenize, cut. Knows nothing of the model."""

from __future__ import annotations

import hashlib
import random
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from selfspec_tune.errors import UserError
from selfspec_tune.train.records import Record, read_records

HELD_OUT_ONE_IN = 50
"""Without eval_data, one record in so many is held out."""
POOL, LARGEST_POOL = 16, 20_000
"""Sequences are drawn from a pool of 16 times their number (up to 20 000): a few long records must not fill them."""


@dataclass(frozen=True)
class Sequences:
    """Packed sequences.

    Attributes:
        ids: [N, T] int32 token ids.
        counted: [N, T] bool; False for tokens that are read but not predicted (the prompt of a completion).
        states: [N, 2, T, d] of a frozen target, see `targets.py`; None where they are not kept.
        records: those of which a sequence holds a part, in their order.
    """

    ids: torch.Tensor
    counted: torch.Tensor
    states: torch.Tensor | None = None
    records: tuple[Record, ...] = ()

    def __len__(self) -> int:
        return len(self.ids)

    def digest(self) -> str:
        """Return a SHA-256 of the tokens: a resumed run must read the same ones."""
        hashed = hashlib.sha256(self.ids.numpy().tobytes())
        hashed.update(self.counted.numpy().tobytes())
        return hashed.hexdigest()

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
    text_field: str = "text",
    messages_field: str = "messages",
    seed: int = 0,
) -> tuple[Sequences, Sequences]:
    """Read, split and pack; return training and held-out sequences. No record is in both.

    Args:
        train_data: sources as in `records.read_records`.
        eval_data: held-out sources; empty to hold out one training record in 50, chosen by a hash of its text.
        tokenizer: a transformers tokenizer with an end-of-text token.
        length: T, tokens per sequence.
        num_train: training sequences to return at most; not much more is tokenized than they need.
        num_eval: held-out sequences to return at most.
        text_field: field of the text.
        messages_field: field of chat messages.
        seed: of the order of training records; the held-out sequences do not depend on it.

    Raises:
        UserError: a missing source, a bad record, no data, or less than one sequence of it.
    """
    records = _read_all(train_data, tokenizer, text_field, messages_field)
    if eval_data:
        held_out = _read_all(eval_data, tokenizer, text_field, messages_field)
        known = {record.digest() for record in held_out}
        training = [record for record in records if record.digest() not in known]
    else:
        held_out = [record for record in records if _is_held_out(record)]
        training = [record for record in records if not _is_held_out(record)]
        if not held_out:
            raise UserError(
                f"none of the {len(records)} training records fell into the held-out share (one in {HELD_OUT_ONE_IN})",
                command="--eval-data FILE",
            )
    if not training:
        raise UserError("no training record is left: all of them are held out too", got=", ".join(train_data))
    random.Random(0).shuffle(held_out)
    random.Random(seed).shuffle(training)
    evaluation = _pack(held_out, tokenizer, length, num_eval, what="held-out")
    return _pack(training, tokenizer, length, num_train, what="training"), evaluation


def load_held_out(
    sources: Sequence[str],
    tokenizer: Any,
    *,
    length: int,
    num: int,
    text_field: str = "text",
    messages_field: str = "messages",
) -> Sequences:
    """Return `num` sequences at most of text that is only measured; arguments and errors as of `load_sequences`."""
    records = _read_all(sources, tokenizer, text_field, messages_field)
    random.Random(0).shuffle(records)
    return _pack(records, tokenizer, length, num, what="held-out")


def _read_all(sources: Sequence[str], tokenizer: Any, text_field: str, messages_field: str) -> list[Record]:
    records: list[Record] = []
    for source in sources:
        records += read_records(source, tokenizer, text_field=text_field, messages_field=messages_field)
    if not records:
        raise UserError("the data hold no text", got=", ".join(sources))
    return records


def _is_held_out(record: Record) -> bool:
    return record.digest() % HELD_OUT_ONE_IN == 0


def _pack(records: list[Record], tokenizer: Any, length: int, limit: int, *, what: str) -> Sequences:
    """Tokenize records in turn, an end-of-text token behind each, and draw `limit` sequences of them at most."""
    if tokenizer.eos_token_id is None:
        raise UserError("the tokenizer has no end-of-text token", allowed="a tokenizer with eos_token")
    ids, counted, ends = array("i"), array("b"), array("q")
    pool = max(limit, min(POOL * limit, LARGEST_POOL))
    for record in records:
        record_ids, num_prompt = _tokenize(record, tokenizer)
        ids.extend(record_ids)
        counted.extend([0] * num_prompt + [1] * (len(record_ids) - num_prompt))
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
    return Sequences(
        torch.tensor(ids[: count * length], dtype=torch.int32).view(count, length)[drawn],
        torch.tensor(counted[: count * length], dtype=torch.bool).view(count, length)[drawn],
        records=tuple(records[index] for index in _held(ends, drawn, length)),
    )


def _held(ends: Sequence[int], drawn: list[int], length: int) -> list[int]:
    """Return the indices of the records of which a drawn sequence holds a token; `ends` is where each one ends."""
    held: set[int] = set()
    for row in drawn:
        held.update(range(bisect_right(ends, row * length), bisect_left(ends, (row + 1) * length) + 1))
    return sorted(held)


def _tokenize(record: Record, tokenizer: Any) -> tuple[list[int], int]:
    """Return the ids of a record, end-of-text token included, and how many of them are its prompt's."""
    prompt = tokenizer(record.prompt, verbose=False)["input_ids"] if record.prompt else []
    # A template writes its own special tokens, and a completion continues its prompt.
    plain = not record.prompt and not record.templated
    text = tokenizer(record.text, add_special_tokens=plain, verbose=False)["input_ids"]
    eos = tokenizer.eos_token_id
    ends = text[-1:] == [eos] or (record.templated and record.text.rstrip().endswith(tokenizer.eos_token))
    return [*prompt, *text, *([] if ends else [eos])], len(prompt)
