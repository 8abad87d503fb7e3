"""`LayeredDecoder` against transformers' own forward, for every supported family and both ways of running a layer."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from cards import assert_passes_under_the_interpreter
from tiny import VOCAB, tiny_model

from selfspec_tune.model.decoder import LayeredDecoder
from selfspec_tune.model.rows import RowCounts

# fp32; the layers here round in another order than transformers' attention and RMSNorm.
TOLERANCE = 5e-4

FAMILIES = [
    ("llama", {}),
    ("qwen2", {}),
    ("qwen3", {}),
    ("mistral", {"sliding_window": None}),
    ("mistral", {"sliding_window": 50}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 50, "max_window_layers": 3}),
    ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 256,
            }
        },
    ),
]


@pytest.mark.parametrize("model_type, changes", FAMILIES)
@pytest.mark.parametrize("fused", [True, False])
@torch.inference_mode()
def test_equals_transformers(model_type, changes, fused):
    model = tiny_model(model_type, **changes)
    tokens = torch.randint(VOCAB, (1, 180), generator=torch.Generator().manual_seed(1))
    expected = model(tokens, attention_mask=torch.ones_like(tokens)).logits
    decoder = LayeredDecoder(model, fused=fused)
    cache = decoder.new_cache(capacity=64)
    last = decoder.logits(decoder.prefill(tokens[:, :150], cache))
    torch.testing.assert_close(last[:, 0], expected[:, 149], rtol=0, atol=TOLERANCE)
    # Then a call of several rows, split over the layers as verification is.
    positions = torch.arange(150, 180)[None]
    hidden = decoder.run_layers(decoder.embed(tokens[:, 150:]), positions, cache, 0, 2)
    hidden = decoder.run_layers(hidden, positions, cache, 2, decoder.num_layers)
    torch.testing.assert_close(decoder.logits(hidden), expected[:, 150:], rtol=0, atol=TOLERANCE)


@torch.inference_mode()
def test_fast_attention_equals_transformers():
    for model_type, changes in FAMILIES:
        model = tiny_model(model_type, **changes)
        tokens = torch.randint(VOCAB, (1, 150), generator=torch.Generator().manual_seed(1))
        expected = model(tokens, attention_mask=torch.ones_like(tokens)).logits
        decoder = LayeredDecoder(model)
        decoder.exact = False
        last = decoder.logits(decoder.prefill(tokens, decoder.new_cache()))
        torch.testing.assert_close(last[:, 0], expected[:, -1], rtol=0, atol=TOLERANCE)


def test_fusing_keeps_one_copy_of_the_weights():
    model = tiny_model("qwen2")
    before = {name: parameter.clone() for name, parameter in model.state_dict().items()}
    decoder = LayeredDecoder(model)
    attention, fused = model.model.layers[0].self_attn, decoder._layers[0]
    assert attention.q_proj.weight.data_ptr() == fused.qkv.data_ptr()
    assert attention.k_proj.weight.untyped_storage().data_ptr() == fused.qkv.untyped_storage().data_ptr()
    assert attention.v_proj.bias.untyped_storage().data_ptr() == fused.qkv_bias.untyped_storage().data_ptr()
    for name, parameter in model.state_dict().items():
        assert torch.equal(parameter, before[name]), name


@torch.inference_mode()
def test_padding_rows_write_nothing_and_change_nothing():
    decoder = LayeredDecoder(tiny_model())
    tokens = torch.randint(VOCAB, (1, 130), generator=torch.Generator().manual_seed(2))
    caches = [decoder.new_cache(), decoder.new_cache()]
    for cache in caches:
        decoder.prefill(tokens[:, :126], cache)
    positions = torch.arange(126, 130)[None]
    decoder.rows = RowCounts((8,))
    padded = decoder.run_layers(decoder.embed(tokens[:, 126:]), positions, caches[0], 0, decoder.num_layers)
    whole = torch.cat((tokens[:, 126:], tokens[:, :4]), 1)
    eight = decoder.run_layers(decoder.embed(whole), torch.arange(126, 134)[None], caches[1], 0, decoder.num_layers)
    assert padded.shape[1] == 4
    assert torch.equal(padded, eight[:, :4])
    assert torch.equal(caches[0].keys[..., :130, :], caches[1].keys[..., :130, :])
    assert not caches[0].keys[..., 130:, :].any()


@torch.inference_mode()
def test_rows_of_different_lengths_equal_each_row_alone():
    decoder = LayeredDecoder(tiny_model("mistral", sliding_window=60))
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(VOCAB, (1, length), generator=generator) for length in (3, 127, 200)]
    batched = decoder.new_cache(3, 256)
    for row, prompt in enumerate(prompts):
        decoder.prefill(prompt, batched.row(row))
    tokens = torch.randint(VOCAB, (3, 2), generator=generator)
    positions = batched.committed[:, None] + torch.arange(2)
    together = decoder.run_layers(decoder.embed(tokens), positions, batched, 0, decoder.num_layers)
    for row, prompt in enumerate(prompts):
        cache = decoder.new_cache()
        decoder.prefill(prompt, cache)
        alone = decoder.run_layers(
            decoder.embed(tokens[row : row + 1]), positions[row : row + 1], cache, 0, decoder.num_layers
        )
        torch.testing.assert_close(together[row : row + 1], alone, rtol=0, atol=TOLERANCE)


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_the_ops_of_a_gpu_under_the_interpreter():
    assert_passes_under_the_interpreter(Path(__file__).with_name("interpreted_decoder.py"))
