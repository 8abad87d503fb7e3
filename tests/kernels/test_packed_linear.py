"""`packed_linear` without a GPU: its results under Triton's interpreter, and compiled for the cards it is meant for.

Compilation shows that no registers are spilled, that shared memory suffices, and that a row's sum has one order however
many rows a call has. It does not show how fast anything is, nor that a card computes what the interpreter does.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from selfspec_kernels import PackedWeight, has_packed_product, ops

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")

INTERPRETED = Path(__file__).with_name("interpreted_packed_linear.py")
# (backend, architecture, threads of a warp, bytes of shared memory that a program may have)
CARDS = {
    "sm_80": ("cuda", 80, 32, 163 << 10),
    "sm_90": ("cuda", 90, 32, 227 << 10),
    "sm_100": ("cuda", 100, 32, 227 << 10),
    "gfx942": ("hip", "gfx942", 64, 64 << 10),
}
TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.int8: "*i8", torch.int16: "*i16", torch.int32: "*i32"}


def test_results_under_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider", str(INTERPRETED)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "passed" in done.stdout and "skipped" not in done.stdout


def empty_weight(size: int, bits: int, group: int) -> PackedWeight:
    padded = -(-size // 64) * 64
    if bits == 8:
        return PackedWeight((1, size), 8, torch.empty(1, padded, dtype=torch.int8), torch.empty(1))
    levels = torch.empty(1, padded // 2, dtype=torch.uint8)
    return PackedWeight((1, size), 4, levels, torch.empty(1, padded // group, 2, dtype=torch.bfloat16))


def compile_for(card: str, weight: PackedWeight, num_rows: int) -> Any:
    """Compile the kernel as `packed_linear` launches it, with bf16 inputs and results."""
    import triton
    from selfspec_kernels.packed_linear import OPTIONS, launch_constants, loaded_as, packed_linear_kernel
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants, num_warps = launch_constants(num_rows, weight)
    levels, scales = loaded_as(weight)
    types = {"inputs": "*bf16", "levels": TYPES[levels.dtype], "scales": TYPES[scales.dtype], "out": "*bf16"}
    signature = {**types, "num_rows": "i32", "width": "i32", **dict.fromkeys(constants, "constexpr")}
    aligned = {(argument,): [["tt.divisibility", 16]] for argument in range(len(types))}
    source = ASTSource(packed_linear_kernel, signature, constexprs=constants, attrs=aligned)
    target = GPUTarget(*CARDS[card][:3])
    return triton.compile(source, target=target, options={"num_warps": num_warps, **OPTIONS})


def spills(kernel: Any, folder: Path) -> list[int]:
    """Return what the assembler says of registers spilled to memory; empty if it says nothing."""
    if "amdgcn" in kernel.asm:
        return [int(count) for count in re.findall(r"\.[sv]gpr_spill_count: *(\d+)", kernel.asm["amdgcn"])]
    from triton.backends.nvidia.compiler import get_ptxas

    source = folder / "kernel.ptx"
    source.write_text(kernel.asm["ptx"], encoding="utf-8")
    [architecture] = re.findall(r"^\.target (\w+)", kernel.asm["ptx"], re.MULTILINE)
    capability = int(re.sub(r"\D", "", architecture))
    command = [get_ptxas(capability).path, "-v", f"--gpu-name={architecture}", str(source), "-o", str(folder / "cubin")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [int(count) for count in re.findall(r"(\d+) bytes spill", done.stderr)]


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
        kernel = compile_for(card, empty_weight(size, bits, group), num_rows)
        spilled = spills(kernel, tmp_path)
        assert len(spilled) >= 2 and not any(spilled)
        assert kernel.metadata.shared <= CARDS[card][3]
        found = order_of_sums(kernel)
        assert len(found) == 1
        orders |= found
    assert len(orders) == 1, "rows of different calls are summed in different orders"


def test_only_gpus_and_known_dtypes_have_this_product(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fake:
        def __init__(self, device: str, dtype: torch.dtype) -> None:
            self.device, self.dtype = torch.device(device), dtype

    gpu: Any = Fake("cuda", torch.float16)
    assert has_packed_product(gpu)
    other: Any = Fake("cuda", torch.float64)
    assert not has_packed_product(other) and not has_packed_product(torch.ones(1, dtype=torch.float16))
    monkeypatch.setattr(ops, "triton_available", lambda: False)
    assert not has_packed_product(gpu)
