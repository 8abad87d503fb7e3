"""Loading: what is accepted, and refusals a user can act on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny import END, byte_tokenizer, tiny_config

from selfspec_tune.errors import UserError
from selfspec_tune.model.decoder import load_decoder
from selfspec_tune.model.families import check_supported, describe
from selfspec_tune.model.load import end_tokens, load_model, load_outline, load_tokenizer, resolve_device


def test_loads_a_directory_in_its_own_dtype_or_another(save_tiny):
    directory = save_tiny(dtype=torch.bfloat16)
    assert load_decoder(str(directory)).dtype == torch.bfloat16
    assert load_decoder(str(directory), dtype="float32").dtype == torch.float32
    assert end_tokens(load_model(str(directory))) == (END,)


def test_other_architectures_are_refused_by_name(tmp_path):
    tiny_config("gemma2").save_pretrained(tmp_path)
    with pytest.raises(UserError) as caught:
        load_model(str(tmp_path))
    assert caught.value.got == "gemma2"
    assert caught.value.allowed == "llama, mistral, qwen2, qwen3"


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_length_dependent_rotary_scaling_is_refused(rope_type):
    config = tiny_config()
    config.rope_parameters = {"rope_type": rope_type, "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(UserError, match="rotary"):
        check_supported(config)


def test_windows_per_layer():
    assert describe(tiny_config("mistral", sliding_window=9)).windows == (9,) * 6
    mixed = tiny_config("qwen2", use_sliding_window=True, sliding_window=9, max_window_layers=4)
    assert describe(mixed).windows == (None,) * 4 + (9,) * 2
    assert describe(tiny_config("qwen2")).windows == (None,) * 6


@pytest.mark.parametrize("name", ["no-such-directory-or-model", "."])
def test_what_is_no_checkpoint_is_a_user_error(name, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError):
        load_model(name)


def test_broken_weights_are_a_user_error(save_tiny):
    directory = save_tiny("broken")
    (directory / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(UserError, match="weights"):
        load_model(str(directory))


@pytest.mark.parametrize("generation", [{"eos_token_id": [END, 7]}, {}, None])
def test_the_outline_says_what_the_loaded_model_says(save_tiny, generation):
    directory = save_tiny("outlined", dtype=torch.bfloat16)
    path = directory / "generation_config.json"
    if generation is None:
        path.unlink()
    else:
        path.write_text(json.dumps(generation))
    outline, model = load_outline(str(directory)), load_model(str(directory))
    assert (outline.vocab_size, outline.hidden_size) == model.lm_head.weight.shape
    assert outline.end_tokens == end_tokens(model) and outline.dtype == model.lm_head.weight.dtype
    assert outline.head_bytes(outline.vocab_size) == model.lm_head.weight.nbytes
    assert load_outline(str(directory), dtype="float32").dtype == torch.float32


def test_unknown_device_is_a_user_error():
    with pytest.raises(UserError, match="device"):
        resolve_device("quantum")


def test_an_adapter_directory_is_merged_into_its_base(checkpoint: Path, tmp_path: Path):
    from peft import LoraConfig, get_peft_model

    base = load_model(str(checkpoint))
    tokens = torch.arange(20)[None]
    plain = base(tokens).logits
    adapted = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    adapted.peft_config["default"].base_model_name_or_path = str(checkpoint)
    adapted.save_pretrained(tmp_path)
    expected = adapted(tokens).logits
    assert json.loads((tmp_path / "adapter_config.json").read_text())["base_model_name_or_path"] == str(checkpoint)
    merged = load_model(str(tmp_path))
    torch.testing.assert_close(merged(tokens).logits, expected, rtol=0, atol=1e-4)
    assert not torch.allclose(merged(tokens).logits, plain, atol=1e-2)
    assert load_tokenizer(str(tmp_path)).eos_token_id == byte_tokenizer().eos_token_id
    assert load_outline(str(tmp_path)) == load_outline(str(checkpoint))
    load_decoder(str(tmp_path))
