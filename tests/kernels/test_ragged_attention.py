"""`ragged_attention` against plain softmax attention, and what it exists for: bits that depend on nothing else."""

from __future__ import annotations

import pytest
import torch
from selfspec_kernels import BLOCK, cpu, ragged_attention, visibility_bias
from tolerances import RAGGED_ATTENTION


def case(
    positions: list[list[int]],
    *,
    num_blocks: int,
    heads: int = 6,
    kv_heads: int = 2,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    batch, rows, size = len(positions), len(positions[0]), 16
    query = torch.randn(batch, rows, heads, size, generator=generator)
    keys = torch.randn(batch, kv_heads, num_blocks * BLOCK, size, generator=generator).to(dtype)
    values = torch.randn(batch, kv_heads, num_blocks * BLOCK, size, generator=generator).to(dtype)
    return query, keys, values, torch.tensor(positions)


@pytest.fixture(params=["compiled", "reference"])
def attend(request):
    return {"compiled": compiled, "reference": reference}[request.param]


def compiled(query, keys, values, positions, window=None):
    out = cpu.ragged_attention(query, keys, values, positions, 0.25, window, torch.float32)
    return out.view(query.shape)


def reference(query, keys, values, positions, window=None):
    group = query.shape[2] // keys.shape[1]
    bias = visibility_bias(positions, keys.shape[2] // BLOCK, group, window)
    return ragged_attention(query, keys, values, bias, 0.25)


def naive(query, keys, values, positions, window=None):
    group = query.shape[2] // keys.shape[1]
    keys, values = keys.float().repeat_interleave(group, 1), values.float().repeat_interleave(group, 1)
    scores = torch.einsum("bthd,bhsd->bhts", query, keys) * 0.25
    slots = torch.arange(keys.shape[2])
    visible = slots <= positions[..., None]
    if window is not None:
        visible &= slots > positions[..., None] - window
    scores = scores.masked_fill(~visible[:, None], float("-inf"))
    return torch.einsum("bhts,bhsd->bthd", scores.softmax(-1), values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 1, 40, 200])
@pytest.mark.parametrize("positions", [[[0]], [[127]], [[128]], [[126, 127, 128, 129]], [[5, 6], [300, 301], [0, 1]]])
def test_equals_softmax_attention(attend, positions, window, dtype):
    inputs = case(positions, num_blocks=3, dtype=dtype)
    torch.testing.assert_close(attend(*inputs, window), naive(*inputs, window), rtol=0, atol=RAGGED_ATTENTION)


@pytest.mark.parametrize("heads, kv_heads", [(1, 1), (2, 2), (6, 2), (8, 1)])
def test_head_groups(attend, heads, kv_heads):
    inputs = case([[200, 201, 202]], num_blocks=2, heads=heads, kv_heads=kv_heads)
    torch.testing.assert_close(attend(*inputs), naive(*inputs), rtol=0, atol=RAGGED_ATTENTION)


@pytest.mark.parametrize("position", [60, 127, 128, 300])
def test_bits_do_not_depend_on_rows_or_blocks_read(attend, position):
    query, keys, values, positions = case([[position]], num_blocks=6)
    needed = position // BLOCK + 1
    alone = attend(query, keys[:, :, : needed * BLOCK], values[:, :, : needed * BLOCK], positions)
    for num_blocks in range(needed, 7):
        live = num_blocks * BLOCK
        assert torch.equal(attend(query, keys[:, :, :live], values[:, :, :live], positions), alone)
    for rows in range(2, 10):
        others = torch.randn(1, rows, *query.shape[2:])
        for index in range(rows):
            others[:, index] = query[:, 0]
            at = positions.expand(1, rows)
            assert torch.equal(attend(others, keys, values, at)[:, index], alone[:, 0]), (rows, index)


def test_blocks_no_row_may_see_add_exact_zero_even_when_huge(attend):
    query, keys, values, positions = case([[10]], num_blocks=2)
    reference = attend(query, keys, values, positions)
    keys[:, :, 11:], values[:, :, 11:] = 1e30, -1e30
    assert torch.equal(attend(query, keys, values, positions), reference)


def test_the_compiled_op_reads_no_slot_beyond_a_rows_position():
    query, keys, values, positions = case([[10, 11], [130, 131]], num_blocks=2)
    expected = compiled(query, keys, values, positions)
    for row, last in enumerate((11, 131)):
        keys[row, :, last + 1 :], values[row, :, last + 1 :] = float("nan"), float("nan")
    assert torch.equal(compiled(query, keys, values, positions), expected)


def test_the_compiled_op_rounds_to_bf16_as_torch_does():
    inputs = case([[200, 201]], num_blocks=2, dtype=torch.bfloat16)
    out = cpu.ragged_attention(*inputs, 0.25, None, torch.bfloat16)
    assert torch.equal(out, compiled(*inputs).flatten(2).to(torch.bfloat16))
