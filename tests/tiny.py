"""Makers of tiny real models and a byte tokenizer, so that the tests need no network and no files."""

from __future__ import annotations

from typing import Any

import torch

VOCAB = 320
END = 256


def byte_tokenizer() -> Any:
    """A byte-level tokenizer: one token per UTF-8 byte, ids 0..255 by byte value, 256 ends the text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    names = {byte: chr(byte) for byte in printable}
    others = [byte for byte in range(256) if byte not in names]
    names |= {byte: chr(256 + index) for index, byte in enumerate(others)}
    backend = Tokenizer(models.BPE(vocab={names[byte]: byte for byte in range(256)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", pad_token="<end>")
    assert tokenizer.eos_token_id == END
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}[assistant]"
    return tokenizer


def tiny_config(model_type: str = "llama", **changes: Any) -> Any:
    """A config of the given family with 6 layers, grouped-query attention and 1,024 positions."""
    from transformers import AutoConfig

    settings = {
        "vocab_size": VOCAB,
        "hidden_size": 96,
        "intermediate_size": 192,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 1024,
        "bos_token_id": None,
        "eos_token_id": END,
        "pad_token_id": END,
        "tie_word_embeddings": False,
        "initializer_range": 0.15,
    }
    return AutoConfig.for_model(model_type, **(settings | changes))


def tiny_model(model_type: str = "llama", *, seed: int = 0, late: float = 1.0, **changes: Any) -> Any:
    """A random model. `late` scales what the layers after the second add, so small values make good early exits."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(model_type, **changes)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("norm.weight", "layernorm.weight")):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.1)
        for layer in model.model.layers[2:]:
            layer.self_attn.o_proj.weight.mul_(late)
            layer.mlp.down_proj.weight.mul_(late)
    return model
