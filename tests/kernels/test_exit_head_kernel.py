"""`exit_head` without a GPU: under Triton's interpreter, and compiled for the cards it is meant for.

What compilation shows, and what not, stands in `cards`.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from cards import CARDS, POINTERS, assert_fits, assert_passes_under_the_interpreter, compile_for
from selfspec_kernels import ops

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


def test_results_under_the_interpreter() -> None:
    assert_passes_under_the_interpreter(Path(__file__).with_name("interpreted_exit_head.py"))


def compiled(card: str, dtype: torch.dtype, num_rows: int, size: int, *, noise: bool) -> Any:
    """Compile the first kernel as `exit_head` launches it."""
    from selfspec_kernels.exit_head_kernel import OPTIONS, exit_head_kernel, launch_constants

    names = ("hidden", "norm", "weight", "bias")
    types = {**dict.fromkeys(names, POINTERS[dtype]), "gumbel": "*fp64", "best": "*fp32", "best_at": "*i32"}
    types |= {"num_rows": "i32", "width": "i32", "epsilon": "fp32", "sharpness": "fp32"}
    extra = torch.empty(0) if noise else None
    return compile_for(card, exit_head_kernel, types, launch_constants(num_rows, size, extra, extra), **OPTIONS)


def order_of_sums(kernel: Any) -> set[str]:
    """Return which lanes and threads hold what the kernel sums up, one entry per sum that differs."""
    ir = kernel.asm["ttgir"]
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", ir, re.MULTILINE))
    types = re.findall(r"^ *\}\) : \(tensor<(\w+), (#\w+)>\) ->", ir, re.MULTILINE)
    return {f"{shape} {layouts[layout]}" for shape, layout in types if "f32" in shape}


@pytest.mark.parametrize(
    "dtype, size, noise", [(torch.float32, 576, True), (torch.bfloat16, 4096, False), (torch.bfloat16, 4096, True)]
)
@pytest.mark.parametrize("card", CARDS)
def test_it_compiles_without_spills_and_sums_in_one_order(card, dtype, size, noise, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    orders = []
    for num_rows in (1, 3):
        kernel = compiled(card, dtype, num_rows, size, noise=noise)
        assert_fits(kernel, card, tmp_path)
        orders.append(order_of_sums(kernel))
    assert orders[0] and orders[0] == orders[1], "rows of different calls are summed in different orders"


@pytest.mark.parametrize("width", [100, 128256, 262144])
@pytest.mark.parametrize("card", CARDS)
def test_the_merge_compiles_without_spills(card, width, tmp_path, monkeypatch):
    from selfspec_kernels.exit_head_kernel import best_tile_kernel, merge_constants

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    types = {"best": "*fp32", "best_at": "*i32", "token_ids": "*i64", "tokens": "*i64", "scores": "*fp32"}
    assert_fits(compile_for(card, best_tile_kernel, types, merge_constants(width, torch.empty(0))), card, tmp_path)


def test_one_list_of_dtypes_says_what_runs_on_gpus() -> None:
    from selfspec_kernels import (
        accept_kernel,
        exit_head_kernel,
        exit_loss_kernel,
        packed_linear,
        rms_norm_kernel,
        silu_mul_kernel,
    )

    modules = (
        accept_kernel,
        exit_head_kernel,
        exit_loss_kernel,
        packed_linear,
        rms_norm_kernel,
        silu_mul_kernel,
    )
    assert {module.DTYPES for module in modules} == {ops.GPU_DTYPES}
