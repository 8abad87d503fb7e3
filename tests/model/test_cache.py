"""The shared cache: layout, growth, row views and the zeroing of stale slots."""

from __future__ import annotations

import torch
from tiny import tiny_config

from selfspec_tune.model.cache import SharedKVCache, blocks_for
from selfspec_tune.model.families import describe


def make(batch_size: int = 2, capacity: int = 10) -> SharedKVCache:
    return SharedKVCache(describe(tiny_config()), batch_size, capacity, torch.float32, torch.device("cpu"))


def test_whole_blocks():
    assert [blocks_for(n) for n in (0, 1, 128, 129, 256, 257)] == [1, 1, 1, 2, 2, 3]
    assert make(capacity=130).capacity == 256


def test_writes_land_at_each_rows_own_slot():
    cache = make()
    keys, values = torch.randn(2, 3, 2, 16), torch.randn(2, 3, 2, 16)
    slots = torch.tensor([[4, 5, 6], [70, 71, 72]]) + torch.tensor([[0], [cache.capacity]])
    cache.write(3, slots.flatten(), keys, values)
    for row, first in enumerate((4, 70)):
        assert torch.equal(cache.keys[3, row, :, first : first + 3], keys[row].transpose(0, 1))
        assert torch.equal(cache.values[3, row, :, first : first + 3], values[row].transpose(0, 1))
    assert cache.keys.count_nonzero() == keys.numel()
    read_keys, read_values = cache.read(3, 128)
    assert torch.equal(read_keys, cache.keys[3]) and torch.equal(read_values, cache.values[3])


def test_growth_keeps_what_is_there():
    cache = make()
    cache._storage.normal_()
    before = cache.keys.clone()
    cache.reserve(129)
    assert cache.capacity == 256
    assert torch.equal(cache.keys[..., :128, :], before)
    assert not cache.keys[..., 128:, :].any()


def test_row_is_a_view_of_memory_and_committed():
    cache = make()
    row = cache.row(1)
    row.committed += 7
    row.write(0, torch.tensor([3]), torch.ones(1, 1, 2, 16), torch.ones(1, 1, 2, 16))
    assert cache.committed.tolist() == [0, 7]
    assert cache.keys[0, 1, :, 3].eq(1).all() and not cache.keys[0, 0].any()


def test_kept_rows_move_to_the_front_and_can_be_written_and_grow():
    cache = make(batch_size=4)
    cache._storage.normal_()
    cache.committed[:] = torch.tensor([5, 9, 0, 128])
    keys, values = cache.keys.clone(), cache.values.clone()
    cache.keep_rows(torch.tensor([1, 3]))
    cache.keep_rows(torch.tensor([0, 1]))
    assert cache.batch_size == 2 and cache.committed.tolist() == [9, 128] and cache.keys.shape[1] == 2
    for place, (row, end) in enumerate(((1, 9), (3, 128))):
        assert torch.equal(cache.keys[:, place, :, :end], keys[:, row, :, :end])
        assert torch.equal(cache.values[:, place, :, :end], values[:, row, :, :end])
    new = torch.randn(2, 1, 2, 16)
    cache.write(3, torch.tensor([9, cache.capacity + 20]), new, -new)
    assert torch.equal(cache.read(3, 128)[0][0, :, 9], new[0, 0])
    assert torch.equal(cache.read(3, 128)[1][1, :, 20], -new[1, 0])
    cache.reserve(200)
    assert cache.capacity == 256 and torch.equal(cache.keys[:, 0, :, :9], keys[:, 1, :, :9])
    cache.keep_rows(torch.tensor([1]))
    assert cache.committed.tolist() == [128] and torch.equal(cache.values[0, 0, :, :20], values[0, 3, :, :20])


def test_clear_stale_zeroes_only_the_named_layers_beyond_each_rows_end():
    cache = make()
    cache._storage.fill_(float("nan"))
    cache.clear_stale([5, 100], 128, 2, 4)
    assert not cache.keys[2:4, 0, :, 5:].any() and not cache.values[2:4, 1, :, 100:].any()
    assert cache.keys[2:4, 0, :, :5].isnan().all() and cache.keys[2:4, 1, :, :100].isnan().all()
    assert cache.keys[:2].isnan().all() and cache.keys[4:].isnan().all()


def test_poison_spares_committed_slots():
    cache = make()
    cache.committed[:] = torch.tensor([3, 0])
    cache.poison()
    assert not cache.keys[:, 0, :, :3].isnan().any()
    assert cache.keys[:, 0, :, 3:].isnan().all() and cache.values[:, 1].isnan().all()
