"""What a choice means at other lengths and in each domain, and which acceptance it would need."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from selfspec_tune.config import SweepConfig
from selfspec_tune.decode.drafters.make import DraftSettings
from selfspec_tune.decode.policy import DraftCosts
from selfspec_tune.decode.price import KnownCosts
from selfspec_tune.decode.stats import Stats
from selfspec_tune.speedup import expected_tokens
from selfspec_tune.sweep import breakdown
from selfspec_tune.sweep.candidates import Candidate, Trials, layer_skip_costs, of_cell, of_rounds
from selfspec_tune.sweep.objective import Cell, Costs
from selfspec_tune.sweep.tally import Profile, PromptTally

K_MAX, EXITS = 4, (1, 2, 3, 4)
ROWS = range(1, K_MAX + 2)
BASE = Costs(
    num_layers=5,
    plain=100.0,
    one_layer=dict.fromkeys(ROWS, 18.0),
    all_layers=dict.fromkeys(ROWS, 90.0),
    embed=0.0,
    draft_head=6.0,
    verify_heads=dict.fromkeys(ROWS, 10.0),
    context_length=100,
)
COPY = DraftSettings("copy")


def tally(prompt: str, alphas: tuple[float, ...], domain: str = "", rounds: float = 100.0) -> PromptTally:
    """A prompt on which every exit is accepted with a given probability at every position."""
    tokens = [[rounds * expected_tokens(alpha, k) for alpha in alphas] for k in range(1, K_MAX + 1)]
    accepted = [rounds * alpha for alpha in alphas]
    count = int(rounds)
    return PromptTally(
        prompt, domain, count + 1, 100.0, count, accepted, [[rounds] * len(alphas)] * K_MAX, tokens, rounds
    )


def book(*costs: Costs) -> Any:
    """A book that knows costs at the lengths they are of, and takes the nearest for others."""
    by_length = {each.context_length: each for each in costs}

    def at(length: float) -> Costs:
        return by_length[min(by_length, key=lambda known: abs(known - length))]

    return SimpleNamespace(contexts=sorted(by_length), at=at)


def trials(costs: Any, counted: dict[str, list[tuple[str, Stats]]] | None = None, known: Any = None) -> Any:
    found: Any = SimpleNamespace(
        book=costs,
        config=SweepConfig(max_draft_tokens=K_MAX),
        counted=counted or {},
        known_costs=known,
        context_length=100,
    )
    found.sum = lambda label, domain=None: Trials.sum(found, label, domain)
    return found


def dearer(context_length: int, rows_cost: float) -> Costs:
    """Costs at a length where every further row of a verification costs so much more per layer."""
    one = {rows: 18.0 + rows_cost * (rows - 1) for rows in ROWS}
    return replace(
        BASE,
        context_length=context_length,
        one_layer=one,
        all_layers={rows: 5 * seconds for rows, seconds in one.items()},
    )


GOOD = Profile(5, [tally("a", (0.5, 0.85, 0.9, 0.95))])


def test_longer_texts_draft_less_and_then_nothing() -> None:
    costs = book(dearer(100, 0.0), dearer(200, 2.5), dearer(300, 30.0))
    found = breakdown.layer_skip_by_context(GOOD, costs, EXITS)
    first, own, second, third = found
    assert (own["context_length"], own["max_context"]) == (GOOD.context, GOOD.longest)
    assert [entry["max_context"] for entry in (first, second, third)] == [100, 200, 300]
    assert first["num_draft_tokens"] > second["num_draft_tokens"] >= breakdown.LEAST_K
    assert first["speedup_predicted"] > second["speedup_predicted"] > 1 > third["speedup_predicted"]
    assert third["num_draft_tokens"] == 0
    for entry, each in zip((first, second), (dearer(100, 0.0), dearer(200, 2.5)), strict=True):
        best = max(breakdown.score(GOOD, each), key=lambda cell: cell.speedup_predicted)
        assert (entry["exit_layer"], entry["num_draft_tokens"]) == (best.exit_layer, best.num_draft_tokens)


def test_only_exits_asked_for_are_chosen() -> None:
    found = breakdown.layer_skip_by_context(GOOD, book(BASE), [3])
    assert {entry["exit_layer"] for entry in found} == {3}


def test_a_single_draft_token_is_not_chosen_for_a_length() -> None:
    costs = book(dearer(100, 10.0))
    best = breakdown.ranked(breakdown.score(GOOD, costs.at(100)))[0]
    assert best.num_draft_tokens == 1 and best.speedup_predicted > 1
    entry = breakdown.layer_skip_by_context(GOOD, costs, EXITS)[-1]
    assert entry["num_draft_tokens"] == 2 and 1 < entry["speedup_predicted"] < best.speedup_predicted
    entry = breakdown.layer_skip_by_context(GOOD, book(dearer(100, 18.0)), EXITS)[-1]
    assert entry["num_draft_tokens"] == 0 and entry["speedup_predicted"] <= 1


def test_the_acceptance_that_would_pay() -> None:
    cells = [
        Cell(1, 1, 0.3, 0.2, 1.0, 1.3, 0.0, 0.0),
        Cell(1, 3, 0.3, 0.2, 1.1, 1.3, 0.0, 0.0),
        Cell(2, 1, 0.4, 1.5, 1.0, 1.4, 0.0, 0.0),
    ]
    first, second = breakdown.needed_for(cells, 0.05, [1, 2])
    # k = 1: 1.2 · (0.2 + 1.05) − 1 = 0.5; k = 3: 1 + α + α² + α³ = 1.2 · 1.75 = 2.1 at 0.60.
    assert first == {"exit_layer": 1, "num_draft_tokens": 1, "alpha": 0.3, "needed": pytest.approx(0.5)}
    assert second == {"exit_layer": 2, "num_draft_tokens": None, "alpha": 0.4, "needed": None}, "1.2 · 2.55 is above 2"


def candidate(settings: DraftSettings, stats: Stats, **costs: DraftCosts) -> Candidate:
    return of_rounds(settings, stats, costs or {"copy": DraftCosts(0.0, (1.0,) * K_MAX)})


def copied(rounds: int, accepted: int) -> Stats:
    """Rounds of two copied tokens each, of which so many stood in each."""
    stats = Stats(emitted=rounds * (accepted + 1) + 1, from_prefill=1)
    for _ in range(rounds):
        stats.count_round("copy", 2, accepted)
    return stats


def layer_skip(profile: Profile, costs: Costs = BASE) -> Candidate:
    return of_cell(breakdown.ranked(breakdown.score(profile, costs))[0], costs, K_MAX)


def test_layer_skip_moves_its_exit_with_the_length() -> None:
    costs = book(BASE, dearer(200, 30.0))
    entries = [
        {"max_context": 100, "context_length": 100, "exit_layer": 2, "num_draft_tokens": 3},
        {"max_context": 200, "context_length": 200, "exit_layer": 4, "num_draft_tokens": 0},
    ]
    found = breakdown.choice_by_context(layer_skip(GOOD), GOOD, trials(costs), entries)
    assert [(e["max_context"], e["exit_layer"], e["num_draft_tokens"]) for e in found] == [(100, 2, 3), (200, 4, 0)]
    for entry, exit_layer in zip(found, (2, 4), strict=True):
        wanted = layer_skip_costs(costs.at(entry["max_context"]), exit_layer, K_MAX)
        assert entry["costs"]["layer-skip"]["alpha"] == GOOD.alpha[exit_layer]
        assert entry["costs"]["layer-skip"]["cost_ratio"] == pytest.approx(wanted.cost_ratio)
        assert entry["costs"]["layer-skip"]["verify_ratio"] == pytest.approx(wanted.verify_ratio)


def test_other_drafters_are_charged_what_they_cost_at_each_length() -> None:
    stats = copied(10, 1)  # two tokens per round
    asked: list[tuple[str, float]] = []

    def known(settings: DraftSettings, length: float) -> dict[str, DraftCosts]:
        asked.append((settings.label, length))
        return {"copy": DraftCosts(0.0, (1.0, 1.5 if length == 100 else 2.5))}

    choice, entries = candidate(COPY, stats), [{"max_context": n, "context_length": n} for n in (100, 200)]
    found = breakdown.choice_by_context(choice, GOOD, trials(book(BASE), {"copy": [("", stats)]}, known), entries)
    assert asked == [("copy", 100), ("copy", 200)]
    assert [(e["exit_layer"], e["num_draft_tokens"]) for e in found] == [(None, 2), (None, 0)]
    assert [e["costs"]["copy"]["verify_ratio"][1] for e in found] == [1.5, 2.5]
    assert found[0]["costs"]["copy"]["alpha"] == pytest.approx(1 / 2)


MIXED = Profile(5, [tally("a", (0.2, 0.3, 0.4, 0.5), "chat"), tally("b", (0.7, 0.9, 0.92, 0.95), "code")])


def test_each_domain_names_its_best_and_what_the_shared_choice_loses() -> None:
    counted = {"copy": [("chat", copied(10, 2)), ("code", copied(10, 0))]}
    choice, copy = layer_skip(MIXED), candidate(COPY, copied(20, 1))
    chat, code = breakdown.by_domain(MIXED, trials(book(BASE), counted), choice, [choice, copy], EXITS)
    assert (chat["domain"], chat["num_prompts"], chat["num_tokens"]) == ("chat", 1, 101)
    assert (chat["best"], chat["exit_layer"], chat["num_draft_tokens"]) == ("copy", None, 2)
    assert chat["speedup_best"] == pytest.approx(3.0)
    place = choice.settings.exit_layer, choice.num_draft_tokens
    cells = {
        name: {(c.exit_layer, c.num_draft_tokens): c for c in breakdown.score(MIXED.of_domain(name), BASE)}
        for name in ("chat", "code")
    }
    assert chat["speedup_shared"] == pytest.approx(cells["chat"][place].speedup_predicted)
    assert chat["loss"] == pytest.approx(1 - chat["speedup_shared"] / 3.0) and chat["loss"] > 0.5
    assert chat["alpha"] == cells["chat"][place].alpha
    assert chat["tokens_per_round"] == cells["chat"][place].tokens_per_round
    # Code is best with a cell of its own, though no candidate is that cell.
    best = breakdown.ranked(cells["code"].values())[0]
    assert (code["exit_layer"], code["num_draft_tokens"]) == (best.exit_layer, best.num_draft_tokens) != place
    assert code["best"] == f"layer-skip E={best.exit_layer}"
    assert code["loss"] == pytest.approx(1 - cells["code"][place].speedup_predicted / best.speedup_predicted)


def test_where_the_shared_choice_is_best_nothing_is_lost() -> None:
    choice, counted = candidate(COPY, copied(10, 2)), {"copy": [("chat", copied(10, 2)), ("code", copied(10, 2))]}
    rows = breakdown.by_domain(MIXED, trials(book(BASE), counted), choice, [choice], EXITS)
    assert [(row["domain"], row["best"], row["loss"]) for row in rows] == [("chat", "copy", 0), ("code", "copy", 0)]


def test_without_domains_there_is_no_table() -> None:
    choice = layer_skip(GOOD)
    assert breakdown.by_domain(GOOD, trials(book(BASE)), choice, [choice], EXITS) == []


def test_known_costs_are_written_as_they_are_read() -> None:
    costs = {"copy": DraftCosts(0.0, (1.0, 1.1), 0.02)}
    entry = breakdown.write_costs(costs, {"copy": 0.4})
    stored: Any = SimpleNamespace(
        costs=entry, by_context=[{"max_context": 9, "exit_layer": 2, "num_draft_tokens": 0, "costs": entry}]
    )
    known = KnownCosts.of(stored)
    assert (known.costs, known.alphas) == (costs, {"copy": 0.4})
    [context] = known.by_context
    assert (context.max_context, context.costs, context.exit_layer, context.enabled) == (9, costs, 2, False)
