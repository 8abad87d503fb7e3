"""Sources are read part by part and from any position on: every row once, each with its place."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from selfspec_tune.errors import UserError
from selfspec_tune.train.sources import Row, open_source

Make = Callable[..., Any]


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def source(tmp_path: Path, jsonl: Callable[..., Path]) -> Callable[[str], str]:
    """Make a source of a kind with 11 rows, numbered."""
    rows = [{"text": f"text {number}"} for number in range(11)]

    def make(kind: str) -> str:
        from datasets import Dataset

        if kind == "jsonl":
            file = tmp_path / "a.jsonl"
            file.write_text("\n" + "".join(json.dumps(row) + "\n\n" for row in rows))
            return str(file)
        if kind == "parquet":
            Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
            return str(tmp_path / "a.parquet")
        files = tmp_path / "set"
        files.mkdir()
        for number, part in enumerate((rows[:4], rows[4:6], rows[6:])):
            Dataset.from_list(part).to_parquet(files / f"train-{number:05d}-of-00003.parquet")
        Dataset.from_list(rows[:2]).to_parquet(files / "test-00000-of-00001.parquet")
        return str(files)

    return make


KINDS = ["jsonl", "parquet", "directory"]


def number(row: Row) -> int:
    fields = json.loads(row) if isinstance(row, bytes) else row
    assert isinstance(fields, dict)
    return int(fields["text"].removeprefix("text "))


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_come_in_order_with_their_places(source: Callable[[str], str], kind: str, streaming: bool) -> None:
    name = source(kind)
    places, rows = zip(*open_source(name, streaming=streaming).rows(), strict=True)
    assert [number(row) for row in rows] == list(range(11))
    expected = [f"{name}:{2 * n + 2}" if kind == "jsonl" else f"{name} row {n + 1}" for n in range(11)]
    assert list(places) == expected


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_each_row_belongs_to_one_part(source: Callable[[str], str], kind: str, ranks: int) -> None:
    name = source(kind)
    parts = [
        [number(row) for _, row in open_source(name, streaming=True, rank=rank, ranks=ranks).rows()]
        for rank in range(ranks)
    ]
    assert sorted(n for part in parts for n in part) == list(range(11))
    assert all(len(part) >= 2 for part in parts)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("before", [0, 1, 4, 5])
def test_a_position_says_where_to_go_on(source: Callable[[str], str], kind: str, ranks: int, before: int) -> None:
    name = source(kind)

    def fresh() -> Any:
        return open_source(name, streaming=True, rank=ranks - 1, ranks=ranks)

    all_rows = list(fresh().rows())
    first = fresh()
    assert list(islice(first.rows(), before)) == all_rows[:before]
    position = json.loads(json.dumps(first.position()))
    again = fresh()
    again.go_to(position)
    assert again.position() == position
    assert list(again.rows()) == all_rows[before:]
    assert list(again.rows()) == [] or kind != "jsonl"
    again.go_to(None)
    assert list(again.rows()) == all_rows


def test_a_text_is_one_row_of_the_first_part(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("one\n\ntwo\n")
    one = open_source(str(file))
    assert list(one.rows()) == [(str(file), "one\n\ntwo\n")]
    position = one.position()
    assert list(one.rows()) == []
    one.go_to(None)
    assert len(list(one.rows())) == 1
    one.go_to(position)
    assert list(one.rows()) == []
    assert list(open_source(str(file), rank=1, ranks=2).rows()) == []


def test_a_name_has_splits_and_slices(source: Callable[[str], str]) -> None:
    name = source("directory")
    assert len(list(open_source(f"{name}:test").rows())) == 2
    assert len(list(open_source(f"{name}:default:test", streaming=True).rows())) == 2
    assert len(list(open_source(f"{name}:train[:3]").rows())) == 3
    with pytest.raises(UserError, match="slice of a split cannot be streamed"):
        open_source(f"{name}:train[:3]", streaming=True)
    for streaming in (False, True):
        with pytest.raises(UserError, match="cannot be loaded"):
            open_source(f"{name}:nosuchsplit", streaming=streaming)


@pytest.mark.parametrize("name", ["missing.txt", "missing.jsonl", "missing.parquet"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match=f"{name} does not exist"):
        open_source(str(tmp_path / name))


def test_what_is_no_source_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,b\n")
    with pytest.raises(UserError, match="cannot be read"):
        open_source(str(tmp_path / "a.csv"))
    with pytest.raises(UserError, match="cannot be loaded"):
        open_source(str(tmp_path / "nothing"))


def test_a_damaged_table_is_named(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    file.write_bytes(b"PAR1 not really PAR1")
    with pytest.raises(UserError, match=r"a\.parquet"):
        list(open_source(str(file)).rows())
