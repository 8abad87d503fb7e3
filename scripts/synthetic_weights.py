"""Weights of a Llama-like model that were never trained, and how much of them lies behind an exit.

Tensors are drawn one by one, each from a generator seeded with the model's seed and the tensor's name, so they depend
on neither order nor what else was drawn; bits are equal across runs on one device. Attention is sharp (scores have a
standard deviation of 4) and the embedding small beside what layers add: then the next token depends on far more than
the last one, and greedy text neither repeats a token nor falls into a cycle, as that of random models does.

`scale_late` scales what the layers from an exit E on add by a factor s (their o_proj and down_proj). α of layer skip at
E is exactly 1 at s = 0 and falls as s grows; `synthetic_model` has the dial.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from selfspec_tune.errors import UserError
from selfspec_tune.model.load import resolve_device

SHARPNESS = 4.0
"""Standard deviation of attention scores; from √(2 ln n) on, about 3.5 for 500 keys, few of n keys have the weight."""
EMBEDDING = 0.02
"""Standard deviation of embedding and head; beside updates of 1 a tied head does not repeat the token it was given."""
SILU_POWER = 0.356
"""Mean of silu(x)² of a standard normal x."""

PRESETS: dict[str, dict[str, Any]] = {
    "7b": {
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 32000,
    },
    "1b": {
        "num_hidden_layers": 16,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
    },
    "tiny": {
        "num_hidden_layers": 8,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "max_position_embeddings": 2048,
    },
}
"""Shapes: of Llama 2 7B and of Llama 3.2 1B, with room for long contexts, and one for tests."""


def synthetic_config(preset: str) -> Any:
    """Return the transformers config of a preset; its texts have no end token."""
    from transformers import AutoConfig

    if preset not in PRESETS:
        raise UserError("there is no such preset", got=preset, allowed=", ".join(PRESETS))
    common = {
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    return AutoConfig.for_model("llama", **{**common, **PRESETS[preset]})


def synthetic_model(preset: str, *, seed: int = 0, dtype: str = "float32", device: str = "auto") -> Any:
    """Make a preset's model of random weights, in eval mode, with s = 1 everywhere.

    Args:
        preset: one of `PRESETS`.
        seed: of all weights.
        dtype, device: as `load_model` takes them; weights are drawn on that device in that dtype.
    """
    from transformers import AutoModelForCausalLM

    config = synthetic_config(preset)
    config.synthetic_seed = seed
    with torch.device(resolve_device(device)):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            fill(parameter.data, name, config)
    return model


def fill(weight: torch.Tensor, name: str, config: Any, scale: float = 1.0) -> None:
    """Draw one tensor's weights in place, times `scale`."""
    digest = hashlib.sha256(f"{config.synthetic_seed}/{name}".encode()).digest()
    generator = torch.Generator(weight.device).manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    weight.normal_(0.0, deviation(name, weight.shape[-1], config), generator=generator).mul_(scale)


def deviation(name: str, width: int, config: Any) -> float:
    """Return the standard deviation of a weight [.., width]: what layers compute and add has power 1 per number."""
    kind = name.split(".")[-2]
    if kind in ("embed_tokens", "lm_head"):
        return EMBEDDING
    if kind in ("q_proj", "k_proj"):
        return float((SHARPNESS / width) ** 0.5)
    return float((width * (SILU_POWER if kind == "down_proj" else 1.0)) ** -0.5)


def scale_late(model: Any, exit_layer: int, scale: float) -> None:
    """Scale by s what the layers from `exit_layer` on add, and by 1 what those before it do, whatever was so far.

    The weights are drawn again, so nothing is rounded twice and the result depends on seed, exit and s alone.
    """
    for index, layer in enumerate(model.model.layers):
        for kind, linear in (("self_attn.o_proj", layer.self_attn.o_proj), ("mlp.down_proj", layer.mlp.down_proj)):
            name = f"model.layers.{index}.{kind}.weight"
            fill(linear.weight.data, name, model.config, scale if index >= exit_layer else 1.0)
