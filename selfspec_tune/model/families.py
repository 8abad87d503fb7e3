"""Which architectures are supported, and the few facts in which they differ.

Everything about transformers' module names is here and in `layer.py`; the rest of the project sees `Family` only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from selfspec_tune.errors import UserError

# transformers' model types. All four are pre-norm RMSNorm, rotary, grouped-query attention, gated SiLU MLP;
# Qwen2 adds biases to q, k, v, Qwen3 norms q and k per head, Mistral and Qwen may use a sliding window.
SUPPORTED = ("llama", "mistral", "qwen2", "qwen3")

# These rescale all positions when the text grows, so a cached key would no longer be what plain decoding computes.
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


@dataclass(frozen=True)
class Family:
    """What the decoder needs to know of a model's config."""

    model_type: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    max_context: int
    windows: tuple[int | None, ...]
    """Sliding window per layer; None for full attention."""


def check_supported(config: Any) -> None:
    """Raise a UserError naming the architecture unless `config` (a transformers config) is supported."""
    model_type = getattr(config, "model_type", None)
    if model_type not in SUPPORTED:
        raise UserError("this architecture is not supported", got=model_type, allowed=", ".join(SUPPORTED))
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    rope_type = rope.get("rope_type", "default")
    if rope_type in LENGTH_DEPENDENT_ROPE:
        raise UserError(
            "this rotary scaling depends on the length of the text, so a cached position is not final",
            got=rope_type,
            allowed="default, linear, llama3, yarn",
        )
    if getattr(config, "quantization_config", None):
        method = config.quantization_config
        method = method.get("quant_method") if isinstance(method, dict) else getattr(method, "quant_method", method)
        raise UserError("quantised checkpoints are not supported", got=method, allowed="float32, bfloat16, float16")
    if getattr(config, "hidden_act", "silu") not in ("silu", "swish"):
        raise UserError("this activation is not supported", got=config.hidden_act, allowed="silu")


def describe(config: Any) -> Family:
    """Read a `Family` from a supported transformers config."""
    check_supported(config)
    num_layers = config.num_hidden_layers
    layer_types = getattr(config, "layer_types", None) or []
    window = getattr(config, "sliding_window", None)
    if config.model_type == "mistral":
        windows: tuple[int | None, ...] = (window,) * num_layers
    else:
        windows = tuple(
            window if index < len(layer_types) and layer_types[index] == "sliding_attention" else None
            for index in range(num_layers)
        )
    return Family(
        model_type=config.model_type,
        num_layers=num_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_size=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        vocab_size=config.vocab_size,
        max_context=config.max_position_embeddings,
        windows=windows,
    )
