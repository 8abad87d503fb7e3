"""`exit_loss` without a GPU: under Triton's interpreter, and compiled for the cards it is meant for.

Compilation shows that no registers are spilled and that shared memory suffices. It does not show how fast anything is,
nor that a card computes what the interpreter does.
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
import selfspec_kernels
import torch
from selfspec_kernels import ops, reference

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")

INTERPRETED = Path(__file__).with_name("interpreted_exit_loss.py")
# (backend, architecture, threads of a warp, bytes of shared memory that a program may have)
CARDS = {
    "sm_80": ("cuda", 80, 32, 163 << 10),
    "sm_90": ("cuda", 90, 32, 227 << 10),
    "sm_100": ("cuda", 100, 32, 227 << 10),
    "gfx942": ("hip", "gfx942", 64, 64 << 10),
}
TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16"}


@needs_triton
def test_results_under_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider", str(INTERPRETED)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "passed" in done.stdout and "skipped" not in done.stdout


def compile_for(card: str, dtype: torch.dtype, parts: tuple[float, float, float] | None) -> Any:
    """Compile the kernel as `exit_loss` launches it for a vocabulary of 128,256 and a teacher."""
    import triton
    from selfspec_kernels.exit_loss_kernel import NUM_WARPS, exit_loss_kernel, launch_constants
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = launch_constants(128256, torch.empty(0), parts)
    types = {"logits": TYPES[dtype], "targets": "*i64", "teacher": TYPES[dtype], "losses": "*fp32"}
    weights = dict.fromkeys(("cross_entropy", "divergence", "variation"), "fp32")
    signature = {**types, **weights, **dict.fromkeys(constants, "constexpr")}
    aligned = {(argument,): [["tt.divisibility", 16]] for argument in range(len(types))}
    source = ASTSource(exit_loss_kernel, signature, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=GPUTarget(*CARDS[card][:3]), options={"num_warps": NUM_WARPS})


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


@needs_triton
@pytest.mark.parametrize("parts", [(0.0, 1.0, 0.0), (0.0, 0.3, 0.7), None], ids=["kl", "mixture", "counted only"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("card", CARDS)
def test_it_compiles_without_spills(card, dtype, parts, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    kernel = compile_for(card, dtype, parts)
    spilled = spills(kernel, tmp_path)
    assert len(spilled) >= 2 and not any(spilled)
    assert kernel.metadata.shared <= CARDS[card][3]


@needs_triton
def test_only_gpus_and_known_dtypes_have_this_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fake:
        def __init__(self, device: str, dtype: torch.dtype) -> None:
            self.device, self.dtype = torch.device(device), dtype

    gpu: Any = Fake("cuda", torch.bfloat16)
    assert ops.losses_on_gpu(gpu)
    other: Any = Fake("cuda", torch.float64)
    assert not ops.losses_on_gpu(other) and not ops.losses_on_gpu(torch.ones(1))
    monkeypatch.setattr(ops, "triton_available", lambda: False)
    assert not ops.losses_on_gpu(gpu)


@pytest.mark.parametrize("rows", [1, 7])
def test_rows_taken_a_few_at_a_time_are_the_same(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    logits, teacher, targets = torch.randn(7, 40), torch.randn(7, 40), torch.randint(0, 40, (7,))
    whole, parts = logits.clone(), (0.2, 0.3, 0.5)
    wanted = selfspec_kernels.exit_loss(whole, targets, teacher, parts)
    monkeypatch.setattr(reference, "LOSS_BLOCK", 40 * rows)
    losses = selfspec_kernels.exit_loss(logits, targets, teacher, parts)
    assert torch.equal(losses, wanted) and torch.equal(logits, whole)


def test_excluded_tokens_cost_nothing_and_change_nothing() -> None:
    """In the reference, which the kernel is held against: -inf where p has nothing, as p without those tokens."""
    torch.manual_seed(0)
    logits, teacher, targets = torch.randn(3, 40), torch.randn(3, 40), torch.zeros(3, dtype=torch.long)
    logits[:, 30:] = teacher[:, 30:] = float("-inf")
    short = logits[:, :30].clone()
    wanted = selfspec_kernels.exit_loss(short, targets, teacher[:, :30], (0.2, 0.3, 0.5))
    losses = selfspec_kernels.exit_loss(logits, targets, teacher, (0.2, 0.3, 0.5))
    torch.testing.assert_close(losses, wanted)
    torch.testing.assert_close(logits[:, :30], short)
    assert logits[:, 30:].abs().max() == 0
