"""`LayerStack`: layers in one compiled call have the bits of layers one by one."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from selfspec_kernels import pack
from tiny import VOCAB, tiny_model

from selfspec_tune.model.decoder import LayeredDecoder
from selfspec_tune.model.layer import LayerStack

KINDS = [
    ("llama", {}),
    ("qwen3", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 50, "max_window_layers": 3}),
]


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("model_type, changes", KINDS)
@torch.inference_mode()
def test_one_call_has_the_bits_of_layer_after_layer(model_type, changes, packed, dtype, threads):
    decoder = LayeredDecoder(tiny_model(model_type, **changes).to(dtype))
    layers = decoder.layers(0, decoder.num_layers)
    if packed:
        layers = [layer.with_weights(partial(pack, bits=4)) for layer in layers]
    stack = LayerStack(layers)
    caches = [decoder.new_cache(2, 200) for _ in range(2)]
    generator = torch.Generator().manual_seed(0)
    for begin, rows in ((0, 9), (9, 1), (10, 4), (126, 5)):
        tokens = torch.randint(VOCAB, (2, rows), generator=generator)
        positions = begin + torch.arange(rows) + torch.tensor([[0], [7]])
        results = []
        for cache, run in zip(caches, (stack.run, one_by_one(layers)), strict=True):
            written = max(1, rows - 1)  # the last row is padding
            step = decoder.step(positions, written, cache, 0, decoder.num_layers)
            hidden = decoder.embed(tokens)
            before = hidden.clone()
            results.append((run(hidden, step, 0, 2), run(hidden, step, 2, decoder.num_layers)))
            assert torch.equal(hidden, before)
        assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
        assert torch.equal(caches[0].keys, caches[1].keys) and torch.equal(caches[0].values, caches[1].values)


def one_by_one(layers):
    def run(hidden, step, start, stop):
        for layer in layers[start:stop]:
            hidden = layer(hidden, step)
        return hidden

    return run


@torch.inference_mode()
def test_a_layer_added_later_runs_too():
    decoder = LayeredDecoder(tiny_model())
    cache, positions = decoder.new_cache(1, 64), torch.tensor([[3]])
    hidden = decoder.embed(torch.tensor([[5]]))
    step = decoder.step(positions, 1, cache, 0, 1)
    stack = LayerStack(decoder.layers(0, 1))
    first = stack.run(hidden, step, 0, 1)
    stack.append(decoder.layers(0, 2)[1])
    assert torch.equal(stack.run(hidden, step, 0, 2), stack.run(first, step, 1, 2))
    assert torch.equal(stack.run(hidden, step, 1, 1), hidden)


@torch.inference_mode()
def test_layers_compiled_by_torch_compute_what_layers_do(reference_ops):
    """In fp32, up to the order of sums in six layers (seen: 4e-5). Weights stay, and prefills are left as they are."""
    decoder, other = LayeredDecoder(tiny_model()), LayeredDecoder(tiny_model())
    before = [weight.data_ptr() for layer in range(other.num_layers) for weight, _ in other.products(layer)]
    assert other.compile_layers()
    assert before == [weight.data_ptr() for layer in range(other.num_layers) for weight, _ in other.products(layer)]
    calls = []
    for layer in other.layers(0, other.num_layers):
        first, second = layer.parts
        layer.parts = lambda *args, run=first: (calls.append(1), run(*args))[1], second
    tokens = torch.randint(VOCAB, (2, 40), generator=torch.Generator().manual_seed(0))
    for rows in (20, 1, 3):
        wanted, ours = (
            each.run_layers(
                each.embed(tokens[:, :rows]),
                torch.arange(rows).expand(2, rows).contiguous(),
                each.new_cache(2, 64),
                0,
                each.num_layers,
            )
            for each in (decoder, other)
        )
        torch.testing.assert_close(ours, wanted, rtol=2e-4, atol=2e-4)
    assert len(calls) == 2 * other.num_layers


def test_torch_compiles_nothing_where_layers_are_one_compiled_call():
    decoder = LayeredDecoder(tiny_model())
    assert not decoder.compile_layers()
    assert all(layer.parts is None for layer in decoder.layers(0, decoder.num_layers))
