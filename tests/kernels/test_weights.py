"""Weights packed in 8 and 4 bits."""

from __future__ import annotations

import pytest
import torch
from selfspec_kernels import GROUP, PackedWeight, pack, packed_bytes, weights


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


def test_places_of_levels_are_as_documented():
    """Vector j of a block has weights 8 j..8 j + 7 of its first half, then of its second."""
    levels = torch.arange(64) % 16
    line = torch.tensor([[[0.5, -4.0]] * 2], dtype=torch.bfloat16)
    places = [[8 * j + lane % 8 + 32 * (lane >= 8) for lane in range(16)] for j in range(4)]
    bytes_of_4 = [int(levels[places[j][lane]] | levels[places[j + 1][lane]] << 4) for lane in range(16) for j in (0, 2)]
    packed = PackedWeight((1, 64), 4, torch.tensor([bytes_of_4], dtype=torch.uint8), line)
    assert torch.equal(packed.dequantised()[0], levels * 0.5 - 4)
    data = (torch.arange(64) - 30).to(torch.int8)[torch.tensor(places).flatten()][None]
    assert torch.equal(
        PackedWeight((1, 64), 8, data, torch.tensor([2.0])).dequantised()[0], torch.arange(64) * 2.0 - 60
    )


def test_zero_rows_and_bytes():
    full = weight(40, 192)
    full[3] = 0
    for bits, group, expected in (
        (8, 32, 40 * 192 + 4 * 40),
        (4, 32, 40 * 96 + 4 * 40 * 6),
        (4, 64, 40 * 96 + 4 * 40 * 3),
    ):
        packed = pack(full, bits, group)
        assert not packed.dequantised()[3].any()
        assert packed.num_bytes == packed_bytes(full.shape, bits, group) == expected


@pytest.mark.parametrize("bits, group", [(8, 32), (4, 32), (4, 64)])
def test_rows_of_any_length_are_packed_and_what_fills_them_costs_no_digits(bits, group):
    for size in (1, 40, 96, 130):
        full = weight(6, size) + 3
        packed = pack(full, bits, group)
        assert packed.shape == (6, size) and packed.group == (size if bits == 8 else group)
        assert packed.num_bytes == packed_bytes(full.shape, bits, group)
        assert (packed.dequantised() - full).abs().max() < (0.05 if bits == 8 else 0.3)


def test_no_other_group():
    with pytest.raises(ValueError, match="no group of 48"):
        pack(torch.zeros(8, 96), 4, 48)
