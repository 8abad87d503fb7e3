"""Tables and sentences say what the result holds, and cannot be misread."""

from __future__ import annotations

import shlex
from dataclasses import fields
from typing import Any

import pytest
from sweep.example import example_result

from selfspec_tune.config import DecodeConfig, SweepConfig, TrainConfig, flag
from selfspec_tune.decode.drafters.make import DraftSettings
from selfspec_tune.sweep import tables, words


def test_rows_of_a_deep_model_are_thinned() -> None:
    assert tables.shown_exits(30, 32, {7}) == list(range(1, 30))
    shown = tables.shown_exits(81, 32, {7, 8})
    assert {1, 7, 8, 80} <= set(shown) and len(shown) <= 34


def test_a_thinned_table_keeps_the_exits_that_matter() -> None:
    result = example_result(pays=False)
    assert result["better_outside_window"]["exit_layer"] == 1
    assert tables.notable_exits(result) == {1, 9}  # copying was chosen: it has no exit
    assert tables.notable_exits(example_result()) == {10}


def test_the_starred_rows_are_the_best_exit_and_the_chosen_drafter() -> None:
    result = example_result()
    result["candidates"].reverse()
    exits, drafters = tables.exits_table(result, range(1, 30)), tables.drafters_table(result)
    assert exits.marked is not None and exits.rows[exits.marked][0] == "10 (33%)"
    assert drafters.marked is not None and drafters.rows[drafters.marked][0] == "layer-skip E=10"


def test_with_no_exit_in_the_window_nothing_is_starred() -> None:
    result = example_result() | {"window": [0.01, 0.02]}
    assert tables.exits_table(result, range(1, 30)).marked is None
    assert tables.best_in_window(result, "speedup_model") is None
    assert tables.costs_table(result).rows


def test_alpha_needed_to_break_even_is_where_the_prediction_is_one() -> None:
    # The example's τ is 0.98 of what its α gives, so break-even lies a little above α where the prediction is 1.
    result, one = example_result(), 1e-3
    rows = {row[0]: row for row in tables.exits_table(result, range(1, 30)).rows}
    for cells in tables.cells_by_exit(result).values():
        best = max(cells, key=lambda cell: cell["speedup_predicted"])
        needed = rows[tables.depth(best["exit_layer"], 30)][3]
        pays = best["speedup_predicted"] > 1.02
        assert (needed != "never" and float(needed) < best["alpha"] + one) or not pays


def test_what_can_never_pay_is_called_so() -> None:
    result = example_result(pays=False)
    rows = {row[0]: row for row in tables.needed_table(result, range(1, 30)).rows}
    assert rows["29 (97%)"][3:] == ["never", "–"]
    assert rows["9 (30%)"][2:] == ["0.036", "0.720", "0.684 short"]
    paying = {row[0]: row for row in tables.needed_table(example_result(), range(1, 30)).rows}
    assert paying["10 (33%)"][4] == "enough"


def test_where_speculation_is_off_no_exit_is_named() -> None:
    rows = tables.contexts_table(example_result()).rows
    assert list(rows[0]) == ["up to 128", "9 (30%)", "3", "1.34"]
    assert list(rows[2]) == ["up to 2048", "off", "–", "0.94"]


def test_only_what_rests_on_reference_texts_is_called_approximate() -> None:
    result = example_result() | {"approximate": True, "source": "reference"}
    assert tables.exits_table(result, [1]).title.endswith("(approximate)")
    assert not tables.costs_table(result).title.endswith("(approximate)")
    assert words.approximate(result) and not words.approximate(example_result())


def test_text_cannot_steer_a_terminal() -> None:
    assert (
        tables.printable("a\x1b[31mb\r\nc") == "a\N{REPLACEMENT CHARACTER}[31mb" + 2 * "\N{REPLACEMENT CHARACTER}" + "c"
    )
    assert tables.printable("naïve 日本") == "naïve 日本"


def test_the_verdict_names_drafter_speed_and_how_sure() -> None:
    yes, no = example_result(), example_result(pays=False)
    assert words.verdict(yes).startswith("Yes, ") and words.verdict(no).startswith("No, ")
    assert "first 10 of 30 layers" in words.verdict(yes)
    assert "×1.46 measured, ×1.40 predicted (1.33–1.46)" in words.verdict(yes)
    assert "×1.41" in words.how_sure(yes) and "6 other prompts" in words.how_sure(yes)
    yes["artifact"]["speedup_confirmed"]["identical"] = False
    assert "OTHERS" in words.how_sure(yes)
    yes["artifact"]["speedup_confirmed"] = None
    assert "not tried" in words.how_sure(yes) and "measured" not in words.verdict(yes)


def options(config: type) -> set[str]:
    return {flag(field.name) for field in fields(config)}


@pytest.mark.parametrize("drafter", ["layer-skip", "low-precision", "copy", "exit-head", "hybrid"])
def test_without_a_written_file_the_next_command_says_all_of_it(drafter: Any) -> None:
    result = example_result() | {"path": None, "model": "some one/model; x"}
    settings = DraftSettings(drafter, 7 if drafter == "layer-skip" else None, draft_group=64, draft_vocab=4096)
    result["artifact"] |= settings.to_artifact()
    typed = shlex.split(words.next_command(result))
    assert typed[:3] == ["selfspec", "decode", "some one/model; x"]
    given = dict(zip(typed[3::2], typed[4::2], strict=True))
    assert set(given) <= options(DecodeConfig)
    assert given["--drafter"] == drafter and given["--draft-vocab"] == "4096"
    assert ("--draft-group" in given) == (drafter in ("low-precision", "hybrid"))
    assert given.get("--exit-layer") == ("7" if drafter == "layer-skip" else None)


def test_the_next_command_follows_from_the_verdict() -> None:
    assert words.next_command(example_result()) == 'selfspec decode models/example-30 --prompt "..."'
    off = example_result(pays=False)
    off["model"] = "some one/model; x"
    train = shlex.split(words.next_command(off))
    assert train[:4] == ["selfspec", "train", "--model", off["model"]] and set(train[2::2]) <= options(TrainConfig)
    assert "does not pay either" in (words.better_outside(off) or "")
    off["better_outside_window"]["speedup_predicted"] = 1.3
    sweep = shlex.split(words.next_command(off))
    assert sweep[-2:] == ["--window", "0,1"] and sweep[2] == off["model"] and set(sweep[3::2]) <= options(SweepConfig)
    assert "try --window 0,1" in (words.better_outside(off) or "")
