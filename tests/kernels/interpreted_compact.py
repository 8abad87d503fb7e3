"""`compact` under Triton's interpreter. `test_compact` runs this file in a process of its own.

The interpreter is chosen when triton is imported, which another test of the session may have done already.
"""

from __future__ import annotations

import pytest
import torch
from selfspec_kernels import compact_kernel, reference


@pytest.fixture(autouse=True)
def few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that move less than a row, so that a small one has several."""
    monkeypatch.setattr(compact_kernel, "NUMBERS", 64)


def storage_of(batch: int, dtype: torch.dtype = torch.float32, size: int = 10) -> torch.Tensor:
    return torch.randn(2, 2, 3, batch, 16, size, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [[0], [4], [0, 1, 2, 3, 4], [1, 2, 3, 4], [0, 2, 4], [3, 4]])
def test_every_number_is_that_of_the_reference(rows, dtype):
    """Also those beyond what is committed, which neither touches."""
    ours, wanted = storage_of(5, dtype), storage_of(5, dtype)
    committed = torch.tensor([7, 16, 1, 0, 13])
    compact_kernel.compact(ours, torch.tensor(rows), committed)
    reference.compact(wanted, torch.tensor(rows), committed)
    assert torch.equal(ours, wanted)


def test_the_first_rows_of_a_larger_cache():
    whole, wanted, committed = storage_of(5), storage_of(5), torch.tensor([16, 9, 16])
    compact_kernel.compact(whole[:, :, :, :3], torch.tensor([1, 2]), committed)
    reference.compact(wanted[:, :, :, :3], torch.tensor([1, 2]), committed)
    assert torch.equal(whole, wanted)


def test_slots_that_are_not_committed_do_not_spoil_what_is():
    storage = storage_of(2)
    storage[:, :, :, 1, 5:] = float("nan")
    wanted = storage[:, :, :, 1, :5].clone()
    before = storage[:, :, :, 0, 5:].clone()
    compact_kernel.compact(storage, torch.tensor([1]), torch.tensor([3, 5]))
    assert torch.equal(storage[:, :, :, 0, :5], wanted) and torch.equal(storage[:, :, :, 0, 5:], before)


def test_no_rows_and_what_does_not_go_together():
    storage, rows, committed = storage_of(3), torch.tensor([1, 2]), torch.tensor([4, 4, 4])
    before = storage.clone()
    compact_kernel.compact(storage, rows[:0], committed)
    assert torch.equal(storage, before)
    for bad in (
        (storage[..., ::2], rows, committed),
        (storage[:, :, :, :, :8], rows, committed),
        (storage[:, :1], rows, committed),
        (storage, rows[None], committed),
        (storage, rows, committed[:2]),
    ):
        with pytest.raises(ValueError):
            compact_kernel.compact(*bad)
