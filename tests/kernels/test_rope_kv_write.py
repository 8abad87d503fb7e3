"""`rope_kv_write`: the compiled op against the reference, and the reference against complex rotation."""

from __future__ import annotations

import pytest
import torch
from selfspec_kernels import rope_kv_write
from tolerances import ROPE_KV_WRITE


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
