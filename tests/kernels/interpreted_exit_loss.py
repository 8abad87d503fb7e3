"""`exit_loss` under Triton's interpreter. `test_exit_loss` runs this file in a process of its own.

The interpreter is chosen when triton is imported, which another test of the session may have done already.
"""

from __future__ import annotations

import pytest
import selfspec_kernels
import torch
from selfspec_kernels import exit_loss_kernel, ops, reference
from selfspec_kernels.exit_loss_kernel import exit_loss
from tolerances import EXIT_LOSS, ROUNDED

PARTS = {
    "ce": (1.0, 0.0, 0.0),
    "kl": (0.0, 1.0, 0.0),
    "tv": (0.0, 0.0, 1.0),
    "mixture": (0.0, 0.3, 0.7),
    "anchored": (0.6, 0.4, 0.0),
    "all": (0.2, 0.3, 0.5),
    "counted only": None,
}


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of several blocks, so that the interpreter need not walk along thousands of logits to see a second one."""
    monkeypatch.setattr(exit_loss_kernel, "BLOCK", 64)


def numbers(rows: int, width: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (4 * torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))).to(dtype)


def amid_garbage(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a copy that stands in a larger buffer of NaN, and that buffer."""
    buffer = torch.full((tensor.numel() + 512,), float("nan"), dtype=tensor.dtype)
    return buffer[256 : 256 + tensor.numel()].view(tensor.shape).copy_(tensor), buffer


def assert_as_the_reference(
    logits: torch.Tensor, targets: torch.Tensor, teacher: torch.Tensor | None, parts: tuple[float, float, float] | None
) -> None:
    """Compare losses and gradient, both in fp32 from the same logits, NaN and infinity included."""
    ours, buffer = amid_garbage(logits)
    losses = exit_loss(ours, targets, None if teacher is None else amid_garbage(teacher)[0], parts)
    theirs = logits.to(torch.float32, copy=True)
    wanted = reference.exit_loss(theirs, targets, teacher, parts)
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses, wanted, rtol=EXIT_LOSS, atol=EXIT_LOSS, equal_nan=True)
    rounded = ROUNDED[logits.dtype] if parts is not None else 0.0
    torch.testing.assert_close(ours.float(), theirs, rtol=EXIT_LOSS + rounded, atol=EXIT_LOSS, equal_nan=True)
    assert buffer[:256].isnan().all() and buffer[-256:].isnan().all(), "written beside the logits"


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("rows, width", [(1, 1), (2, 63), (1, 64), (2, 65), (3, 200)])
def test_losses_and_gradients_of_odd_shapes(rows, width, parts):
    targets = torch.arange(rows) * 37 % width
    assert_as_the_reference(numbers(rows, width, 0), targets, numbers(rows, width, 1), parts)


@pytest.mark.parametrize("name", ["ce", "all", "counted only"])
def test_without_a_teacher_there_is_only_cross_entropy(name):
    assert_as_the_reference(numbers(3, 150, 0), torch.tensor([0, 149, 70]), None, PARTS[name])


@pytest.mark.parametrize("name", ["all", "kl", "counted only"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("teacher_dtype", [torch.float32, torch.bfloat16])
def test_logits_of_16_bits_are_computed_in_fp32(teacher_dtype, dtype, name):
    logits, teacher = numbers(3, 150, 0, dtype), numbers(3, 150, 1, teacher_dtype)
    assert_as_the_reference(logits, torch.tensor([0, 149, 70]), teacher, PARTS[name])


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_an_exit_that_equals_its_teacher(parts):
    logits = numbers(3, 150, 0)
    assert_as_the_reference(logits, torch.tensor([0, 149, 70]), logits.clone(), parts)


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_saturated_rows_and_excluded_tokens(parts):
    logits, teacher = numbers(6, 150, 0), numbers(6, 150, 1)
    logits[0] *= 1000
    teacher[1] *= 1000
    teacher[2, :70] = float("-inf")  # a whole first block, of which p has nothing
    logits[3, 64:128] = teacher[3, 64:128] = float("-inf")  # of which neither has
    logits[4], teacher[4] = -1e30, 1e30  # uniform, far from 0
    logits[5, :70] = float("-inf")  # excluded by q though not by p: an infinite KL
    assert_as_the_reference(logits, torch.tensor([0, 149, 140, 0, 5, 149]), teacher, parts)


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_a_row_that_is_not_finite_spoils_no_other(parts):
    targets, teacher = torch.tensor([0, 149, 70]), numbers(3, 150, 1)
    logits = numbers(3, 150, 0)
    alone = logits.clone()
    wanted = exit_loss(alone, targets, teacher, parts)
    logits[1, 100] = float("nan")
    losses = exit_loss(logits, targets, teacher, parts)
    assert losses[1].isnan().all()
    assert torch.equal(losses[[0, 2]], wanted[[0, 2]]) and torch.equal(logits[[0, 2]], alone[[0, 2]])
    if parts is not None:
        assert logits[1].isnan().all()


def test_the_op_is_this_one_where_logits_are_on_a_gpu(monkeypatch):
    monkeypatch.setattr(ops, "on_gpu", lambda logits: True)
    targets, teacher = torch.tensor([0, 149, 70]), numbers(3, 150, 1)
    first, second = numbers(3, 150, 0), numbers(3, 150, 0)
    losses = selfspec_kernels.exit_loss(first, targets, teacher, (0.0, 1.0, 0.0))
    assert torch.equal(losses, exit_loss(second, targets, teacher, (0.0, 1.0, 0.0)))
    assert torch.equal(first, second)
    assert not torch.equal(losses, reference.exit_loss(numbers(3, 150, 0), targets, teacher, None))


def test_no_rows_and_what_does_not_go_together():
    logits, targets = numbers(3, 20, 0), torch.zeros(3, dtype=torch.long)
    assert exit_loss(logits[:0], targets[:0], None, None).shape == (0, 3)
    for bad in (
        (logits.double(), targets, None),
        (logits[:, :10], targets, None),
        (logits, targets[:2], None),
        (logits, targets, numbers(2, 20, 0)),
        (logits, targets, numbers(3, 20, 0).t().contiguous().t()),
    ):
        with pytest.raises(ValueError):
            exit_loss(*bad, (1.0, 0.0, 0.0))
