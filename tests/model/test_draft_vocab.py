"""Ranking tokens, measuring what the first N cover, and the file beside a checkpoint."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from selfspec_tune.errors import UserError
from selfspec_tune.model.draft_vocab import (
    FILE_NAME,
    TokenCounts,
    coverage,
    load_draft_vocab,
    rank,
    read_draft_vocab,
    write_draft_vocab,
)

VOCAB = 320
SPECIAL = [256, 300]


def counted(vocab_size: int = VOCAB) -> TokenCounts:
    """Two sources of 40 and 60 tokens: 7 is the most frequent, 5 and 6 are as frequent as each other."""
    counts = TokenCounts(vocab_size)
    counts.add("a", [[7] * 20, [5, 6] * 5, [9] * 6, [], [8] * 4])
    counts.add("b", [[7] * 30, [6, 5] * 10, [256] * 4, [11] * 6])
    return counts


@pytest.fixture
def written(save_tiny: Callable[..., Path]) -> Path:
    """A checkpoint with a draft vocabulary of 8 tokens beside it."""
    directory = save_tiny("ranked")
    write_draft_vocab(directory, counted().draft_vocab(directory, SPECIAL, 100))
    return directory


def test_ranked_by_frequency_special_tokens_first_and_the_smaller_id_among_equals() -> None:
    counts = Counter({4: 3, 2: 3, 9: 8, 1: 1, 7: 2})
    assert rank(counts, [1, 7, 5]) == [7, 1, 5, 9, 2, 4]


def test_coverage_is_the_share_of_held_out_tokens_among_the_first() -> None:
    held_out = Counter({5: 6, 3: 3, 77: 1})
    assert coverage([3, 5, 9], held_out, [1, 2, 3, 99]) == [0.3, 0.9, 0.9, 0.9]


def test_the_file_holds_all_tokens_seen_and_what_unseen_text_would_be_covered(written: Path) -> None:
    vocab = read_draft_vocab(written)
    assert vocab.special == SPECIAL
    assert vocab.ranked == [256, 300, 7, 5, 6, 9, 11, 8], "an unseen special token is ranked, an unseen other is not"
    assert (vocab.num_tokens, vocab.source, vocab.vocab_size) == (100, ["a", "b"], VOCAB)
    # Held out are the last 4 tokens of a (all 8) and the last 6 of b (all 11), which the rest never shows.
    assert vocab.coverage == {"8": 0.0}


def test_coverage_is_measured_at_round_sizes_below_that_of_the_ranking(save_tiny: Callable[..., Path]) -> None:
    counts = TokenCounts(5000)
    counts.add("a", [[token for token in range(3000) for _ in range(3000 // (token + 1))], list(range(2990)) * 2])
    vocab = counts.draft_vocab(save_tiny("wide"), [0], 4096)
    assert list(vocab.coverage) == ["1024", "2048", "3000"]
    assert 0.3 < vocab.coverage["1024"] < vocab.coverage["2048"] < vocab.coverage["3000"] <= 1


def test_no_more_than_the_size_asked_for_is_kept(save_tiny: Callable[..., Path]) -> None:
    directory = save_tiny("few")
    assert counted().draft_vocab(directory, SPECIAL, 4).ranked == [256, 300, 7, 5]
    with pytest.raises(UserError, match="no room besides the special tokens"):
        counted().draft_vocab(directory, SPECIAL, 2)


def test_tokens_the_head_does_not_have() -> None:
    """A tokenizer may hold more tokens than the head has rows; the other way round there is nothing to see."""
    with pytest.raises(UserError, match="does not know"):
        counted(vocab_size=200)


def test_special_tokens_that_the_head_does_not_have_are_left_out(save_tiny: Callable[..., Path]) -> None:
    vocab = counted().draft_vocab(save_tiny("special"), [256, 320, 999], 100)
    assert vocab.special == [256] and max(vocab.ranked) < VOCAB


def test_hardly_any_token_is_a_user_error(save_tiny: Callable[..., Path]) -> None:
    counts = TokenCounts(VOCAB)
    counts.add("a", [[1, 2, 3]])
    with pytest.raises(UserError, match="too few tokens"):
        counts.draft_vocab(save_tiny("empty"), SPECIAL, 100)


def test_the_first_n_ranked_are_loaded_by_rising_id(written: Path) -> None:
    assert load_draft_vocab(written, 5) == [5, 6, 7, 256, 300]
    assert load_draft_vocab(written, 2) == SPECIAL
    assert len(load_draft_vocab(written, 8)) == 8


@pytest.mark.parametrize("size, message", [(9, "ranks fewer tokens"), (1, "the special ones"), (0, "the special ones")])
def test_sizes_the_file_does_not_have(written: Path, size: int, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        load_draft_vocab(written, size)
    assert "2..8" in str(caught.value) and "selfspec draft-vocab" in str(caught.value)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"schema_version": 2}, "unknown schema"),
        ({"checkpoint_fingerprint": "0" * 64}, "other weights"),
        ({"checkpoint_fingerprint": None}, "other weights"),
        ({"ranked": [256, 300, 7, 320]}, "no token of the model"),
        ({"ranked": [256, 300, 7, -1]}, "no token of the model"),
        ({"ranked": [256, 300, 7, "5"]}, "no token of the model"),
        ({"ranked": [256, 300, 7, 7]}, "ranks a token twice"),
        ({"ranked": [256, 7, 300, 5]}, "special tokens first"),
        ({"ranked": None}, "is broken"),
    ],
)
def test_a_file_that_cannot_be_right_is_refused(written: Path, change: dict[str, Any], message: str) -> None:
    path = written / FILE_NAME
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UserError, match=message) as caught:
        load_draft_vocab(written, 4)
    assert f"selfspec draft-vocab {written}" in str(caught.value)


def test_a_missing_incomplete_or_torn_file_is_refused(written: Path) -> None:
    path = written / FILE_NAME
    content = path.read_text()
    path.write_text(content[:40])
    with pytest.raises(UserError, match="not valid JSON"):
        load_draft_vocab(written, 4)
    path.write_text("[1]")
    with pytest.raises(UserError, match="unknown schema"):
        load_draft_vocab(written, 4)
    path.write_text('{"schema_version": 1}')
    with pytest.raises(UserError, match="is incomplete"):
        load_draft_vocab(written, 4)
    path.unlink()
    with pytest.raises(UserError, match="has no draft vocabulary"):
        load_draft_vocab(written, 4)
