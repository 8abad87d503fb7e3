"""Drafters profiled by real rounds: what is counted, what it costs, and what cannot be tried."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from selfspec_kernels import cpu
from tiny import END, VOCAB

from selfspec_tune.config import SweepConfig
from selfspec_tune.decode.drafters.make import DraftSettings
from selfspec_tune.decode.engine import Engine
from selfspec_tune.decode.policy import DraftCosts
from selfspec_tune.decode.price import KnownCosts
from selfspec_tune.decode.requests import Request
from selfspec_tune.decode.sampling import SamplingParams
from selfspec_tune.decode.stats import Stats
from selfspec_tune.model.decoder import LayeredDecoder, load_decoder
from selfspec_tune.model.draft_vocab import TokenCounts, write_draft_vocab
from selfspec_tune.sweep import costs as costs_module
from selfspec_tune.sweep.candidates import Trials, of_cell, of_rounds, some_of_each_domain
from selfspec_tune.sweep.costs import CostBook
from selfspec_tune.sweep.kept import Kept
from selfspec_tune.sweep.objective import Cell, Costs
from selfspec_tune.sweep.processes import Processes
from selfspec_tune.sweep.profile import Prompt

COPY, FOUR = DraftSettings("copy"), DraftSettings("low-precision")
FREE, DEAR = DraftCosts(0.0, (1.1, 1.2, 1.3), 0.05), DraftCosts(0.5, (1.0, 1.1, 1.2), 0.1)


def test_rounds_of_both_parts_and_plain_steps_are_charged_what_each_costs() -> None:
    stats = Stats(from_prefill=1)
    for drafter, k, accepted in (("copy", 3, 3), ("copy", 2, 0), ("low-precision", 1, 1)):
        stats.count_round(drafter, k, accepted)
    stats.plain_steps = 3
    stats.emitted = 1 + (4 + 1 + 2) + 3  # the prompt's, the rounds', the plain steps'
    found = of_rounds(DraftSettings("hybrid"), stats, {"copy": FREE, "low-precision": DEAR})
    cost = (1.3 + 0.05) + (1.2 + 0.05) + (0.5 + 1.0 + 0.1) + 3
    assert found.speedup_predicted == pytest.approx(10 / cost)
    assert found.cost_per_step == pytest.approx(cost / 6) and found.tokens_per_step == pytest.approx(10 / 6)
    assert (found.num_draft_tokens, found.alpha) == (2, pytest.approx(4 / 5))
    assert found.cost_ratio == pytest.approx(0.5 / 6) and found.verify_ratio == pytest.approx(3.5 / 3)
    assert found.known.alphas == {"copy": pytest.approx(3 / 4), "low-precision": 1.0}


def test_accepted_tokens_that_an_end_cut_off_are_not_counted() -> None:
    stats = Stats(from_prefill=1, plain_steps=2, emitted=1 + 2 + 3)
    stats.count_round("copy", 3, 3)  # four tokens, the last of them behind the end
    assert of_rounds(COPY, stats, {"copy": FREE}).speedup_predicted == pytest.approx(5 / (2 + 1.3 + 0.05))


def test_a_drafter_that_never_drafted_is_plain_decoding() -> None:
    found = of_rounds(COPY, Stats(emitted=11, from_prefill=1, plain_steps=10), {"copy": FREE})
    assert (found.alpha, found.speedup_predicted, found.known.alphas) == (None, 1.0, {})


def test_layer_skip_is_scored_as_its_cell() -> None:
    costs = Costs(5, 100.0, {1: 10.0, 2: 10.0}, {1: 50.0, 2: 50.0}, 0.0, 10.0, {1: 50.0, 2: 50.0}, overhead=2.0)
    found = of_cell(Cell(2, 1, 0.6, 0.3, 1.1, 1.6, 1.23, 1.1), costs, 1)
    assert found.speedup_predicted == pytest.approx(1.1) and found.settings == DraftSettings("layer-skip", 2)
    assert found.speedup_model == pytest.approx(1.6 / 1.3)
    assert found.known.costs["layer-skip"].round(1) == pytest.approx(0.3 + costs.verify_ratio(2, 1) + 0.02)


def test_costs_survive_the_artifact() -> None:
    known = KnownCosts({"copy": FREE, "low-precision": DEAR}, {"copy": 0.5})
    written = known.to_artifact()
    assert written["low-precision"]["alpha"] is None

    class Stored:
        costs = written
        by_context = ()

    assert KnownCosts.of(Stored()) == known  # type: ignore[arg-type]


def make_trials(decoder: LayeredDecoder, model: str, config: SweepConfig, processes: Any = None) -> Trials:
    """Trials with a book that is measured."""
    engine = Engine(decoder, numerics="fast")
    book = CostBook(engine, SamplingParams(), config)
    book.measure(Request("a", [1, 2, 3], 12))
    return Trials(engine, model, config, book, 40.0, processes or Processes())


@pytest.fixture
def prompts(make_requests: Callable[[int, int], list[Request]]) -> Callable[[int, int], list[Prompt]]:
    """Return a function (count, max_new_tokens) → prompts, of two domains in turn."""

    def make(count: int, max_new_tokens: int) -> list[Prompt]:
        requests = make_requests(count, max_new_tokens)
        return [Prompt(request, "odd" if number % 2 else "even") for number, request in enumerate(requests)]

    return make


@pytest.fixture
def trials(decoder: LayeredDecoder) -> Trials:
    return make_trials(decoder, "no directory", SweepConfig(max_draft_tokens=3, context_lengths=(40,), repeats=1))


def test_all_drafters_are_profiled_and_the_hybrid_takes_the_best_that_runs_layers(
    trials: Trials, prompts: Callable[[int, int], list[Prompt]], monkeypatch: pytest.MonkeyPatch
) -> None:
    timed: list[str] = []

    def costs(_engine: object, drafter: object, _params: object, **_: object) -> DraftCosts:
        timed.append(getattr(drafter, "name", ""))
        # Copy and 4 bits in groups of 32 come first; what follows is too dear.
        return DraftCosts(0.1 if len(timed) < 3 else 9.0, (1.0,) * 8)

    monkeypatch.setattr(costs_module, "draft_costs", costs)
    found = trials.candidates(prompts(2, 16), SamplingParams())
    eight, wide = DraftSettings("low-precision", draft_bits=8), DraftSettings("low-precision", draft_group=64)
    small_head = DraftSettings("low-precision", draft_head_bits=4)
    assert [c.settings for c in found] == [COPY, FOUR, wide, small_head, eight, DraftSettings("hybrid")]
    assert timed == ["copy", *["low-precision"] * 4], "a part is timed once"
    assert found[1].alpha is not None and found[1].alpha > 0.5
    assert trials.drafter(DraftSettings("hybrid")).parts() == [trials.drafter(COPY), trials.drafter(FOUR)]


def test_what_cannot_be_tried_here_is_said(
    trials: Trials, prompts: Callable[[int, int], list[Prompt]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "enabled", False)
    found = trials.candidates(prompts(1, 8), SamplingParams())
    assert [c.settings for c in found] == [COPY]
    assert trials.skipped.pop("hybrid") == "no drafter was tried that runs layers"
    assert set(trials.skipped) == {
        f"low-precision {kind}" for kind in ("4-bit", "4-bit group 64", "4-bit head 4-bit", "8-bit")
    }
    assert all("no fast product" in reason for reason in trials.skipped.values())


def test_every_size_of_a_draft_vocabulary_is_tried_with_the_best_of_each_drafter(
    own_checkpoint: Path, prompts: Callable[[int, int], list[Prompt]]
) -> None:
    counts = TokenCounts(VOCAB)
    counts.add("test", [list(range(100))])
    write_draft_vocab(own_checkpoint, counts.draft_vocab(own_checkpoint, [END], 1000))
    config = SweepConfig(
        max_draft_tokens=3, context_lengths=(40,), repeats=1, draft_vocab=(20, 5000), drafters=("copy", "low-precision")
    )
    trials = make_trials(load_decoder(str(own_checkpoint)), str(own_checkpoint), config)
    found = trials.candidates(prompts(1, 12), SamplingParams())
    sizes = [c.settings.draft_vocab for c in found]
    assert sizes[:5] == [None] * 5 and sizes[5] == 20 and len(sizes) == 7
    assert sizes[6] is not None and 20 < sizes[6] <= 101, "no more than are ranked"
    assert all(c.settings.drafter == "low-precision" for c in found[1:])
    assert len({c.label for c in found}) == 7


def test_counts_are_kept_per_prompt_and_summed_by_domain(
    trials: Trials, prompts: Callable[[int, int], list[Prompt]]
) -> None:
    trials.config = replace(trials.config, drafters=("copy",))
    [found] = trials.candidates(prompts(3, 16), SamplingParams())
    assert [domain for domain, _ in trials.counted["copy"]] == ["even", "odd", "even"]
    parts = [trials.sum("copy", domain) for domain in ("even", "odd", None, "none")]
    assert [stats.emitted for stats in parts] == [32, 16, 48, 0]
    again = of_rounds(COPY, parts[2], found.known.costs)
    assert again == found


def test_what_an_interrupted_sweep_counted_is_not_decoded_again(
    trials: Trials, prompts: Callable[[int, int], list[Prompt]], monkeypatch: pytest.MonkeyPatch
) -> None:
    trials.config, trials.kept = replace(trials.config, drafters=("copy",)), Kept({"a": 1})
    first = trials.candidates(prompts(2, 16), SamplingParams())

    def generate(*_: Any) -> Any:
        raise AssertionError("decoded again")

    again = Trials(trials.engine, "no directory", trials.config, trials.book, 40.0, Processes(), Kept({"a": 1}))
    monkeypatch.setattr(trials.engine, "generate", generate)
    assert again.candidates(prompts(2, 16), SamplingParams()) == first
    assert again.counted == trials.counted


class OneOfTwo(Processes):
    """The main of two processes; what the other one answers is given."""

    def __init__(self, other: Any) -> None:
        super().__init__()
        self.count, self.other = 2, other

    def gather(self, values: Any) -> Any:
        return [*values, *self.other]

    def from_main(self, make: Any) -> Any:
        raise AssertionError("the other process is not here")


def test_a_drafter_that_one_process_cannot_make_is_tried_by_none(
    decoder: LayeredDecoder, prompts: Callable[[int, int], list[Prompt]]
) -> None:
    config = SweepConfig(max_draft_tokens=3, context_lengths=(40,), repeats=1, drafters=("copy",))
    trials = make_trials(decoder, "no directory", config, OneOfTwo(["no memory there"]))
    assert trials.candidates(prompts(2, 16), SamplingParams()) == []
    assert trials.skipped == {"copy": "no memory there"}


def test_reference_answers_profile_layer_skip_alone(
    trials: Trials, prompts: Callable[[int, int], list[Prompt]]
) -> None:
    trials.config = replace(trials.config, source="reference")
    assert trials.candidates(prompts(2, 16), SamplingParams()) == []
    assert set(trials.skipped) == {"copy", "low-precision", "hybrid"}, "there is no exit head to be named"


def test_prompts_tried_are_of_every_domain() -> None:
    prompts = [Prompt(Request(str(n), [1], 4), "rare" if n == 90 else "often") for n in range(100)]
    tried = some_of_each_domain(prompts, 10)
    assert [p.request.id for p in tried if p.domain == "rare"] == ["90"]
    assert [p.request.id for p in tried] == sorted((p.request.id for p in tried), key=int)
    assert 5 <= len(tried) <= 11 and len({p.request.id for p in tried}) == len(tried)
