"""`ragged_attention` against plain softmax attention, and what it exists for: bits that depend on nothing else."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from cards import CARDS, POINTERS, Fake, assert_fits, assert_passes_under_the_interpreter, compile_for, specialisation
from selfspec_kernels import BLOCK, block_attention, cpu, has_compiled_attention, ops, ragged_attention, visibility_bias
from tolerances import RAGGED_ATTENTION

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


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
    return block_attention(query, keys, values, bias, 0.25)


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


@pytest.mark.parametrize("soft_cap, sinks", [(None, None), (0.7, None), (None, [0.5, -30.0, 30.0])])
def test_the_op_on_a_cpu(soft_cap, sinks):
    query, keys, values, positions = case([[10, 11], [130, 131]], num_blocks=2, heads=3, kv_heads=1)
    scores = torch.einsum("bthd,bsd->bhts", query, keys[:, 0]) * 0.25
    if soft_cap is not None:
        scores = soft_cap * (scores / soft_cap).tanh()
    scores = scores.masked_fill((torch.arange(2 * BLOCK) > positions[..., None])[:, None], float("-inf"))
    if sinks is not None:
        # A slot more, of which no value is mixed in.
        sinks = torch.tensor(sinks)
        scores = torch.cat((scores, sinks[None, :, None, None].expand(2, -1, 2, 1)), -1)
    wanted = torch.einsum("bhts,bsd->bthd", scores.softmax(-1)[..., : 2 * BLOCK], values[:, 0])
    for sequence, last in enumerate((11, 131)):
        keys[sequence, :, last + 1 :] = values[sequence, :, last + 1 :] = float("nan")
    out = ragged_attention(query, keys, values, positions, 0.25, soft_cap=soft_cap, sinks=sinks)
    torch.testing.assert_close(out, wanted, rtol=0, atol=RAGGED_ATTENTION)


@needs_triton
def test_the_triton_op_under_the_interpreter():
    assert_passes_under_the_interpreter(Path(__file__).with_name("interpreted_ragged_attention.py"))


BLOCK_TYPES = dict.fromkeys(("mixed", "peaks", "totals"), "*fp32") | {"scale": "fp32"}
BLOCK_TYPES |= dict.fromkeys(("rows", "num_blocks", "sequence_stride", "head_stride"), "i32")


@needs_triton
@pytest.mark.parametrize(
    "size, dtype, window, soft_cap",
    [
        (64, torch.bfloat16, None, None),
        (80, torch.float16, None, None),
        (96, torch.bfloat16, 2048, None),
        (128, torch.bfloat16, None, None),
        (256, torch.bfloat16, 4096, 50.0),
        (256, torch.float32, None, None),
    ],
)
@pytest.mark.parametrize("card", CARDS)
def test_it_compiles_without_spills(card, size, dtype, window, soft_cap, tmp_path, monkeypatch):
    from selfspec_kernels import ragged_attention_kernel as on_gpu

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    types = {"query": "*fp32", "keys": POINTERS[dtype], "values": POINTERS[dtype], "positions": "*i64", **BLOCK_TYPES}
    constants = on_gpu.block_constants(32, 8, size, window, soft_cap)
    around: Any = {"unaligned": ["positions"], "num_warps": on_gpu.NUM_WARPS}
    assert_fits(compile_for(card, on_gpu.block_kernel, types, constants, **around), card, tmp_path)
    types = {**dict.fromkeys(("mixed", "peaks", "totals"), "*fp32"), "positions": "*i64", "sinks": "*fp32"}
    types |= {"out": POINTERS[dtype], "num_blocks": "i32"}
    constants = on_gpu.merge_constants(32, size, window, torch.empty(32))
    assert_fits(compile_for(card, on_gpu.merge_kernel, types, constants, **around), card, tmp_path)


@needs_triton
def test_one_compiled_kernel_serves_all_calls_of_a_layer():
    """Whatever their number of rows and blocks, and wherever their positions stand: another might have other bits."""
    from selfspec_kernels import ragged_attention_kernel as on_gpu

    numbers, places = torch.empty(64), torch.empty(64, dtype=torch.long)
    calls = [(1, 1, BLOCK, BLOCK, places[1:]), (9, 16, 16 * BLOCK, 32 * BLOCK, places)]
    constants = on_gpu.block_constants(32, 8, 128, None, None)
    blocks = [
        specialisation(on_gpu.block_kernel, *[numbers] * 3, at, *[numbers] * 3, 0.1, *shape, num_warps=4, **constants)
        for *shape, at in calls
    ]
    assert blocks[0] == blocks[1]
    constants = on_gpu.merge_constants(32, 128, None, None)
    merges = [
        specialisation(on_gpu.merge_kernel, *[numbers] * 3, at, *[numbers] * 2, shape[1], num_warps=4, **constants)
        for *shape, at in calls
    ]
    assert merges[0] == merges[1]


@needs_triton
def test_where_attention_is_compiled(monkeypatch: pytest.MonkeyPatch):
    gpu: Any = Fake("cuda", torch.float16)
    assert has_compiled_attention(gpu, 80) and not has_compiled_attention(gpu, 72)
    other: Any = Fake("cuda", torch.float64)
    assert not has_compiled_attention(other, 64)
    assert has_compiled_attention(torch.ones(1), 72) and not has_compiled_attention(torch.ones(1), 12)
    monkeypatch.setattr(ops, "triton_available", lambda: False)
    assert not has_compiled_attention(gpu, 80)
