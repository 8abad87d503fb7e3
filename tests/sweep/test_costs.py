"""Costs are measured once, kept in a file of one model and machine, and known at every length."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from selfspec_tune.config import SweepConfig
from selfspec_tune.decode.drafters.prompt_lookup import PromptLookupDrafter
from selfspec_tune.decode.engine import Engine
from selfspec_tune.decode.policy import DraftCosts
from selfspec_tune.decode.requests import Request
from selfspec_tune.decode.sampling import SamplingParams
from selfspec_tune.errors import UserError
from selfspec_tune.model.decoder import LayeredDecoder
from selfspec_tune.sweep import costs as module
from selfspec_tune.sweep.costs import CostBook, contexts_that_fit
from selfspec_tune.sweep.objective import Costs

CONFIG = SweepConfig(max_draft_tokens=2, context_lengths=(64, 32), repeats=3)
REQUEST = Request("a", [1, 2, 3], 12)


@pytest.fixture
def fast(decoder: LayeredDecoder) -> Engine:
    return Engine(decoder, numerics="fast")


def book(engine: Engine, path: Path | None, config: SweepConfig = CONFIG, **params: Any) -> CostBook:
    return CostBook(engine, SamplingParams(**params), config, path)


@pytest.fixture
def measured(fast: Engine, tmp_path: Path) -> CostBook:
    """A book of a real model, written to costs.json."""
    found = book(fast, tmp_path / "costs.json")
    found.measure(REQUEST)
    return found


def refuse(*_: Any, **__: Any) -> Any:
    raise AssertionError("measured again")


@pytest.fixture
def no_clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function after whose call nothing may be measured."""

    def forbid() -> None:
        for name in ("measure_costs", "draft_costs", "bookkeeping_seconds"):
            monkeypatch.setattr(module, name, refuse)

    return forbid


def test_what_a_file_holds_is_not_measured_again(
    measured: CostBook, fast: Engine, no_clock: Callable[[], None]
) -> None:
    copying = measured.draft("copy", PromptLookupDrafter(), 40.4)
    assert measured.draft("copy", PromptLookupDrafter(), 40.0) is copying, "timed once per length"
    no_clock()
    again = book(fast, measured.path)
    again.read()
    again.measure(REQUEST)
    assert again.all == measured.all
    assert [(c.context_length, c.batch_size) for c in again.all] == [(32, 1), (64, 1)]
    assert len(again.all[0].samples["plain"]) == 3
    assert again.draft("copy", PromptLookupDrafter(), 40) == copying
    assert again.resamples(50, 3, seed=1) == measured.resamples(50, 3, seed=1)


def test_only_what_is_missing_is_measured(measured: CostBook, fast: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []

    def measure(engine: Engine, params: Any, *, context_length: int, overheads: Any, **_: Any) -> Costs:
        asked.append((context_length, engine.batch_size))
        changes = {"context_length": context_length, "batch_size": engine.batch_size, "overhead": overheads[0]}
        return replace(measured.all[0], **changes)

    monkeypatch.setattr(module, "measure_costs", measure)
    monkeypatch.setattr(module, "bookkeeping_seconds", lambda engine, *_: (engine.batch_size / 4, 0.0))
    more = book(fast, measured.path, replace(CONFIG, context_lengths=(32, 128, 64), batch_sizes=(3,)))
    more.read()
    more.measure(REQUEST)
    assert asked == [(128, 1), (32, 3), (64, 3), (128, 3)], "batch size 1 is always needed"
    assert [c.overhead for c in more.all if c.batch_size == 3] == [0.75] * 3
    again = book(fast, measured.path)
    again.read()
    assert again.all == more.all, "written beside what there was"


def test_lengths_that_the_context_cannot_hold_are_left_out() -> None:
    config = replace(CONFIG, context_lengths=(4096, 128, 1021, 1022, 128))
    assert contexts_that_fit(config, 1024) == [128, 1021]


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ("model", ("num_layers 5", "num_layers 6", "parameters")),
        ("numerics", ("numerics fast", "numerics exact")),
        ("machine", ("threads", "64")),
        ("draft tokens", ("max_draft_tokens 2", "max_draft_tokens 3")),
        ("sampling", ("sampling greedy", "sampling [0, 1.0]")),
    ],
)
def test_costs_of_something_else_are_refused(
    change: str, names: tuple[str, ...], measured: CostBook, fast: Engine, engine: Engine, save_tiny: Any
) -> None:
    path, other, params = measured.path, book(fast, measured.path), {}
    assert path is not None
    if change == "model":
        from tiny import tiny_model

        other = book(Engine(LayeredDecoder(tiny_model()), numerics="fast"), path)
    elif change == "numerics":
        other = book(engine, path)
    elif change == "machine":
        content = json.loads(path.read_text())
        content["measured_for"]["measured_on"]["threads"] = 64
        path.write_text(json.dumps(content))
    elif change == "draft tokens":
        other = book(fast, path, replace(CONFIG, max_draft_tokens=3))
    else:
        params = {"temperature": 0.5}
        other = book(fast, path, **params)
    with pytest.raises(UserError, match="measured for something else") as caught:
        other.read()
    assert str(path) in caught.value.what and "--costs" in str(caught.value.command)
    for name in names:
        assert name in str(caught.value)
    if change != "model":
        assert "hidden_size" not in str(caught.value), "only what differs"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "holds no costs"),
        ('{"cells": []}', "holds no costs"),
        ("costs: null", "cannot be read as costs"),
        ("costs: [{}]", "cannot be read as costs"),
        ('costs: [{"one_layer": 3}]', "cannot be read as costs"),
        ("costs: [], drafts: [{}]", "cannot be read as costs"),
    ],
)
def test_a_broken_file_is_a_user_error(text: str, message: str, fast: Engine, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    other = book(fast, path)
    if text.startswith("costs"):
        text = text.replace("costs:", '"costs":').replace("drafts:", '"drafts":')
        text = f'{{"measured_for": {json.dumps(other._key)}, {text}}}'
    path.write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        other.read()
    assert "costs.json" in caught.value.what


def test_without_a_file_nothing_is_read_or_written(fast: Engine, tmp_path: Path) -> None:
    found = book(fast, None, replace(CONFIG, context_lengths=(32,), repeats=1))
    found.read()
    found.measure(REQUEST)
    assert len(found.all) == 1 and list(tmp_path.rglob("*.json")) == []
    assert found.at(900) == found.all[0], "a single length has to do for all"


def test_costs_are_known_at_every_length(fast: Engine) -> None:
    plain = Costs(5, 10.0, {1: 2.0}, {1: 8.0}, 1.0, 1.0, {1: 1.0}, context_length=100)
    found = book(fast, None)
    for length, seconds, batch in ((100, 10.0, 1), (200, 20.0, 1), (400, 60.0, 1), (100, 7.0, 4)):
        found._costs[length, batch] = replace(plain, context_length=length, plain=seconds, batch_size=batch)
    asked = {50: 5, 100: 10, 150: 15, 200: 20, 300: 40, 400: 60, 500: 80}
    assert {length: found.at(length).plain for length in asked} == asked
    assert found.at(300, batch_size=4).plain == 7


def test_drafters_are_charged_the_overheads_in_passes(fast: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    found, asked = book(fast, None), []
    plain = Costs(5, 8.0, {1: 2.0}, {1: 8.0}, 1.0, 1.0, {1: 1.0}, overhead=2.0, plain_overhead=4.0, context_length=100)
    found._costs[100, 1] = plain

    def timed(*_: Any, **how: Any) -> DraftCosts:
        asked.append(how)
        return DraftCosts(0.1, (1.0,))

    monkeypatch.setattr(module, "draft_costs", timed)
    found.draft("copy", PromptLookupDrafter(), 70.6)
    assert (asked[0]["context_length"], asked[0]["repeats"]) == (71, 3)
    assert (asked[0]["overhead"], asked[0]["plain_overhead"]) == (0.25, 0.5)
    assert set(asdict(found._drafts["copy", 71])) == {"cost_ratio", "verify_ratio", "overhead"}
