"""What is timed, how often and in which order; never how long it takes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from selfspec_tune.decode.engine import Engine
from selfspec_tune.decode.requests import Request
from selfspec_tune.decode.sampling import SamplingParams
from selfspec_tune.decode.stats import Stats
from selfspec_tune.model.decoder import LayeredDecoder
from selfspec_tune.model.rows import RowCounts
from selfspec_tune.sweep import timing

GREEDY, SAMPLED = SamplingParams(), SamplingParams(temperature=0.8, top_k=20, top_p=0.9)


def test_pieces_are_timed_in_turn_after_a_warm_up() -> None:
    calls: list[str] = []
    pieces = {name: lambda name=name: calls.append(name) for name in ("a", "b", "c")}
    samples = timing.sample_in_turn(pieces, 4)
    assert calls == ["a", "b", "c"] * (timing.WARM_UP + 4)
    assert {name: len(seconds) for name, seconds in samples.items()} == {"a": 4, "b": 4, "c": 4}


def test_the_warm_up_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 100.0, 0.0, 100.0, 0.0, 1.0, 0.0, 2.0, 0.0, 3.0])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    assert timing.sample_in_turn({"a": lambda: None}, 3) == {"a": [1.0, 2.0, 3.0]}


@pytest.mark.parametrize("batch_size", [1, 3])
def test_overheads_are_what_is_left_of_a_run_per_pass(batch_size: int, decoder: LayeredDecoder) -> None:
    runs: list[tuple[list[Request], Any, Any]] = []

    def generate(requests: list[Request], params: Any, drafter: Any = None, policy: Any = None) -> Any:
        runs.append((requests, drafter, policy))
        others = {"prefill_seconds": 4.0, "draft_seconds": 2.0, "verify_seconds": 1.0, "plain_seconds": 0.5}
        return [], Stats(**others, total_seconds=11.5 if drafter else 9.5, passes=8 if drafter else 20)

    engine: Any = SimpleNamespace(decoder=decoder, batch_size=batch_size, generate=generate)
    request = Request("a", [1, 2], 9)
    assert timing.bookkeeping_seconds(engine, GREEDY, request, 3) == (4.0 / 8, 2.0 / 20)
    (drafted, drafter, policy), (plain, none, _) = runs
    assert (drafter.name, policy.k, none) == ("layer-skip", 3, None)
    assert drafted == plain and len({r.id for r in drafted}) == batch_size
    assert {(tuple(r.prompt_ids), r.max_new_tokens) for r in drafted} == {((1, 2), 9)}


def test_a_clock_that_stood_still_makes_no_overhead_negative(decoder: LayeredDecoder) -> None:
    stats = Stats(total_seconds=1.0, verify_seconds=1.1, passes=1)
    engine: Any = SimpleNamespace(decoder=decoder, batch_size=1, generate=lambda *_: ([], stats))
    assert timing.bookkeeping_seconds(engine, GREEDY, Request("a", [1], 9), 1) == (0.0, 0.0)


def test_a_batch_is_timed_with_all_its_rows(decoder: LayeredDecoder) -> None:
    with torch.inference_mode():
        bench = timing.Bench(decoder, SAMPLED, 40, 3, batch_size=2)
        assert bench.cache.committed.tolist() == [40, 40]
        assert bench.run_layers(3, 2).shape[:2] == (2, 3)
        assert bench.draft_head().shape == (2,)
        for piece in bench.pieces().values():
            piece()


def test_passes_that_are_padded_alike_are_timed_once(decoder: LayeredDecoder) -> None:
    before = decoder.rows
    decoder.rows = RowCounts((4, 8, 12))
    try:
        with torch.inference_mode():
            names = set(timing.Bench(decoder, GREEDY, 40, 5).pieces())
    finally:
        decoder.rows = before
    assert {n for n in names if "layer" in n} == {
        f"{which}, {r} rows" for which in ("one layer", "all layers") for r in (4, 8)
    }
    assert {n for n in names if "verify" in n} == {f"verify head, {r} rows" for r in range(1, 7)}


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("numerics", "batch_size"), [("exact", 1), ("fast", 1), ("fast", 2)])
def test_costs_of_a_real_model(
    params: SamplingParams, numerics: str, batch_size: int, engine: Engine, decoder: LayeredDecoder
) -> None:
    used = engine if numerics == "exact" else Engine(decoder, numerics="fast", batch_size=batch_size)
    used.decoder.rows, used.decoder.exact = used.rows, numerics == "exact"
    costs = timing.measure_costs(
        used, params, max_draft_tokens=3, context_length=100, repeats=2, overheads=(0.25, 0.125)
    )
    assert (costs.num_layers, costs.context_length, costs.batch_size) == (5, 100, batch_size)
    for table in (costs.one_layer, costs.all_layers, costs.verify_heads, costs.pieces):
        assert set(table) == {1, 2, 3, 4}
    assert {len(seconds) for seconds in costs.samples.values()} == {2}
    assert {name for names in costs.pieces.values() for name in names} < set(costs.samples)
    assert min(seconds for values in costs.samples.values() for seconds in values) > 0
    assert (costs.overhead, costs.plain_overhead) == (0.25, 0.125)
    assert costs.exact_over_fast is not None and costs.exact_over_fast > 0
    # Timing runs many calls, but leaves the decoder as the engine left it.
    assert (used.decoder.rows, used.decoder.exact) == (used.rows, numerics == "exact")


def test_exact_numerics_are_timed_at_the_batch_size_in_use(
    decoder: LayeredDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(
        timing, "plain_step_seconds", lambda *_, **how: asked.append(how) or {"exact": 3.0, "fast": 2.0}
    )
    assert timing.exact_price(Engine(decoder, numerics="fast", batch_size=2), context_length=9, repeats=1) == 1.5
    assert (asked[0]["batch_size"], asked[0]["context_length"]) == (2, 9)
