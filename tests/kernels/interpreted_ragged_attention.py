"""`ragged_attention` under Triton's interpreter. `test_ragged_attention` runs this file in a process of its own.

The interpreter is chosen when triton is imported, which another test of the session may have done already.
"""

from __future__ import annotations

import pytest
import selfspec_kernels
import torch
from selfspec_kernels import BLOCK, ops, ragged_attention_kernel, reference
from tolerances import RAGGED_ATTENTION, ROUNDED

SCALE = 0.25


@pytest.fixture(autouse=True)
def new_memory_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the blocks' programs leave out must not be merged."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, **kind: empty(*shape, **kind).fill_(float("nan")))


def case(
    positions: list[list[int]],
    *,
    num_blocks: int = 0,
    heads: int = 4,
    kv_heads: int = 2,
    size: int = 16,
    dtype: torch.dtype = torch.float32,
) -> list[torch.Tensor]:
    """Queries, keys, values and positions: views of one layer of a cache that is NaN where no row may look."""
    generator = torch.Generator().manual_seed(size)
    batch, rows = len(positions), len(positions[0])
    num_blocks = num_blocks or max(map(max, positions)) // BLOCK + 1
    query = torch.randn(batch, rows, heads, size, generator=generator)
    storage = torch.full((2, kv_heads, batch, num_blocks * BLOCK, size), float("nan"), dtype=dtype)
    for sequence, row in enumerate(positions):
        shape = (2, kv_heads, max(row) + 1, size)
        storage[:, :, sequence, : max(row) + 1] = torch.randn(shape, generator=generator).to(dtype)
    keys, values = storage.transpose(1, 2)
    return [query, keys, values, torch.tensor(positions)]


def attend(query, keys, values, positions, window=None, soft_cap=None, sinks=None, out_dtype=torch.float32):
    return ragged_attention_kernel.ragged_attention(
        query, keys, values, positions, SCALE, window, soft_cap, sinks, out_dtype
    )


def assert_as_the_reference(inputs, window=None, soft_cap=None, sinks=None, out_dtype=torch.float32):
    out = attend(*inputs, window, soft_cap, sinks, out_dtype)
    wanted = reference.ragged_attention(*inputs, SCALE, window, soft_cap, sinks, torch.float32)
    assert out.dtype == out_dtype and wanted.isfinite().all()
    torch.testing.assert_close(out.float(), wanted, rtol=ROUNDED[out_dtype], atol=RAGGED_ATTENTION)


@pytest.mark.parametrize("window", [None, 1, 40, 200])
@pytest.mark.parametrize("positions", [[[0]], [[127]], [[128]], [[126, 127, 128, 129]], [[5, 6], [300, 301], [0, 1]]])
def test_ragged_lengths_at_the_edges_of_blocks(positions, window):
    assert_as_the_reference(case(positions), window)


@pytest.mark.parametrize("rows", range(1, 10))
def test_numbers_of_rows(rows):
    assert_as_the_reference(case([list(range(125, 125 + rows))]))


@pytest.mark.parametrize("heads, kv_heads", [(1, 1), (2, 2), (6, 2), (9, 1), (16, 1)])
def test_groups_of_heads(heads, kv_heads):
    assert_as_the_reference(case([[130, 131, 132]], heads=heads, kv_heads=kv_heads))


@pytest.mark.parametrize(
    "size, dtype",
    [
        (64, torch.bfloat16),
        (80, torch.float32),
        (80, torch.bfloat16),
        (96, torch.float16),
        (128, torch.bfloat16),
        (256, torch.float32),
    ],
)
def test_head_sizes_and_caches_of_16_bits(size, dtype):
    assert_as_the_reference(case([[129, 130]], size=size, dtype=dtype, heads=2, kv_heads=1))


@pytest.mark.parametrize("out_dtype", ROUNDED)
def test_results_are_rounded_once(out_dtype):
    assert_as_the_reference(case([[129, 130]]), out_dtype=out_dtype)


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("soft_cap", [None, 0.7])
@pytest.mark.parametrize("logits", [None, [-50.0, 0.5, 3.0, 40.0]])
def test_caps_and_sinks(logits, soft_cap, window):
    sinks = None if logits is None else torch.tensor(logits)
    assert_as_the_reference(case([[3, 4], [200, 201]]), window, soft_cap, sinks)


def test_more_blocks_than_a_merge_loads_at_a_time(monkeypatch):
    monkeypatch.setattr(ragged_attention_kernel, "MERGED", 2)
    assert_as_the_reference(case([[600]], heads=1, kv_heads=1))
    assert_as_the_reference(case([[600]], heads=1, kv_heads=1), 300)


def test_large_scores_are_safe():
    query, *rest = case([[130, 131]])
    assert_as_the_reference([300 * query, *rest])


def test_rows_of_one_call_may_stand_in_any_order():
    assert_as_the_reference(case([[200, 3, 130, 130]]))


@pytest.mark.parametrize("position", [60, 127, 128, 300])
def test_bits_depend_on_the_row_alone(position):
    """Not on the capacity, other rows and their live length, its own index, or other sequences."""
    query, keys, values, positions = case([[position]], num_blocks=3, kv_heads=1)
    needed = (position // BLOCK + 1) * BLOCK
    alone = attend(query, keys[:, :, :needed], values[:, :, :needed], positions)
    assert torch.equal(attend(query, keys, values, positions), alone)
    keys, values = keys.nan_to_num(0.5), values.nan_to_num(-0.5)
    for rows in (2, 3, 9):
        for index in {0, rows - 1}:
            others = torch.randn(1, rows, *query.shape[2:])
            others[:, index] = query[:, 0]
            at = torch.arange(rows)[None] * 40
            at[0, index] = position
            assert torch.equal(attend(others, keys, values, at)[:, index], alone[:, 0]), (rows, index)
    both = [torch.cat((torch.randn_like(part), part)) for part in (query, keys, values)]
    assert torch.equal(attend(*both, torch.tensor([[383], [position]]))[1:], alone)


def test_bits_do_not_depend_on_what_stands_beyond_the_row():
    query, keys, values, positions = case([[10, 11], [130, 131]], num_blocks=2)
    wanted = attend(query, keys, values, positions)
    assert wanted.isfinite().all()
    keys, values = keys.nan_to_num(1e30), values.nan_to_num(-1e30)
    assert torch.equal(attend(query, keys, values, positions), wanted)


def test_a_row_that_is_not_finite_spoils_no_other():
    query, *rest = case([[130, 131, 132], [5, 6, 7]])
    wanted = attend(query, *rest)
    query[0, 1, 2] = float("nan")
    out = attend(query, *rest)
    assert out[0, 1, 2].isnan().all()
    out[0, 1, 2] = wanted[0, 1, 2]
    assert torch.equal(out, wanted)


def test_the_op_is_this_one_where_the_cache_is_on_a_gpu(monkeypatch):
    inputs, sinks = case([[129, 130]]), torch.tensor([0.5, 1.0, -2.0, 3.0])
    wanted = selfspec_kernels.ragged_attention(*inputs, SCALE, window=100, soft_cap=0.7, sinks=sinks)
    monkeypatch.setattr(ops, "attention_on_gpu", lambda tensor, head_size: True)
    ours = selfspec_kernels.ragged_attention(*inputs, SCALE, window=100, soft_cap=0.7, sinks=sinks)
    assert torch.equal(ours, attend(*inputs, 100, 0.7, sinks)) and not torch.equal(ours, wanted)
    torch.testing.assert_close(ours, wanted, rtol=0, atol=RAGGED_ATTENTION)


def test_no_rows_and_what_does_not_go_together():
    query, keys, values, positions = case([[3, 4]])
    assert attend(query[:, :0], keys, values, positions[:, :0]).shape == (1, 0, 4, 16)
    for bad in (
        (query.bfloat16(), keys, values, positions),
        (query, keys.double(), values.double(), positions),
        (query, keys, values.bfloat16(), positions),
        (query[..., :8], keys[..., :8], values[..., :8], positions),
        (query, keys[:, :, :100], values[:, :, :100], positions),
        (query, keys, values.repeat(1, 1, 2, 1)[:, :, :BLOCK], positions),
        (query[:, :, :3], keys, values, positions),
        (query, keys, values, positions[:, :1]),
    ):
        with pytest.raises(ValueError):
            attend(*bad)
    with pytest.raises(ValueError):
        attend(query, keys, values, positions, None, None, torch.ones(2))
