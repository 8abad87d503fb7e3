"""`compact`: rows of the cache moved to its front, by the reference and, without a GPU, by the Triton kernel."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from cards import CARDS, POINTERS, Fake, assert_fits, assert_passes_under_the_interpreter, compile_for
from selfspec_kernels import compact, ops

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


@pytest.mark.parametrize("rows", [[0], [4], [0, 1, 2, 3, 4], [1, 2, 3, 4], [0, 2, 4], []])
def test_committed_slots_of_kept_rows_are_at_the_front_and_nothing_else_changed(rows):
    storage, committed = torch.randn(2, 2, 3, 5, 16, 10), torch.tensor([7, 16, 1, 0, 13])
    before = storage.clone()
    compact(storage, torch.tensor(rows, dtype=torch.long), committed)
    for place in range(5):
        row = rows[place] if place < len(rows) else place
        end = int(committed[row])
        assert torch.equal(storage[:, :, :, place, :end], before[:, :, :, row, :end])
        assert torch.equal(storage[:, :, :, place, end:], before[:, :, :, place, end:])


@needs_triton
def test_the_triton_op_under_the_interpreter():
    assert_passes_under_the_interpreter(Path(__file__).with_name("interpreted_compact.py"))


@needs_triton
@pytest.mark.parametrize("size, dtype", [(80, torch.float16), (128, torch.bfloat16), (128, torch.float32)])
@pytest.mark.parametrize("card", CARDS)
def test_it_compiles_without_spills(card, size, dtype, tmp_path, monkeypatch):
    from selfspec_kernels import compact_kernel as on_gpu

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    types = {"storage": POINTERS[dtype], "rows": "*i64", "committed": "*i64", "num_rows": "i32"}
    types |= {"head_stride": "i32", "row_stride": "i32"}
    constants = {"SIZE": size, "NUMBERS": on_gpu.NUMBERS}
    kernel = compile_for(card, on_gpu.compact_kernel, types, constants, num_warps=on_gpu.NUM_WARPS)
    assert_fits(kernel, card, tmp_path)


@needs_triton
def test_the_op_is_the_triton_one_on_gpus(monkeypatch: pytest.MonkeyPatch):
    from selfspec_kernels import compact_kernel as on_gpu

    called = []
    monkeypatch.setattr(on_gpu, "compact", lambda *arguments: called.append(arguments))
    gpu: Any = Fake("cuda", torch.float16)
    rows = torch.tensor([0])
    compact(gpu, rows, rows)
    assert called == [(gpu, rows, rows)]
    storage = torch.zeros(1, 2, 1, 1, 4, 2)
    monkeypatch.setattr(ops, "triton_available", lambda: True)
    compact(storage, rows, rows)
    assert len(called) == 1
