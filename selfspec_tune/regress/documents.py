"""Held-out text as documents, and documents as windows of tokens: what both models are scored on.

A document is tokenised as the tokenizer does by itself: nothing is added, not even a BOS token it would not add. It is
cut into windows that do not overlap (stride = window length); at most `max_windows` of them are used, from its start,
and a shorter last one is kept if it has two tokens. The first token of a window is read but not scored. A .jsonl record
is a document; a .txt file is one long text, so each of its windows counts as a document.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from selfspec_tune.errors import UserError
from selfspec_tune.evenly import spread_evenly
from selfspec_tune.files import read_jsonl, read_text


@dataclass(frozen=True)
class Document:
    """Windows of one document, int64 [2..window_length] each; `cut`: it was longer than what is used."""

    windows: list[Tensor]
    cut: bool = False

    @property
    def scored(self) -> int:
        """Tokens scored: all but the first of each window."""
        return sum(len(window) - 1 for window in self.windows)


@dataclass(frozen=True)
class TextSet:
    """The documents taken from one file, and how many the file has."""

    name: str
    documents: list[Document]
    available: int


def read_sets(
    paths: Sequence[Path],
    tokenizer: Any,
    *,
    text_field: str,
    window_length: int,
    max_windows: int,
    max_documents: int,
) -> list[TextSet]:
    """Read held-out text, one set per file.

    Args:
        paths: .txt or .jsonl files.
        tokenizer: used as it is, one call per document.
        text_field: field of the text in JSONL records.
        window_length: tokens per window, at least 2.
        max_windows: windows of a JSONL document used at most.
        max_documents: documents taken at most per file, spread evenly over it.

    Raises:
        UserError: a file given twice, a file or record without text, another kind of file, or a file without two
            tokens.
    """
    if len({path.resolve() for path in paths}) < len(paths):
        raise UserError("a text is given twice", got=", ".join(map(str, paths)), allowed="each file once")
    names = [path.name for path in paths]
    sets = []
    for path in paths:
        if path.suffix == ".txt":
            windows = _windows(read_text(path), tokenizer, window_length)
            taken, available = [Document([window]) for window in spread_evenly(windows, max_documents)], len(windows)
        else:
            texts = _records(path, text_field)
            cut = (_windows(text, tokenizer, window_length) for text in spread_evenly(texts, max_documents))
            taken = [Document(each[:max_windows], len(each) > max_windows) for each in cut if each]
            available = len(texts)
        if not taken:
            raise UserError(f"{path} has no text of two tokens", allowed="held-out text, the more the better")
        sets.append(TextSet(path.name if names.count(path.name) == 1 else str(path), taken, available))
    return sets


def describe(sets: Iterable[TextSet], tokenizer: Any, *, window_length: int, max_windows: int) -> dict[str, str]:
    """Return in words how text becomes scored tokens: window, stride, BOS and truncation."""
    documents = [document for each in sets for document in each.documents]
    added = tokenizer.bos_token_id is not None and tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
    cut = sum(document.cut for document in documents)
    return {
        "window": f"{window_length} tokens; a shorter last one is kept",
        "stride": f"{window_length} tokens: windows do not overlap, and the first token of each is not scored",
        "bos": f"{tokenizer.bos_token} before each document, by the tokenizer" if added else "none is added",
        "truncation": f"at most {max_windows} x {window_length} tokens of a document, from its start: {cut} of "
        f"{len(documents)} documents were longer; each window of a .txt file counts as a document",
    }


def _windows(text: str, tokenizer: Any, window_length: int) -> list[Tensor]:
    ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"], dtype=torch.long)
    return [window for window in ids.split(window_length) if len(window) > 1]


def _records(path: Path, text_field: str) -> list[str]:
    if path.suffix != ".jsonl":
        raise UserError("this held-out text cannot be read", got=path, allowed=".txt or .jsonl files")
    texts = []
    for number, record in enumerate(read_jsonl(path), start=1):
        text = record.get(text_field)
        if not isinstance(text, str):
            fields = ", ".join(record) or "an empty record"
            raise UserError(
                f"{path}: record {number} has no text in {text_field!r}", got=fields, command="--text-field NAME"
            )
        if text:
            texts.append(text)
    return texts
