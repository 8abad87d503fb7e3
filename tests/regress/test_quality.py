"""Perplexity: the windows are what the module says, the numbers what a plain computation gives, the gate shuts."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from selfspec_tune.errors import UserError
from selfspec_tune.model.load import load_model, load_tokenizer
from selfspec_tune.progress import silent
from selfspec_tune.regress import quality


@pytest.mark.parametrize(
    ("text", "value"), [("2%", 0.02), ("0.02", 0.02), (" 0.5 % ", 0.005), ("0", 0.0), ("150%", 1.5)]
)
def test_an_increase_is_read(text: str, value: float) -> None:
    assert quality.parse_increase(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["", "%", "two", "-1%", "-0.01", "nan", "nan%", "inf", "inf%", "2", "2%%", "0,02"])
def test_a_bad_increase_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="max_perplexity_increase"):
        quality.parse_increase(text)


def test_windows_are_spread_evenly() -> None:
    assert quality.spread(range(3), 3) == [0, 1, 2]
    assert quality.spread(range(10), 5) == [1, 3, 5, 7, 9]
    assert quality.spread(range(100), 1) == [50]
    assert quality.spread(range(7), 3) == [1, 3, 5]


def read(paths: list[Path], tokenizer: Any, **options: Any) -> list[list[int]]:
    settings = {"text_field": "text", "window_length": 4, "max_documents": 100, **options}
    return [window.tolist() for window in quality.read_windows(paths, tokenizer, **settings)]


def test_windows_do_not_overlap_and_nothing_is_added(checkpoint: Path, tmp_path: Path, jsonl: Callable) -> None:
    tokenizer = load_tokenizer(str(checkpoint))
    path = jsonl(tmp_path / "x.jsonl", [{"text": "abcdef"}, {"text": "ghijk"}, {"text": "l"}, {"text": ""}])
    # Six bytes leave a window of two; of five the last one is too short to be scored; documents are not joined.
    assert [bytes(window) for window in read([path], tokenizer)] == [b"abcd", b"ef", b"ghij"]
    (tmp_path / "x.txt").write_text("mnopqr", encoding="utf-8")
    assert [bytes(window) for window in read([tmp_path / "x.txt"], tokenizer)] == [b"mnop", b"qr"]
    both = read([path, tmp_path / "x.txt"], tokenizer, max_documents=1)
    assert [bytes(window) for window in both] == [b"ef", b"qr"]


def test_text_that_cannot_be_read_is_named(checkpoint: Path, tmp_path: Path, jsonl: Callable) -> None:
    tokenizer = load_tokenizer(str(checkpoint))
    with pytest.raises(UserError, match=r"x.jsonl: record 2 has no text in 'text'"):
        read([jsonl(tmp_path / "x.jsonl", [{"text": "abc"}, {"body": "abc"}])], tokenizer)
    with pytest.raises(UserError, match="does not exist"):
        read([tmp_path / "missing.txt"], tokenizer)
    with pytest.raises(UserError, match="cannot be read"):
        read([tmp_path / "x.pdf"], tokenizer)
    (tmp_path / "short.txt").write_text("a", encoding="utf-8")
    with pytest.raises(UserError, match=r"short.txt has no text"):
        read([tmp_path / "short.txt"], tokenizer)


def test_nll_is_that_of_a_plain_forward(checkpoint: Path) -> None:
    model = load_model(str(checkpoint))
    generator = torch.Generator().manual_seed(0)
    lengths = (2, 5, quality.HEAD_CHUNK + 1, 2 * quality.HEAD_CHUNK + 7)
    windows = [torch.randint(256, (length,), generator=generator) for length in lengths]
    expected = []
    for window in windows:
        log_probabilities = model(input_ids=window[None]).logits[0].double().log_softmax(-1)
        expected.append(-log_probabilities[:-1].gather(1, window[1:, None]).sum())
    calls: list[tuple[str, int, int]] = []
    nll = quality.window_nll(model, windows, lambda *call: calls.append(call), "stage")
    assert nll.dtype == torch.float64
    torch.testing.assert_close(nll, torch.stack(expected), rtol=1e-5, atol=0)
    assert calls == [("stage", done, 4) for done in (1, 2, 3, 4)]


def test_an_unknown_token_is_refused(checkpoint: Path) -> None:
    with pytest.raises(UserError, match="does not know"):
        quality.window_nll(load_model(str(checkpoint)), [torch.tensor([1, 5000])], silent, "stage")


def test_the_same_numbers_give_exactly_one() -> None:
    nll = torch.rand(9, generator=torch.Generator().manual_seed(0)).double() * 100
    same = quality.compare(nll, nll.clone(), torch.full((9,), 31), max_increase=0.0)
    assert (same.ratio, same.interval, same.passed) == (1.0, (1.0, 1.0), True)


def test_ratio_weighs_tokens_and_the_limit_decides() -> None:
    base, counts = torch.tensor([100.0, 10.0]).double(), torch.tensor([90, 10])
    trained = base + torch.tensor([0.0, 5.0]).double()
    found = quality.compare(trained, base, counts, max_increase=0.05)
    assert found.ratio == pytest.approx(math.exp(5 / 100))
    assert (found.base, found.trained) == (pytest.approx(math.exp(1.1)), pytest.approx(math.exp(1.15)))
    assert found.tokens == 100 and found.limit == 1.05 and not found.passed
    assert quality.compare(trained, base, counts, max_increase=0.06).passed
    assert found.interval == (1.0, pytest.approx(math.exp(0.5)))  # only the first, only the second window drawn


def test_the_interval_is_paired() -> None:
    # Texts differ greatly in difficulty; the models differ by the same amount everywhere. Unpaired, this is wide.
    generator = torch.Generator().manual_seed(0)
    base, counts = torch.rand(40, generator=generator).double() * 500, torch.full((40,), 100)
    found = quality.compare(base + 1.0, base, counts, max_increase=0.02)
    assert found.interval == (pytest.approx(math.exp(0.01)), pytest.approx(math.exp(0.01)))
    noisy = base + torch.randn(40, generator=generator).double() * 20
    found = quality.compare(noisy, base, counts, max_increase=0.02)
    low, high = found.interval
    # The mean of 40 differences of deviation 0.2 per token: a standard error of 0.0316, times 1.96 to each side.
    assert low < found.ratio < high
    assert math.log(high / low) == pytest.approx(2 * 1.96 * 0.2 / math.sqrt(40), rel=0.3)
    assert quality.compare(noisy, base, counts, max_increase=0.02) == found


def test_a_model_that_computes_nothing_useful_fails() -> None:
    base, counts = torch.tensor([10.0, 10.0]).double(), torch.tensor([5, 5])
    broken = quality.compare(base * math.nan, base, counts, max_increase=0.5)
    assert not broken.passed and broken.to_dict()["ratio"] is None
    huge = quality.compare(base * 1e6, base, counts, max_increase=0.5)
    assert not huge.passed and huge.to_dict()["trained"] is None


def test_other_vocabularies_are_refused(checkpoint: Path) -> None:
    ours, theirs = load_tokenizer(str(checkpoint)), load_tokenizer(str(checkpoint))
    quality.check_same_vocabulary(ours, theirs)
    theirs.add_tokens(["<new>"])
    with pytest.raises(UserError, match="'<new>' is no token in the model and 257 in the base"):
        quality.check_same_vocabulary(ours, theirs)
