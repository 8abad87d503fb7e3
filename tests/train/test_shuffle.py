from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from selfspec_tune.errors import UserError
from selfspec_tune.train.shuffle import ShuffledRows
from selfspec_tune.train.sources import open_source

Make = Callable[..., ShuffledRows]


@pytest.fixture
def make(tmp_path: Path, jsonl: Callable[..., Path]) -> Make:
    """Rows of two files, 12 named a and 5 named b."""
    for name, count in (("a", 12), ("b", 5)):
        jsonl(tmp_path / f"{name}.jsonl", [{"text": f"{name}{number}"} for number in range(count)])

    def rows(key: str = "key", block: int = 4) -> ShuffledRows:
        return ShuffledRows([open_source(str(tmp_path / f"{name}.jsonl")) for name in "ab"], key, block)

    return rows


def take(rows: ShuffledRows, count: int) -> list[str]:
    found = []
    for _ in range(count):
        _, row = rows.next()
        assert isinstance(row, bytes)
        found.append(json.loads(row)["text"])
    return found


ALL = sorted([f"a{n}" for n in range(12)] + [f"b{n}" for n in range(5)])


def test_every_epoch_has_every_row_once_in_an_order_of_its_own(make: Make) -> None:
    rows = make()
    epochs = []
    for number in range(3):
        epochs.append(take(rows, 17))
        assert rows.epoch == number
    assert all(sorted(epoch) == ALL for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert take(make(), 17) == epochs[0]
    assert take(make(key="other"), 17) != epochs[0]


def test_sources_take_turns_and_blocks_are_shuffled(make: Make) -> None:
    first = take(make(), 17)
    assert sorted(first[:4]) == ["a0", "a1", "b0", "b1"]
    assert sorted(first[8:12]) == ["a4", "a5", "a6", "b4"]  # b is over
    assert take(make(block=1), 4) == ["a0", "b0", "a1", "b1"]
    assert take(make(block=100), 17) != take(make(block=1), 17)


def test_long_rows_make_small_blocks(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selfspec_tune.train.shuffle.BLOCK_CHARACTERS", 1)
    rows = make()
    rows.next()
    assert len(rows.block) == 1


@pytest.mark.parametrize("before", range(0, 40, 3))
def test_rows_go_on_where_they_were(make: Make, before: int) -> None:
    straight = take(make(), 60)
    rows = make()
    take(rows, before)
    state = json.loads(json.dumps(rows.state_dict()))
    again = make()
    again.load_state_dict(state)
    assert again.state_dict() == state
    assert take(again, 60 - before) == straight[before:]


def test_changed_data_are_noticed(make: Make, tmp_path: Path) -> None:
    rows = make()
    take(rows, 6)
    state = rows.state_dict()
    file = tmp_path / "a.jsonl"
    file.write_text(file.read_text().replace("a3", "A3"))
    with pytest.raises(UserError, match="training data are not what they were"):
        make().load_state_dict(state)


def test_no_row_at_all_is_an_error(tmp_path: Path, jsonl: Callable[..., Any]) -> None:
    rows = ShuffledRows([open_source(str(jsonl(tmp_path / "none.jsonl", [])))], "key")
    with pytest.raises(UserError, match="no record for this process"):
        rows.next()
