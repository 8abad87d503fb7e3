"""`rope_kv_write`: the compiled op against the reference, and the reference against complex rotation."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from cards import CARDS, POINTERS, Fake, assert_fits, assert_passes_under_the_interpreter, compile_for, specialisation
from selfspec_kernels import ops, rope_kv_write
from tolerances import ROPE_KV_WRITE

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


def tables(size: int, count: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.arange(count)[:, None] * 100.0 ** (-torch.arange(size // 2) / (size // 2))
    return torch.cat((angles.cos(), angles.cos()), -1), torch.cat((-angles.sin(), angles.sin()), -1)


def run(mode: str, dtype: torch.dtype, *, normed: bool, num_heads: int = 4, num_kv_heads: int = 2, size: int = 16):
    generator = torch.Generator().manual_seed(0)
    positions = torch.tensor([[3, 4, 5], [40, 41, 41]])
    storage = torch.full((2, num_kv_heads, 2, 64, size), 7.0).to(dtype)
    keys, values = storage.transpose(1, 2)
    heads = torch.randn(2, 3, (num_heads + 2 * num_kv_heads) * size, generator=generator).to(dtype)
    norm = (torch.rand(size, generator=generator).to(dtype), 1e-6)
    norms = (norm, norm) if normed else None
    query = rope_kv_write(heads, keys, values, positions, 2, tables(size), num_heads, norms, mode=mode)
    return heads.view(2, 3, -1, size), query, keys, values


@pytest.mark.parametrize("dtype", ROPE_KV_WRITE)
@pytest.mark.parametrize("normed", [False, True])
def test_compiled_equals_reference(dtype, normed):
    compiled, reference = (run(mode, dtype, normed=normed)[1:] for mode in ("compiled", "reference"))
    for ours, theirs in zip(compiled, reference, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=ROPE_KV_WRITE[dtype])


@pytest.mark.parametrize("mode", ["compiled", "reference"])
def test_rotation_is_that_of_complex_numbers_and_padding_writes_nothing(mode):
    heads, query, keys, values = run(mode, torch.float32, normed=False)
    cos, sin = (table[:, :8] for table in tables(16))
    turn = torch.complex(cos, -sin)
    for row, position in enumerate((3, 40)):
        half = torch.complex(heads[row, 0, 0, :8], heads[row, 0, 0, 8:]) * turn[position]
        torch.testing.assert_close(query[row, 0, 0], torch.cat((half.real, half.imag)))
        torch.testing.assert_close(values[row, :, position], heads[row, 0, 6:], rtol=0, atol=0)
        half = torch.complex(heads[row, 1, 5, :8], heads[row, 1, 5, 8:]) * turn[position + 1]
        torch.testing.assert_close(keys[row, 1, position + 1], torch.cat((half.real, half.imag)))
    untouched = torch.ones(64, dtype=torch.bool)
    untouched[[3, 4]] = False
    assert (keys[0][:, untouched] == 7).all() and (values[0][:, untouched] == 7).all()


@needs_triton
def test_the_triton_op_under_the_interpreter():
    assert_passes_under_the_interpreter(Path(__file__).with_name("interpreted_rope_kv_write.py"))


NUMBERS = {"query_eps": "fp32", "key_eps": "fp32"} | dict.fromkeys(
    ("rows", "written", "sequence_stride", "head_stride"), "i32"
)


@needs_triton
@pytest.mark.parametrize(
    "size, dtype, normed",
    [(64, torch.bfloat16, False), (80, torch.float16, False), (128, torch.bfloat16, True), (256, torch.float32, True)],
)
@pytest.mark.parametrize("card", CARDS)
def test_it_compiles_without_spills(card, size, dtype, normed, tmp_path, monkeypatch):
    from selfspec_kernels import rope_kv_write_kernel as on_gpu

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    pointer = POINTERS[dtype]
    types = {**dict.fromkeys(("heads", "keys", "values"), pointer), "positions": "*i64", "cos": "*fp32", "sin": "*fp32"}
    types |= {"query_norm": pointer, "key_norm": pointer, "query": "*fp32", **NUMBERS}
    constants = on_gpu.launch_constants(32, 8, size, normed=normed)
    around: Any = {"unaligned": ["positions"], "num_warps": on_gpu.NUM_WARPS}
    assert_fits(compile_for(card, on_gpu.rope_kv_write_kernel, types, constants, **around), card, tmp_path)


@needs_triton
def test_one_compiled_kernel_serves_all_calls_of_a_layer():
    """Whatever their number of rows, and wherever their positions stand: another might have other bits."""
    from selfspec_kernels import rope_kv_write_kernel as on_gpu

    numbers, places = torch.empty(64), torch.empty(64, dtype=torch.long)
    constants = {**on_gpu.launch_constants(32, 8, 128, normed=True), "num_warps": on_gpu.NUM_WARPS}
    found = [
        specialisation(on_gpu.rope_kv_write_kernel, *[numbers] * 3, at, *[numbers] * 5, 1e-6, 1e-6, *shape, **constants)
        for at, *shape in ((places[1:], 1, 1, 128, 128), (places, 16, 9, 2048, 4096))
    ]
    assert found[0] == found[1]


@needs_triton
def test_where_triton_rotates(monkeypatch: pytest.MonkeyPatch):
    gpu: Any = Fake("cuda", torch.bfloat16)
    other: Any = Fake("cuda", torch.float64)
    assert ops.on_gpu(gpu) and not ops.on_gpu(other) and not ops.on_gpu(torch.ones(1))
    monkeypatch.setattr(ops, "triton_available", lambda: False)
    assert not ops.on_gpu(gpu)
