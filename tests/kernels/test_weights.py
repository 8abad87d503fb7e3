"""Weights packed in 8 and 4 bits."""

from __future__ import annotations

import pytest
import torch
from selfspec_kernels import GROUP, PackedWeight, pack, packable


def weight(rows: int = 40, size: int = 96) -> torch.Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("bits, group", [(8, 128), (4, 32), (4, 64)])
def test_no_weight_is_off_by_more_than_rounding_and_the_clipping_allowed(bits, group):
    """Half a level by rounding; the scale search may clip a group's largest weight by an eighth."""
    full = weight(size=128)
    packed = pack(full, bits, group)
    assert packed.group == group
    largest = full.view(40, -1, group).abs().amax(-1, keepdim=True)
    error = (packed.dequantised() - full).view(40, -1, group).abs()
    assert (error <= largest * (1 / (2 ** (bits - 1) - 1) / 2 + 0.12)).all()
    assert error.square().mean().sqrt() < full.std() * (0.01 if bits == 8 else 0.1)


def test_searched_scales_are_no_worse_than_the_plain_one():
    full = weight()
    groups = full.view(40, -1, GROUP)
    scale = groups.abs().amax(-1, keepdim=True) / 7
    plain = ((groups / scale).round().clamp(-8, 7) * scale - groups).square().sum()
    assert (pack(full, 4).dequantised() - full).square().sum() < 0.95 * plain


@pytest.mark.parametrize("bits", [8, 4])
def test_weights_on_the_grid_survive_exactly(bits):
    limit = 2 ** (bits - 1)
    levels = torch.randint(-limit, limit, (8, 64), generator=torch.Generator().manual_seed(1)).float()
    levels[:, ::GROUP] = -limit
    packed = pack(levels * 0.5, bits)
    assert torch.equal(packed.dequantised(), levels * 0.5)


def test_halves_of_a_byte_are_weights_half_a_block_apart():
    data = torch.zeros(1, 16, dtype=torch.int8)
    data[0, 0], data[0, 15] = 0x1F, -16 * 8 + 3
    values = PackedWeight((1, 32), 4, data, torch.tensor([[0.5]])).dequantised()[0]
    assert (values[[0, 16, 15, 31]] * 2).tolist() == [7, 1, -5, -8] and (values[1:15] == -4).all()


def test_zero_rows_and_bytes():
    full = weight()
    full[3] = 0
    for bits, expected in ((8, 40 * 96 + 4 * 40), (4, 40 * 48 + 4 * 40 * 3)):
        packed = pack(full, bits)
        assert not packed.dequantised()[3].any() and packed.num_bytes == expected


def test_shapes_that_cannot_be_packed_are_named():
    for bits, group, size in ((4, 32, 40), (8, 32, 40), (4, 64, 96)):
        assert f"its {size} inputs are no multiple of {group}" in packable(torch.zeros(8, size), bits, group)
    assert not packable(torch.zeros(8, 96), 4) and not packable(torch.zeros(8, 96), 8)
    with pytest.raises(ValueError, match="40 inputs"):
        pack(torch.zeros(8, 40), 4)
    with pytest.raises(ValueError, match="no group of 48"):
        pack(torch.zeros(8, 96), 4, 48)
