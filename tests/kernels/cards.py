"""The cards that kernels are compiled for without a GPU, and the interpreter that runs them on a CPU.

Compilation shows that no registers are spilled and that shared memory suffices. It does not show how fast anything is,
nor that a card computes what the interpreter does.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

# (backend, architecture, threads of a warp, bytes of shared memory that a program may have)
CARDS = {
    "sm_80": ("cuda", 80, 32, 163 << 10),
    "sm_90": ("cuda", 90, 32, 227 << 10),
    "sm_100": ("cuda", 100, 32, 227 << 10),
    "gfx942": ("hip", "gfx942", 64, 64 << 10),
}
POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int8: "*i8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


class Fake:
    """A tensor of which only device and dtype are known: one on a GPU, where there is none."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        self.device, self.dtype = torch.device(device), dtype


def assert_passes_under_the_interpreter(file: Path) -> None:
    """Run a file of tests in a process of its own, in which triton interprets.

    The interpreter is chosen when triton is imported, which another test of the session may have done already.
    """
    command = [sys.executable, "-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider", str(file)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "passed" in done.stdout and "skipped" not in done.stdout


def compile_for(
    card: str,
    kernel: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    *,
    unaligned: Collection[str] = (),
    **options: Any,
) -> Any:
    """Compile a kernel for a card, as triton does when it is launched.

    Args:
        types: of the arguments that are not constants, in order: "*fp32", "i32" and the like.
        constants: the kernel's compile-time arguments.
        unaligned: pointers of which it may not be assumed that they are multiples of 16.
        options: of compilation, such as `num_warps`.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {**types, **dict.fromkeys(constants, "constexpr")}
    aligned = [i for i, (name, kind) in enumerate(types.items()) if kind.startswith("*") and name not in unaligned]
    attributes = {(argument,): [["tt.divisibility", 16]] for argument in aligned}
    source = ASTSource(kernel, signature, constexprs=dict(constants), attrs=attributes)
    return triton.compile(source, target=GPUTarget(*CARDS[card][:3]), options=options)


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


def assert_fits(kernel: Any, card: str, folder: Path) -> None:
    """Assert that a compiled kernel keeps its numbers in registers, and has no more shared memory than the card."""
    spilled = spills(kernel, folder)
    assert len(spilled) >= 2 and not any(spilled)
    assert kernel.metadata.shared <= CARDS[card][3]
