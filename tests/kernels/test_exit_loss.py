"""`exit_loss` without a GPU: under Triton's interpreter, and compiled for the cards it is meant for.

Compilation shows that no registers are spilled and that shared memory suffices. It does not show how fast anything is,
nor that a card computes what the interpreter does.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import selfspec_kernels
import torch
from cards import CARDS, POINTERS, Fake, assert_fits, assert_passes_under_the_interpreter, compile_for
from selfspec_kernels import ops, reference

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


@needs_triton
def test_results_under_the_interpreter() -> None:
    assert_passes_under_the_interpreter(Path(__file__).with_name("interpreted_exit_loss.py"))


def compiled(card: str, dtype: torch.dtype, parts: tuple[float, float, float] | None) -> Any:
    """Compile the kernel as `exit_loss` launches it for a vocabulary of 128,256 and a teacher."""
    from selfspec_kernels.exit_loss_kernel import NUM_WARPS, exit_loss_kernel, launch_constants

    constants = launch_constants(128256, torch.empty(0), parts)
    types = {"logits": POINTERS[dtype], "targets": "*i64", "teacher": POINTERS[dtype], "losses": "*fp32"}
    types |= dict.fromkeys(("cross_entropy", "divergence", "variation"), "fp32")
    return compile_for(card, exit_loss_kernel, types, constants, num_warps=NUM_WARPS)


@needs_triton
@pytest.mark.parametrize("parts", [(0.0, 1.0, 0.0), (0.0, 0.3, 0.7), None], ids=["kl", "mixture", "counted only"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("card", CARDS)
def test_it_compiles_without_spills(card, dtype, parts, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    assert_fits(compiled(card, dtype, parts), card, tmp_path)


@needs_triton
def test_only_gpus_and_known_dtypes_have_this_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu: Any = Fake("cuda", torch.bfloat16)
    assert ops.on_gpu(gpu)
    other: Any = Fake("cuda", torch.float64)
    assert not ops.on_gpu(other) and not ops.on_gpu(torch.ones(1))
    monkeypatch.setattr(ops, "triton_available", lambda: False)
    assert not ops.on_gpu(gpu)


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
