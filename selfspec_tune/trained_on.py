"""Hashes of the texts a checkpoint was trained on, kept beside it, so that prompts it has seen are noticed. No torch.

    MODEL/trained_on.npy    uint64, ascending. The last number is the limit: hashes from it on were not kept.

A text is reduced to its words, without case and white space. Every run of 8 words (a shingle, after Broder 1997,
"On the resemblance and containment of documents") has a 64-bit hash, and so has the text as a whole. Of all of them the
`CAPACITY` smallest are kept, so that the same shingle is kept or dropped in every text. Up to that number nothing is
lost; of 100 million words that never repeat, one shingle in 24 is left, in 34 MB, after three to five minutes.

Nothing can be read out of the file, but whoever has a text can test whether it was trained on.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from selfspec_tune.errors import UserError
from selfspec_tune.files import temporary_beside

FILE_NAME = "trained_on.npy"
SHINGLE = 8
"""Words of a shingle."""
CAPACITY = 1 << 22
"""Hashes kept, 8 bytes each."""
PENDING = 1 << 20
"""New hashes gathered before they are sorted in; with the sorting they take up to 150 MB."""
NO_LIMIT = (1 << 64) - 1
WHOLE_SHIFT = 8
"""Hashes of whole texts are this many bits shorter: among the smallest, they are the last to be dropped."""
TEMPLATE_SHARE = 4
"""A shingle in more than one of so many texts is a template's, and says nothing of the single text."""

Hashes = npt.NDArray[np.uint64]
# Chinese and Japanese are written without spaces: there each character counts as a word.
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\s\u3040-\u30ff\u3400-\u9fff]+")


@dataclass(frozen=True)
class Overlap:
    """Of `total` texts, `found` were trained on."""

    found: int
    total: int


class TrainedOn:
    """The hashes of trained texts; texts can be added.

    Args:
        stored: contents of the file, ascending, the limit last.
    """

    def __init__(self, stored: Hashes | None = None) -> None:
        self.stored = np.array([NO_LIMIT], dtype=np.uint64) if stored is None else stored
        self.pending = array("Q")

    def add(self, parts: Iterable[str]) -> None:
        """Add one document, given in parts such as a prompt and its completion; each part counts as a whole too."""
        words = [found for part in parts if (found := _words(part))]
        self.pending.extend(_shingles([word for part in words for word in part]))
        self.pending.extend(map(_whole, words))
        if len(self.pending) >= PENDING:
            self._sort_in()

    def hashes(self) -> Hashes:
        """Return the contents of the file: the hashes kept, ascending, and the limit."""
        self._sort_in()
        return self.stored

    def merge(self, stored: Hashes) -> None:
        """Add the hashes that another process has kept, see `hashes`."""
        self._sort_in()
        limit = min(self.stored[-1], stored[-1])
        kept = np.union1d(self.stored[:-1], stored[:-1])
        kept = kept[kept < limit]
        if len(kept) > CAPACITY:
            kept, limit = kept[:CAPACITY], kept[CAPACITY]
        self.stored = np.append(kept, limit)

    def write(self, directory: Path) -> Path:
        """Write the file into `directory`, atomically, and return its path."""
        self._sort_in()
        path = directory / FILE_NAME
        with temporary_beside(path) as temporary, temporary.open("wb") as handle:
            np.save(handle, self.stored)
            handle.flush()
            os.fsync(handle.fileno())
        return path

    def count(self, shingles: Hashes) -> tuple[int, int]:
        """Return how many of some hashes can be looked up, being below the limit, and how many of these are known."""
        self._sort_in()
        asked = shingles[shingles < self.stored[-1]]
        known = self.stored[np.searchsorted(self.stored, asked)] == asked
        return len(asked), int(known.sum())

    def has_seen(self, shingles: Hashes, whole: int) -> bool:
        """Whether a text was trained on: as a whole, or at least half of its shingles.

        Where only a sample of m can be looked up, it must be half and two standard deviations, √m, more: a text that
        shares a third of its shingles is then taken for a known one in less than 2 of 100 cases, and fewer than
        4 shingles say nothing.
        """
        if self.count(np.array([whole], dtype=np.uint64))[1]:
            return True
        asked, known = self.count(shingles)
        margin = 0.0 if self.stored[-1] == NO_LIMIT else math.sqrt(asked)
        return asked > 0 and known >= asked / 2 + margin

    def _sort_in(self) -> None:
        if not self.pending:
            return
        limit = self.stored[-1]
        kept = np.concatenate([self.stored[:-1], np.array(self.pending, dtype=np.uint64)])
        kept.sort()  # np.unique of so many takes half a minute
        kept = kept[np.append(True, kept[1:] != kept[:-1]) & (kept < limit)]
        if len(kept) > CAPACITY:
            kept, limit = kept[:CAPACITY], kept[CAPACITY]
        self.stored, self.pending = np.append(kept, limit), array("Q")


def read(directory: Path) -> TrainedOn | None:
    """Read what the checkpoint in `directory` was trained on; None where no run of ours has said it.

    Raises:
        UserError: the file is broken.
    """
    path = directory / FILE_NAME
    if not path.is_file():
        return None
    try:
        stored = np.load(path, allow_pickle=False)
        fits = stored.dtype == np.uint64 and stored.ndim == 1 and len(stored) > 0
        whole = fits and bool((stored[1:] > stored[:-1]).all())
    except (OSError, ValueError, EOFError, AttributeError):
        whole = False
    if not whole:
        raise UserError(
            f"{path} is damaged", allowed="ascending 64-bit hashes of the texts trained on", command=f"rm {path}"
        )
    return TrainedOn(stored)


def overlap(directory: Path, texts: Sequence[str]) -> Overlap | None:
    """Return how many of some texts were trained on; None where the checkpoint does not say, or no text has a word.

    What more than a quarter of the different texts have in common, such as instructions, is not counted for any.

    Args:
        directory: of the checkpoint.
        texts: such as the prompts of a sweep, without chat template.

    Raises:
        UserError: the file in `directory` is broken.
    """
    known = read(directory)
    if known is None:
        return None
    asked = [(_unique(_shingles(words)), _whole(words)) for text in texts if (words := _words(text))]
    if not asked:
        return None
    template = _common({whole: shingles for shingles, whole in asked}.values())
    found = 0
    for shingles, whole in asked:
        own = np.setdiff1d(shingles, template, assume_unique=True)
        found += known.has_seen(own if len(own) else shingles, whole)
    return Overlap(found, len(texts))


def notices(directory: Path | None, texts: Sequence[str], *, what: str, flattered: str) -> list[str]:
    """Return one line that says how many texts were trained on; none where no text was, or nobody can tell.

    Args:
        directory: of the checkpoint; None for a hub name.
        texts: see `overlap`.
        what: name of the texts, in the plural.
        flattered: what comes out too good on them.

    Raises:
        UserError: the file in `directory` is broken.
    """
    seen = overlap(directory, texts) if directory is not None else None
    if seen is None or not seen.found:
        return []
    occur = "occurs" if seen.found == 1 else "occur"
    return [
        f"{seen.found} of {seen.total} {what} {occur} in the data this checkpoint was trained on: "
        f"{flattered} is flattered; use held-out {what}"
    ]


def contents(messages: Iterable[Any]) -> list[str]:
    """Return the texts of chat messages but for the system's, which many conversations share."""
    said = [m for m in messages if isinstance(m, dict) and m.get("role") not in ("system", "developer")]
    return [m["content"] for m in said if isinstance(m.get("content"), str)]


def _words(text: str) -> list[str]:
    return _WORD.findall(text.casefold())


def _shingles(words: list[str]) -> Iterator[int]:
    return (_hash(words[start : start + SHINGLE]) for start in range(len(words) - SHINGLE + 1))


def _whole(words: list[str]) -> int:
    return _hash(words) >> WHOLE_SHIFT


def _hash(words: list[str]) -> int:
    data = " ".join(words).encode("utf-8", "surrogatepass")  # JSON can hold half a character
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")


def _unique(hashes: Iterator[int]) -> Hashes:
    return np.unique(np.array(array("Q", hashes), dtype=np.uint64))


def _common(texts: Iterable[Hashes]) -> Hashes:
    """Return the shingles that occur in more than one of `TEMPLATE_SHARE` texts, and at least in two."""
    each = list(texts)
    values, counts = np.unique(np.concatenate(each), return_counts=True)
    return values[counts > max(1, len(each) / TEMPLATE_SHARE)]
