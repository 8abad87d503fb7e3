"""Held-out text becomes the documents and windows that the module says, and the report says the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from selfspec_tune.errors import UserError
from selfspec_tune.model.load import load_tokenizer
from selfspec_tune.regress import documents


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> Any:
    return load_tokenizer(str(checkpoint))


def read(paths: list[Path], tokenizer: Any, **options: Any) -> list[documents.TextSet]:
    settings = {"text_field": "text", "window_length": 4, "max_windows": 9, "max_documents": 100, **options}
    return documents.read_sets(paths, tokenizer, **settings)


def texts(found: documents.TextSet) -> list[list[bytes]]:
    return [[bytes(window.tolist()) for window in document.windows] for document in found.documents]


def test_windows_do_not_overlap_and_stay_with_their_document(tokenizer: Any, tmp_path: Path, jsonl: Callable) -> None:
    path = jsonl(tmp_path / "x.jsonl", [{"text": "abcdef"}, {"text": "ghijk"}, {"text": "l"}, {"text": ""}])
    [found] = read([path], tokenizer)
    # Six bytes leave a window of two; of five the last one is too short to be scored; documents are not joined.
    assert texts(found) == [[b"abcd", b"ef"], [b"ghij"]]
    assert [document.scored for document in found.documents] == [4, 3]
    assert (found.name, found.available) == ("x.jsonl", 3)
    [first] = read([path], tokenizer, max_windows=1)
    assert texts(first) == [[b"abcd"], [b"ghij"]] and [document.cut for document in first.documents] == [True, False]


def test_each_window_of_a_txt_is_a_document_and_each_file_a_set(
    tokenizer: Any, tmp_path: Path, jsonl: Callable
) -> None:
    path = jsonl(tmp_path / "x.jsonl", [{"text": "abcdef"}, {"text": "ghij"}, {"text": "mnop"}])
    (tmp_path / "x.txt").write_text("mnopqrst", encoding="utf-8")
    both = read([path, tmp_path / "x.txt"], tokenizer)
    assert texts(both[1]) == [[b"mnop"], [b"qrst"]] and both[1].available == 2
    both = read([path, tmp_path / "x.txt"], tokenizer, max_documents=1)
    assert [texts(each) for each in both] == [[[b"ghij"]], [[b"qrst"]]]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "x.txt").write_text("abcd", encoding="utf-8")
    names = [each.name for each in read([tmp_path / "x.txt", tmp_path / "other" / "x.txt"], tokenizer)]
    assert names == [str(tmp_path / "x.txt"), str(tmp_path / "other" / "x.txt")]
    with pytest.raises(UserError, match="given twice"):
        read([path, tmp_path / "." / "x.jsonl"], tokenizer)


def test_bos_stride_and_truncation_are_said(checkpoint: Path, tmp_path: Path, jsonl: Callable) -> None:
    from tokenizers.processors import TemplateProcessing

    own = load_tokenizer(str(checkpoint))
    path = jsonl(tmp_path / "x.jsonl", [{"text": "abcdef"}, {"text": "ghi"}])
    sizes = {"window_length": 4, "max_windows": 1}
    said = documents.describe(read([path], own, **sizes), own, **sizes)
    assert said["bos"] == "none is added" and "1 of 2 documents were longer" in said["truncation"]
    assert said["stride"].startswith("4 tokens") and "first token of each is not scored" in said["stride"]
    own.bos_token = "<end>"
    own.backend_tokenizer.post_processor = TemplateProcessing(single="<end> $A", special_tokens=[("<end>", 256)])
    found = read([path], own, **sizes)
    assert found[0].documents[0].windows[0].tolist() == [256, *b"abc"]
    assert documents.describe(found, own, **sizes)["bos"].startswith("<end> before each document")


def test_text_that_cannot_be_read_is_named(tokenizer: Any, tmp_path: Path, jsonl: Callable) -> None:
    with pytest.raises(UserError, match=r"x.jsonl: record 2 has no text in 'text'"):
        read([jsonl(tmp_path / "x.jsonl", [{"text": "abc"}, {"body": "abc"}])], tokenizer)
    with pytest.raises(UserError, match="does not exist"):
        read([tmp_path / "missing.txt"], tokenizer)
    with pytest.raises(UserError, match="cannot be read"):
        read([tmp_path / "x.pdf"], tokenizer)
    (tmp_path / "short.txt").write_text("a", encoding="utf-8")
    with pytest.raises(UserError, match=r"short.txt has no text"):
        read([tmp_path / "short.txt"], tokenizer)
