"""Weights packed in 8 and 4 bits."""

from __future__ import annotations

import pytest
import torch
from selfspec_kernels import GROUP, PackedWeight, pack, packable, weights


def weight(rows: int = 40, size: int = 96) -> torch.Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("bits, group", [(8, 128), (4, 32), (4, 64)])
def test_no_weight_is_off_by_more_than_rounding_and_the_clipping_allowed(bits, group):
    """Half a level by rounding; the search for a scale may clip a group's largest weight by an eighth of the range."""
    full = weight(size=128) + 0.5
    packed = pack(full, bits, group)
    assert packed.group == group
    groups = full.view(40, -1, group)
    span = 2 * groups.abs().amax(-1) if bits == 8 else groups.amax(-1) - groups.amin(-1)
    error = (packed.dequantised() - full).view(40, -1, group).abs()
    assert (error <= span[..., None] * (0.5 / (2**bits - 1) + 0.06)).all()
    assert error.square().mean().sqrt() < full.std() * {(8, 128): 0.012, (4, 32): 0.08, (4, 64): 0.092}[bits, group]


def test_groups_far_from_zero_keep_their_digits():
    """A group's minimum is its own: weights of 5 ± 1 have the errors of weights of 0 ± 1."""
    centred, far = weight(size=128), weight(size=128) + 5
    errors = [(pack(full, 4).dequantised() - full).square().mean().sqrt() for full in (centred, far)]
    assert errors[1] < 1.1 * errors[0]


def test_searched_scales_are_no_worse_than_the_plain_one():
    full = weight()
    groups = full.view(40, -1, GROUP)
    smallest, largest = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scale = (largest - smallest) / 15
    plain = (((groups - smallest) / scale).round() * scale + smallest - groups).square().sum()
    assert (pack(full, 4).dequantised() - full).square().sum() < 0.97 * plain


@pytest.mark.parametrize("bits", [8, 4])
def test_weights_on_the_grid_survive_exactly(bits):
    limit = 2 ** (bits - 1)
    levels = torch.randint(-limit, limit, (8, 64), generator=torch.Generator().manual_seed(1)).float()
    levels[:, ::GROUP], levels[:, 1::GROUP] = -limit, limit - 1
    packed = pack(levels * 0.5, bits)
    assert torch.equal(packed.dequantised(), levels * 0.5)


def test_a_weight_packed_in_parts_is_packed_as_one(monkeypatch):
    full = weight(40, 64)
    for bits in (8, 4):
        whole = pack(full, bits)
        with monkeypatch.context() as patch:
            patch.setattr(weights, "WEIGHTS_AT_ONCE", 7 * 64)
            parts = pack(full, bits)
        assert torch.equal(whole.data, parts.data) and torch.equal(whole.scale, parts.scale)


def test_halves_of_a_byte_are_weights_half_a_block_apart():
    data = torch.zeros(1, 16, dtype=torch.uint8)
    data[0, 0], data[0, 15] = 0x1F, 0x83
    values = PackedWeight((1, 32), 4, data, torch.tensor([[[0.5, -4.0]]], dtype=torch.bfloat16)).dequantised()[0]
    assert ((values[[0, 16, 15, 31]] + 4) * 2).tolist() == [15, 1, 3, 8] and (values[1:15] == -4).all()


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
