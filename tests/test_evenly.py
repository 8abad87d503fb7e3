from __future__ import annotations

from selfspec_tune.evenly import spread_evenly


def test_items_are_taken_from_all_over() -> None:
    assert spread_evenly(range(3), 3) == [0, 1, 2]
    assert spread_evenly(range(10), 5) == [1, 3, 5, 7, 9]
    assert spread_evenly(range(10), 4) == [1, 3, 6, 8]
    assert spread_evenly(range(100), 1) == [50]
    assert spread_evenly(range(7), 3) == [1, 3, 5]
    assert spread_evenly([1, 2], 4) == [1, 2]
