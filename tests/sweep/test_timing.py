"""What is timed, how often and in which order; never how long it takes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from selfspec_tune.decode.engine import Engine, Request
from selfspec_tune.decode.sampling import SamplingParams
from selfspec_tune.model.decoder import LayeredDecoder
from selfspec_tune.model.rows import RowCounts
from selfspec_tune.sweep import timing

GREEDY, SAMPLED = SamplingParams(), SamplingParams(temperature=0.8, top_k=20, top_p=0.9)


def test_pieces_are_timed_in_turn_after_a_warm_up() -> None:
    calls: list[str] = []
    pieces = {name: lambda name=name: calls.append(name) for name in ("a", "b", "c")}
    seconds, spreads = timing.repeat_in_turn(pieces, 4)
    assert calls == ["a", "b", "c"] * (timing.WARM_UP + 4)
    assert set(seconds) == set(spreads) == {"a", "b", "c"}


def test_the_warm_up_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 100.0, 0.0, 100.0, 0.0, 1.0, 0.0, 2.0, 0.0, 3.0])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    seconds, spreads = timing.repeat_in_turn({"a": lambda: None}, 3)
    assert (seconds["a"], spreads["a"]) == (2.0, 0.5)


def test_spread() -> None:
    assert timing.spread([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(2 / 3)
    assert timing.spread([3.0]) == 0.0


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
@pytest.mark.parametrize("numerics", ["exact", "fast"])
def test_costs_of_a_real_model(
    params: SamplingParams,
    numerics: str,
    engine: Engine,
    decoder: LayeredDecoder,
    make_requests: Callable[[int, int], list[Request]],
) -> None:
    used = engine if numerics == "exact" else Engine(decoder, numerics="fast")
    used.decoder.rows, used.decoder.exact = used.rows, numerics == "exact"
    costs = timing.measure_costs(
        used,
        params,
        max_draft_tokens=3,
        context_length=100,
        repeats=2,
        overhead_request=make_requests(1, 12)[0],
    )
    assert costs.num_layers == 5
    for table in (costs.one_layer, costs.all_layers, costs.verify_heads):
        assert set(table) == {1, 2, 3, 4}
        assert min(table.values()) > 0
    assert min(costs.plain, costs.embed, costs.draft_head) > 0
    assert costs.overhead >= 0
    assert costs.exact_over_fast is not None and costs.exact_over_fast > 0
    assert all(costs.cost_ratio(e) > 0 and costs.verify_ratio(e, k) > 0 for e in range(1, 5) for k in (1, 2, 3))
    # Timing runs many calls, but leaves the decoder as the engine left it.
    assert (used.decoder.rows, used.decoder.exact) == (used.rows, numerics == "exact")
