"""An interrupted sweep goes on where it was; one that is done leaves nothing behind."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from selfspec_tune.config import SweepConfig
from selfspec_tune.decode.engine import Engine
from selfspec_tune.decode.requests import Request
from selfspec_tune.model.decoder import load_decoder
from selfspec_tune.sweep import costs as costs_module
from selfspec_tune.sweep import select
from selfspec_tune.sweep.kept import Kept, cache_directory
from selfspec_tune.sweep.profile import Profiler, Prompt

CONFIG = SweepConfig(
    num_prompts=5,
    max_new_tokens=12,
    max_draft_tokens=2,
    context_lengths=(32,),
    repeats=2,
    drafters=("layer-skip", "copy"),
    confirm=0,
)
PROFILED = ["3", "5", "7", "9", "11"]
"""Ids of the prompts profiled; those of `make_requests` are their lengths."""


def test_results_are_found_by_the_next_run(kept_here: Path) -> None:
    first = Kept({"a": 1})
    first.put("profile", "x", {"alpha": [0.1, 1 / 3]})
    first.put("profile", "y", None)
    Kept({"a": 1}, rank=1).put("profile", "z", 3)
    again = Kept({"a": 1})
    assert again.found == 3 and again.directory is not None and again.directory.parent == kept_here
    assert again.get("profile", "x") == {"alpha": [0.1, 1 / 3]} and again.get("profile", "z") == 3
    assert again.get("other", "x") is None
    assert Kept({"a": 2}).found == 0
    again.discard()
    assert not again.directory.exists() and Kept({"a": 1}).found == 0


def test_a_torn_line_is_lost_alone() -> None:
    first = Kept({})
    for name in "xy":
        first.put("s", name, name)
    assert first.directory is not None
    path = first.directory / "done-0.jsonl"
    path.write_text(path.read_text()[:-4])
    second = Kept({})
    assert (second.found, second.get("s", "x"), second.get("s", "y")) == (1, "x", None)
    second.put("s", "z", "z")
    second.put("s", "y", "again")
    third = Kept({})
    assert [third.get("s", name) for name in "xyz"] == ["x", "again", "z"]


def test_where_nothing_can_be_written_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    kept = Kept({})
    kept.put("s", "x", 1)
    assert (kept.directory, kept.found, kept.get("s", "x")) == (None, 0, 1)
    kept.discard()


def test_a_directory_that_vanishes_ends_the_keeping_only(kept_here: Path) -> None:
    kept = Kept({})
    Kept({}).discard()
    kept.put("s", "x", 1)
    assert (kept.directory, kept.get("s", "x")) == (None, 1)


def test_the_cache_is_where_the_user_wants_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache_directory() == tmp_path / "cache" / "selfspec"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_directory() == tmp_path / ".cache" / "selfspec"


class Runs:
    """Sweeps of one checkpoint, and what each of them decoded and measured."""

    def __init__(self, checkpoint: Path, requests: list[Request], monkeypatch: pytest.MonkeyPatch) -> None:
        self.checkpoint, self.patch = checkpoint, monkeypatch
        self.prompts = [Prompt(request) for request in requests]
        self.notices: list[str] = []
        self.profiled: list[str] = []
        self.tried: list[str] = []
        self.measured: list[int] = []

    def sweep(self, config: SweepConfig = CONFIG, stop_in: str = "", after: int = 0) -> select.Sweep:
        """Sweep; raise a KeyboardInterrupt in a stage once it has finished so many prompts."""
        for record in (self.notices, self.profiled, self.tried, self.measured):
            record.clear()
        engine = Engine(load_decoder(str(self.checkpoint)), numerics="fast")
        generate, tallies, measure = engine.generate, Profiler.tallies, costs_module.measure_costs

        def profile(profiler: Profiler, prompts: list[Prompt]) -> Any:
            if stop_in == "profile" and len(self.profiled) >= after:
                raise KeyboardInterrupt
            self.profiled += [prompt.request.id for prompt in prompts]
            return tallies(profiler, prompts)

        def decode(requests: list[Request], params: Any, drafter: Any = None, policy: Any = None, **how: Any) -> Any:
            if drafter is not None and drafter.name == "copy":
                if stop_in == "copy" and len(self.tried) >= after:
                    raise KeyboardInterrupt
                self.tried.append(requests[0].id)
            return generate(requests, params, drafter, policy, **how)

        def measured(*args: Any, **how: Any) -> Any:
            self.measured.append(how["context_length"])
            return measure(*args, **how)

        with self.patch.context() as patch:
            patch.setattr(Profiler, "tallies", profile)
            patch.setattr(engine, "generate", decode)
            patch.setattr(costs_module, "measure_costs", measured)
            prompts = self.prompts
            found = select.sweep(str(self.checkpoint), engine, prompts, config, notice=self.notices.append)
        assert found is not None
        return found


@pytest.fixture
def runs(own_checkpoint: Path, make_requests: Callable[[int, int], list[Request]], monkeypatch: Any) -> Runs:
    return Runs(own_checkpoint, make_requests(11, 12), monkeypatch)


def acceptance(found: select.Sweep) -> Any:
    copy = [candidate for candidate in found.candidates if candidate.label == "copy"]
    counted = [(c.alpha, c.tokens_per_round, c.tokens_per_step, c.num_draft_tokens) for c in copy]
    return found.profile.alpha, found.profile.tokens_per_round, found.profile.num_tokens, counted


def test_an_interrupted_profile_goes_on(runs: Runs, kept_here: Path) -> None:
    whole = acceptance(runs.sweep())
    assert runs.profiled == PROFILED and runs.measured == [32]
    assert list(kept_here.iterdir()) == [], "done: nothing is left"
    with pytest.raises(KeyboardInterrupt):
        runs.sweep(stop_in="profile", after=4)
    done = list(runs.profiled)
    assert 0 < len(done) < len(PROFILED) and runs.measured == []
    found = runs.sweep()
    assert runs.profiled == PROFILED[len(done) :]
    assert len(runs.notices) == 1 and f"{len(done)} results" in runs.notices[0] and str(kept_here) in runs.notices[0]
    assert acceptance(found)[:3] == whole[:3]
    assert list(kept_here.iterdir()) == []
    runs.sweep()
    assert runs.profiled == PROFILED and runs.notices == [], "the next sweep is a new one"


def test_a_drafter_that_was_interrupted_is_tried_again_and_nothing_else(runs: Runs) -> None:
    with pytest.raises(KeyboardInterrupt):
        runs.sweep(stop_in="copy", after=2)
    assert runs.tried == PROFILED[:2]
    found = runs.sweep()
    assert (runs.profiled, runs.measured, runs.tried) == ([], [], PROFILED)
    assert acceptance(found)[:3] == acceptance(runs.sweep())[:3]


def test_other_options_or_prompts_start_afresh(runs: Runs) -> None:
    with pytest.raises(KeyboardInterrupt):
        runs.sweep(stop_in="copy")
    for changes in ({"temperature": 0.5}, {"max_new_tokens": 11}, {"num_prompts": 4}):
        assert runs.sweep(replace(CONFIG, **changes)).profile.num_prompts == changes.get("num_prompts", 5)
        assert len(runs.profiled) == changes.get("num_prompts", 5) and runs.notices == [], changes
    first = runs.prompts[0].request
    runs.prompts[0] = Prompt(replace(first, prompt_ids=[*first.prompt_ids, 1]))
    runs.sweep()
    assert runs.profiled == PROFILED
    runs.prompts[0] = Prompt(first)
    # What is shown or confirmed later changes nothing that was found.
    runs.sweep(replace(CONFIG, window=(0.0, 0.6), json=True))
    assert runs.profiled == []


def test_another_machine_starts_afresh(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyboardInterrupt):
        runs.sweep(stop_in="copy")
    with monkeypatch.context() as patch:
        for module in (select, costs_module):
            patch.setattr(module, "measured_on", lambda decoder: {"threads": 64})
        runs.sweep()
    assert runs.profiled == PROFILED and runs.measured == [32], "costs kept here are not an error there"


def test_a_sweep_works_where_nothing_can_be_kept(runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    found = runs.sweep(replace(CONFIG, costs=tmp_path / "costs.json"))
    assert found.path is not None and runs.notices == []
    assert len(json.loads((tmp_path / "costs.json").read_text())["costs"]) == 1
