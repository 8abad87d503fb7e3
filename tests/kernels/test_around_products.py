"""Norms and gated activations without a GPU: under Triton's interpreter, and compiled for the cards they are meant for.

What compilation shows, and what not, stands in `cards`.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from cards import CARDS, POINTERS, assert_fits, assert_passes_under_the_interpreter, compile_for

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


def test_results_under_the_interpreter() -> None:
    assert_passes_under_the_interpreter(Path(__file__).with_name("interpreted_around_products.py"))


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("size", [576, 16384])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("card", CARDS)
def test_norms_compile_without_spills(card, dtype, size, adds, tmp_path, monkeypatch):
    from selfspec_kernels.rms_norm_kernel import NUM_WARPS, launch_constants, rms_norm_kernel

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    names = ("inputs", "residual", "weight", "epsilon", "total", "out")
    types = dict.fromkeys(names, POINTERS[dtype]) | {"epsilon": "fp32"}
    constants = launch_constants(size, adds=adds)
    assert_fits(compile_for(card, rms_norm_kernel, types, constants, num_warps=NUM_WARPS), card, tmp_path)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("card", CARDS)
def test_gates_compile_without_spills(card, dtype, activation, tmp_path, monkeypatch):
    from selfspec_kernels.silu_mul_kernel import NUM_WARPS, launch_constants, silu_mul_kernel

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    types = {"both": POINTERS[dtype], "out": POINTERS[dtype]}
    constants = launch_constants(11008, activation)
    assert_fits(compile_for(card, silu_mul_kernel, types, constants, num_warps=NUM_WARPS), card, tmp_path)
