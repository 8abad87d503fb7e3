"""What the loss over exits holds at once, counted by PyTorch's allocator: a small case of `scripts/bench_exit_loss.py`.

All sizes are those of the benchmark's default divided by 8, the chunk included, so that the parts stand to each other
as they do there: head, hidden states and a chunk's logits as 15.7 : 1 : 1. Two chunks are computed, which is shown to
be enough. Bytes are counted, so nothing depends on the machine.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench_exit_loss.py"
SMALL = {"tokens": 1024, "vocabulary": 16032, "hidden_size": 256, "chunk": 16, "counted": 32}
MOST = 1.15


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_exit_loss", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    # One row at a time: a small part of a chunk, as of a vocabulary of 128,256.
    monkeypatch.setattr("selfspec_kernels.reference.LOSS_BLOCK", SMALL["vocabulary"])
    return module


def peak(bench: ModuleType, run: str, **options: Any) -> int:
    size = bench.Size(**{**SMALL, **options})
    return bench.peak_bytes(lambda: bench.step(size, run), "cpu")


def ratio(bench: ModuleType, run: str, **options: Any) -> float:
    return peak(bench, run, **options) / peak(bench, "final", **options)


@pytest.mark.parametrize("kind", ["kl", "mixture"])
def test_four_exits_take_little_more_than_the_final_layer_alone(bench: ModuleType, kind: str) -> None:
    assert 1.05 < ratio(bench, "exits", kind=kind) <= MOST


@pytest.mark.parametrize("options", [{"autocast": True}, {"dtype": "bfloat16"}])
def test_nor_do_they_in_bf16(bench: ModuleType, options: dict[str, Any]) -> None:
    assert ratio(bench, "exits", **options) <= MOST


def test_a_loss_with_whole_logits_does_not_pass(bench: ModuleType) -> None:
    tiny = {"tokens": 256, "vocabulary": 4008, "hidden_size": 64, "chunk": 4, "counted": None}
    assert ratio(bench, "unfused", **tiny) > 1.5


def test_the_peak_does_not_depend_on_how_many_chunks_are_computed(bench: ModuleType) -> None:
    """Which is what the benchmark's --counted rests on."""
    whole, part = (peak(bench, "exits", counted=counted) for counted in (64, 32))
    # Eight bytes of an index for every counted row.
    assert whole - part == 8 * (64 - 32)


def test_what_is_counted_is_there(bench: ModuleType) -> None:
    """Head and gradient, hidden states and gradients of five layers, logits of two: and nothing else of their size."""
    size = bench.Size(**SMALL)
    head, chunk = 4 * size.vocabulary * size.hidden_size, 4 * size.vocabulary * SMALL["chunk"]
    known = 2 * head + 10 * size.layer_bytes + 2 * chunk
    assert known < peak(bench, "exits") < 1.05 * known
    frozen = bench.Size(**SMALL, frozen_head=True)
    saved = peak(bench, "exits") - bench.peak_bytes(lambda: bench.step(frozen, "exits"), "cpu")
    assert saved == pytest.approx(head, rel=0.02)
