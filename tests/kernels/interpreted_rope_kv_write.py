"""`rope_kv_write` under Triton's interpreter. `test_rope_kv_write` runs this file in a process of its own.

The interpreter is chosen when triton is imported, which another test of the session may have done already.
"""

from __future__ import annotations

import pytest
import selfspec_kernels
import torch
from selfspec_kernels import ops, reference, rope_kv_write_kernel
from tolerances import ROPE_KV_WRITE, ROUNDED

SLOTS = 32
FLOAT32 = torch.float32


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Case:
    """Heads, tables and a cache of which the op sees one layer, 7.0 wherever nothing was written."""

    def __init__(self, positions, written, *, num_heads=3, num_kv_heads=1, size=16, dtype=FLOAT32, normed=False):
        self.positions, self.written, self.num_heads = torch.tensor(positions), written, num_heads
        batch, rows = self.positions.shape
        self.heads = numbers(batch, rows, (num_heads + 2 * num_kv_heads) * size).to(dtype)
        self.storage = torch.full((3, 2, num_kv_heads, batch, SLOTS, size), 7.0).to(dtype)
        angles = torch.arange(SLOTS)[:, None] * 100.0 ** (-torch.arange(size // 2) / (size // 2))
        self.rotary = torch.cat((angles.cos(), angles.cos()), -1), torch.cat((-angles.sin(), angles.sin()), -1)
        # Nothing here has both halves, or queries and keys, alike.
        self.rotary = tuple(table * numbers(size, seed=9) for table in self.rotary)
        self.norms = ((numbers(size, seed=1).to(dtype), 0.5), (numbers(size, seed=2).to(dtype), 1e-6))
        self.norms = self.norms if normed else None

    def run(self, op, heads=None, **around):
        """Return the queries and the whole cache."""
        storage = self.storage.clone()
        keys, values = storage[1].transpose(1, 2)
        heads = self.heads if heads is None else heads
        arguments = (heads, keys, values, self.positions, self.written, self.rotary, self.num_heads, self.norms)
        return op(*arguments, **around), storage


def assert_as_the_reference(case: Case) -> None:
    """The reference has fp32 heads and cache, so that what is rounded once here is not rounded there."""
    dtype = case.heads.dtype
    query, storage = case.run(rope_kv_write_kernel.rope_kv_write)
    case.storage = case.storage.float()
    if case.norms is not None:
        case.norms = tuple((weight.float(), eps) for weight, eps in case.norms)
    wanted, wanted_storage = case.run(reference.rope_kv_write, case.heads.float())
    assert query.dtype == FLOAT32 and storage.dtype == dtype
    torch.testing.assert_close(query, wanted, rtol=0, atol=ROPE_KV_WRITE[FLOAT32])
    torch.testing.assert_close(storage.float(), wanted_storage, rtol=ROUNDED[dtype], atol=ROPE_KV_WRITE[FLOAT32])
    assert (storage == 7).sum() == (wanted_storage == 7).sum()


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("dtype", ROUNDED)
def test_ragged_rows_of_which_the_last_are_padding(dtype, normed):
    assert_as_the_reference(Case([[3, 4, 4], [30, 31, 31]], 2, num_kv_heads=2, num_heads=4, dtype=dtype, normed=normed))


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("size", [2, 64, 80, 96, 128, 256])
def test_head_sizes(size, normed):
    assert_as_the_reference(Case([[0, 31]], 2, size=size, normed=normed))


@pytest.mark.parametrize("rows", range(1, 10))
def test_numbers_of_rows(rows):
    assert_as_the_reference(Case([list(range(5, 5 + rows))], rows))


def test_no_row_is_written():
    case = Case([[3, 3]], 0)
    assert_as_the_reference(case)
    assert (case.run(rope_kv_write_kernel.rope_kv_write)[1] == 7).all()


@pytest.mark.parametrize("normed", [False, True])
def test_bits_depend_on_the_row_alone(normed):
    many = Case([[3, 9, 20, 21, 22], [0, 1, 2, 3, 4]], 5, normed=normed)
    query, storage = many.run(rope_kv_write_kernel.rope_kv_write)
    for sequence, row in ((0, 1), (1, 4)):
        position = int(many.positions[sequence, row])
        one = Case([[position]], 1, normed=normed)
        alone, cache = one.run(rope_kv_write_kernel.rope_kv_write, many.heads[sequence, row][None, None])
        assert torch.equal(alone[0, 0], query[sequence, row])
        assert torch.equal(cache[:, :, :, 0, position], storage[:, :, :, sequence, position])


def test_a_row_that_is_not_finite_spoils_no_other():
    case = Case([[3, 4, 5]], 3, normed=True)
    wanted, wanted_storage = case.run(rope_kv_write_kernel.rope_kv_write)
    case.heads[0, 1] = float("nan")
    query, storage = case.run(rope_kv_write_kernel.rope_kv_write)
    assert query[0, 1].isnan().all() and storage[1, :, :, 0, 4].isnan().all()
    assert torch.equal(query[:, [0, 2]], wanted[:, [0, 2]])
    storage[1, :, :, 0, 4] = wanted_storage[1, :, :, 0, 4]
    assert torch.equal(storage, wanted_storage)


def test_the_op_is_this_one_where_heads_are_on_a_gpu(monkeypatch):
    case = Case([[3, 4, 4]], 2, normed=True)
    plain = case.run(selfspec_kernels.rope_kv_write)[0]
    monkeypatch.setattr(ops, "on_gpu", lambda tensor: True)
    called = []
    genuine = rope_kv_write_kernel.rope_kv_write
    monkeypatch.setattr(rope_kv_write_kernel, "rope_kv_write", lambda *rest: called.append(1) or genuine(*rest))
    for mode, calls in (("reference", 0), ("compiled", 1)):
        query = case.run(selfspec_kernels.rope_kv_write, mode=mode)[0]
        assert len(called) == calls
        torch.testing.assert_close(query, plain, rtol=0, atol=ROPE_KV_WRITE[FLOAT32])


def test_no_rows_and_what_does_not_go_together():
    case = Case([[3, 4]], 2)
    keys, values = case.storage[1].transpose(1, 2)
    rest = (case.positions, 2, case.rotary, 3, None)
    op = rope_kv_write_kernel.rope_kv_write
    assert op(case.heads[:, :0], keys, values, case.positions[:, :0], *rest[1:]).shape == (1, 0, 3, 16)
    halves = tuple(table[:, :8] for table in case.rotary)
    for bad in (
        (case.heads.double(), keys, values, *rest),
        (case.heads, keys.double(), values.double(), *rest),
        (case.heads, keys, values.bfloat16(), *rest),
        (case.heads, keys, values.repeat(1, 1, 2, 1)[:, :, :SLOTS], *rest),
        (case.heads, keys[..., ::2], values[..., ::2], *rest),
        (case.heads[:, :1], keys, values, *rest),
        (case.heads[..., :-1], keys, values, *rest),
        (case.heads, keys, values, case.positions, 2, halves, 3, None),
    ):
        with pytest.raises(ValueError):
            op(*bad)
