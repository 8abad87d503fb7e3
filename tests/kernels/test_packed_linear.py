"""`packed_linear` without a GPU: its results under Triton's interpreter, and compiled for the cards it is meant for.

Compilation shows that no registers are spilled, that shared memory suffices, and that a row's sum has one order however
many rows a call has. It does not show how fast anything is, nor that a card computes what the interpreter does.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from cards import CARDS, POINTERS, Fake, assert_fits, assert_passes_under_the_interpreter, compile_for
from selfspec_kernels import PackedWeight, has_packed_product, ops

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


def test_results_under_the_interpreter() -> None:
    assert_passes_under_the_interpreter(Path(__file__).with_name("interpreted_packed_linear.py"))


def empty_weight(size: int, bits: int, group: int) -> PackedWeight:
    padded = -(-size // 64) * 64
    if bits == 8:
        return PackedWeight((1, size), 8, torch.empty(1, padded, dtype=torch.int8), torch.empty(1))
    levels = torch.empty(1, padded // 2, dtype=torch.uint8)
    return PackedWeight((1, size), 4, levels, torch.empty(1, padded // group, 2, dtype=torch.bfloat16))


def compiled(card: str, weight: PackedWeight, num_rows: int) -> Any:
    """Compile the kernel as `packed_linear` launches it, with bf16 inputs and results."""
    from selfspec_kernels.packed_linear import OPTIONS, launch_constants, loaded_as, packed_linear_kernel

    constants, num_warps = launch_constants(num_rows, weight)
    levels, scales = (POINTERS[tensor.dtype] for tensor in loaded_as(weight))
    types = {"inputs": "*bf16", "levels": levels, "scales": scales, "out": "*bf16", "num_rows": "i32", "width": "i32"}
    return compile_for(card, packed_linear_kernel, types, constants, num_warps=num_warps, **OPTIONS)


def order_of_sums(kernel: Any) -> set[str]:
    """Return which lanes and threads hold what the kernel sums up at its end, one entry per sum that differs."""
    ir = kernel.asm["ttgir"]
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", ir, re.MULTILINE))
    types = re.findall(r"^ *\}\) : \(tensor<(\w+), (#\w+)>\) ->", ir, re.MULTILINE)
    return {f"{shape} {layouts[layout]}" for shape, layout in types}


@pytest.mark.parametrize("bits, group, size", [(8, 32, 576), (8, 32, 4096), (4, 32, 576), (4, 64, 4096)])
@pytest.mark.parametrize("card", CARDS)
def test_the_shipped_configurations_compile_without_spills(card, bits, group, size, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    orders = set()
    for num_rows in (1, 2, 3):
        kernel = compiled(card, empty_weight(size, bits, group), num_rows)
        assert_fits(kernel, card, tmp_path)
        found = order_of_sums(kernel)
        assert len(found) == 1
        orders |= found
    assert len(orders) == 1, "rows of different calls are summed in different orders"


def test_only_gpus_and_known_dtypes_have_this_product(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu: Any = Fake("cuda", torch.float16)
    assert has_packed_product(gpu)
    other: Any = Fake("cuda", torch.float64)
    assert not has_packed_product(other) and not has_packed_product(torch.ones(1, dtype=torch.float16))
    monkeypatch.setattr(ops, "triton_available", lambda: False)
    assert not has_packed_product(gpu)
