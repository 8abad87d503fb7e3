"""The draft vocabulary: which tokens a draft may propose, ranked by frequency, and its file beside the checkpoint.

A draft that leaves rare tokens out reads fewer rows of the LM head (FR-Spec, arXiv 2502.14856). What it leaves out the
target still emits: verification uses the whole head. Counts tokens; knows neither text nor model.
"""

from __future__ import annotations

import itertools
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from selfspec_tune.artifact import check_fingerprint, fingerprint
from selfspec_tune.errors import UserError
from selfspec_tune.files import read_json, write_json

FILE_NAME = "draft_vocab.json"
SCHEMA_VERSION = 1
SIZES = (1024, 2048, 4096, 8192, 16384, 32768)
"""Sizes whose coverage is measured, besides that of the whole ranking."""
HELD_OUT_ONE_IN = 10
"""Of each source, the last token in so many is held out when coverage is measured."""


@dataclass(frozen=True)
class DraftVocab:
    """The contents of the file.

    Attributes:
        checkpoint_fingerprint: of the checkpoint, see `artifact.fingerprint`.
        vocab_size: V, rows of the head.
        special: ids of special and end tokens, which every draft may propose.
        ranked: ids a draft may propose: special ones, then those seen, the most frequent first, the smaller id first
            among equals.
        num_tokens: tokens counted.
        coverage: size N → share of held-out tokens that are among the first N.
        source: what was counted.
    """

    checkpoint_fingerprint: str
    vocab_size: int
    special: list[int]
    ranked: list[int]
    num_tokens: int
    coverage: dict[str, float]
    source: list[str]
    schema_version: int = SCHEMA_VERSION


class TokenCounts:
    """Tokens of one or more sources, kept in their order so that the end of each can be held out.

    Memory: 4 bytes a token.

    Args:
        vocab_size: V; tokens must be below.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._tokens: dict[str, array[int]] = {}

    @property
    def num_tokens(self) -> int:
        """Tokens counted."""
        return sum(map(len, self._tokens.values()))

    def add(self, source: str, pieces: Iterable[Sequence[int]]) -> None:
        """Count the tokens of every piece of a source; UserError for a token the model does not have."""
        tokens = self._tokens.setdefault(source, array("i"))
        for piece in pieces:
            if piece and max(piece) >= self.vocab_size:
                raise UserError(
                    "the tokenizer has tokens that the model does not know",
                    got=max(piece),
                    allowed=f"below {self.vocab_size}",
                )
            tokens.extend(piece)

    def draft_vocab(self, checkpoint: Path, special: Iterable[int], size: int) -> DraftVocab:
        """Rank all tokens counted, special ones first, and keep `size` of them at most.

        Coverage is that of a ranking made without the held-out end of each source, measured on these ends: what is
        written has seen them too, so unseen text is covered about as said, or a little better.

        Raises:
            UserError: hardly a token was counted, or the special tokens alone are too many for `size`.
        """
        kept = sorted({token for token in special if 0 <= token < self.vocab_size})
        if size <= len(kept):
            raise UserError(
                "the draft vocabulary has no room besides the special tokens",
                got=size,
                allowed=f"{len(kept) + 1} or more",
                command="a larger --size",
            )
        cuts = {name: len(tokens) - len(tokens) // HELD_OUT_ONE_IN for name, tokens in self._tokens.items()}
        held_out = Counter(itertools.chain.from_iterable(t[cuts[name] :] for name, t in self._tokens.items()))
        if not held_out:
            raise UserError(
                "there are too few tokens to rank",
                got=self.num_tokens,
                allowed=f"{HELD_OUT_ONE_IN} or more, better some ten thousand",
                command="more --text, or --prompts with a larger --max-new-tokens",
            )
        seen = Counter(itertools.chain.from_iterable(t[: cuts[name]] for name, t in self._tokens.items()))
        ranked = rank(seen + held_out, kept)[:size]
        sizes = [*(number for number in SIZES if len(kept) < number < len(ranked)), len(ranked)]
        shares = coverage(rank(seen, kept), held_out, sizes)
        return DraftVocab(
            fingerprint(checkpoint),
            self.vocab_size,
            kept,
            ranked,
            self.num_tokens,
            {str(number): share for number, share in zip(sizes, shares, strict=True)},
            list(self._tokens),
        )


def rank(counts: Counter[int], special: Sequence[int]) -> list[int]:
    """Return `special` and the other tokens counted, each by falling frequency, the smaller id first among equals."""
    first = set(special)
    return sorted(first | counts.keys(), key=lambda token: (token not in first, -counts[token], token))


def coverage(ranked: Sequence[int], held_out: Counter[int], sizes: Sequence[int]) -> list[float]:
    """Return for each size N the share of the held-out tokens that are among the first N of a ranking."""
    within = [0, *itertools.accumulate(held_out[token] for token in ranked)]
    return [within[min(size, len(ranked))] / held_out.total() for size in sizes]


def write_draft_vocab(checkpoint: Path, vocab: DraftVocab) -> Path:
    """Write the file beside the checkpoint, atomically, and return its path."""
    path = checkpoint / FILE_NAME
    write_json(path, asdict(vocab))
    return path


def read_draft_vocab(checkpoint: Path) -> DraftVocab:
    """Read the file beside `checkpoint`.

    Raises:
        UserError: there is none, it is broken or of another schema, or it was written for other weights.
    """
    path, again = checkpoint / FILE_NAME, _command(checkpoint)
    if not path.is_file():
        raise UserError(f"{checkpoint} has no draft vocabulary", command=again)
    content = read_json(path)
    version = content.get("schema_version") if isinstance(content, dict) else None
    if version != SCHEMA_VERSION:
        raise UserError(f"{path} has an unknown schema", got=version, allowed=SCHEMA_VERSION, command=again)
    names = {field.name for field in fields(DraftVocab)}
    try:
        vocab = DraftVocab(**{name: value for name, value in content.items() if name in names})
    except TypeError as error:
        raise UserError(f"{path} is incomplete: {error}", command=again) from None
    check_fingerprint(checkpoint, str(vocab.checkpoint_fingerprint), f"{path} was written for other weights", again)
    _check_ids(path, vocab, again)
    return vocab


def load_draft_vocab(checkpoint: Path, size: int) -> list[int]:
    """Return the ids of the first `size` ranked tokens, special ones among them, by rising id.

    Raises:
        UserError: as `read_draft_vocab`; fewer tokens are ranked, or the special ones alone are more.
    """
    vocab = read_draft_vocab(checkpoint)
    least, most = max(1, len(vocab.special)), len(vocab.ranked)
    if not least <= size <= most:
        problem = f"{checkpoint / FILE_NAME} ranks fewer tokens"
        if size < least:
            problem = "so few tokens leave no room for the special ones"
        command = f"--draft-vocab {most}, or with more text {_command(checkpoint)}"
        raise UserError(problem, got=size, allowed=f"{least}..{most}", command=command)
    return sorted(vocab.ranked[:size])


def _check_ids(path: Path, vocab: DraftVocab, again: str) -> None:
    def is_id(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < vocab.vocab_size

    if (
        not isinstance(vocab.vocab_size, int)
        or not isinstance(vocab.special, list)
        or not isinstance(vocab.ranked, list)
    ):
        raise UserError(f"{path} is broken: vocab_size, special and ranked are a number and two lists", command=again)
    wrong = next((value for value in [*vocab.special, *vocab.ranked] if not is_id(value)), None)
    if wrong is not None:
        raise UserError(
            f"{path} has an id that is no token of the model",
            got=wrong,
            allowed=f"0..{vocab.vocab_size - 1}",
            command=again,
        )
    if len(set(vocab.ranked)) != len(vocab.ranked):
        raise UserError(f"{path} ranks a token twice", command=again)
    if set(vocab.ranked[: len(vocab.special)]) != set(vocab.special):
        raise UserError(f"{path} does not rank the special tokens first", command=again)


def _command(checkpoint: Path) -> str:
    return f"selfspec draft-vocab {checkpoint} --text FILE.jsonl"
