"""Weights are packed where that is faster: timed for real on a CPU, and a draft with some weights left as they are."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from selfspec_kernels import PackedWeight, pack
from tiny import tiny_model

from selfspec_tune.config import DecodeConfig
from selfspec_tune.decode.drafters import low_precision, packing
from selfspec_tune.decode.drafters.low_precision import LowPrecisionDrafter
from selfspec_tune.decode.drafters.packing import PackWhereFaster, product_seconds
from selfspec_tune.decode.engine import Engine
from selfspec_tune.decode.plan import make_plan
from selfspec_tune.decode.policy import DraftPolicy
from selfspec_tune.decode.requests import Request
from selfspec_tune.decode.sampling import SamplingParams
from selfspec_tune.model.decoder import LayeredDecoder
from selfspec_tune.model.load import load_tokenizer

PACK = partial(pack, bits=4)


@pytest.fixture(autouse=True)
def small_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "COLD_BYTES", 1 << 20)


def slow_for(monkeypatch: pytest.MonkeyPatch, *widths: int) -> list[tuple[int, ...]]:
    """Let packed products with weights of so many rows be slower, the others faster; returns the shapes timed."""
    timed: list[tuple[int, ...]] = []

    def seconds(weight: torch.Tensor, packed: PackedWeight, mode: str) -> tuple[float, float]:
        timed.append(tuple(weight.shape))
        return 1.0, 2.0 if len(weight) in widths else 0.5

    monkeypatch.setattr(packing, "product_seconds", seconds)
    return timed


def test_both_products_are_timed_and_the_answer_is_one_of_the_two():
    weight = torch.randn(256, 256)
    assert all(seconds > 0 for seconds in product_seconds(weight, PACK(weight), "compiled"))
    faster = PackWhereFaster(PACK, "compiled")
    assert isinstance(faster(weight), PackedWeight) == (faster.kept == [])


def test_each_shape_is_timed_once_and_kept_where_packing_does_not_pay(monkeypatch):
    timed = slow_for(monkeypatch, 30)
    faster, slow, fast = PackWhereFaster(PACK, "compiled"), torch.randn(30, 64), torch.randn(40, 64)
    for _ in range(2):
        assert faster(slow) is slow and isinstance(faster(fast), PackedWeight)
    assert timed == [(30, 64), (40, 64)] and faster.kept == [(30, 64)]


def test_a_draft_of_which_some_weights_are_not_packed(monkeypatch):
    decoder = LayeredDecoder(tiny_model())
    layer = decoder.layers(0, 1)[0]
    timed = slow_for(monkeypatch, layer.gate_up.shape[0])
    drafter = LowPrecisionDrafter(decoder, 4, measure=True)
    assert drafter.kept == [tuple(layer.gate_up.shape)] and len(timed) == len({*timed})
    assert drafter.stack.layers[0].gate_up is layer.gate_up and isinstance(drafter.stack.layers[0].down, PackedWeight)
    assert drafter.num_bytes < low_precision.estimate_bytes(decoder, 4, 8, None)
    engine, request = Engine(decoder), Request("a", list(range(20, 60)), 30)
    [plain], _ = engine.generate([request], SamplingParams())
    [drafted], stats = engine.generate([request], SamplingParams(), drafter, DraftPolicy(3))
    assert drafted.token_ids == plain.token_ids and stats.accepted > 0


def test_a_head_that_is_not_packed_is_the_models_own(monkeypatch):
    decoder = LayeredDecoder(tiny_model())
    slow_for(monkeypatch, len(decoder.head[0]))
    drafter = LowPrecisionDrafter(decoder, 4, measure=True)
    assert drafter.head.weight is decoder.head[0] and drafter.head.num_bytes == 0


def test_nothing_is_timed_on_a_cpu_unless_asked(monkeypatch):
    timed = slow_for(monkeypatch)
    assert LowPrecisionDrafter(LayeredDecoder(tiny_model()), 4).remarks == [] and timed == []


def test_the_plan_says_what_is_not_packed(checkpoint, monkeypatch):
    options, name = DecodeConfig(drafter="low-precision", k_policy="fixed"), str(checkpoint)
    monkeypatch.setattr(LowPrecisionDrafter, "remarks", property(lambda drafter: ["kept 64×64"]))
    notices = make_plan(name, load_tokenizer(name), None, options).notices
    assert "MiB more memory" in notices[-2] and notices[-1] == "kept 64×64"


def test_the_remark_names_the_shapes(monkeypatch):
    decoder = LayeredDecoder(tiny_model())
    slow_for(monkeypatch, len(decoder.head[0]))
    [remark] = LowPrecisionDrafter(decoder, 4, measure=True).remarks
    width, size = decoder.head[0].shape
    assert f"{width}×{size}" in remark and "not faster" in remark
