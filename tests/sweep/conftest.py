"""Tiny real models whose early exits agree sometimes, in memory and as a checkpoint with a byte tokenizer."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from selfspec_tune.decode.engine import Engine, Request
from selfspec_tune.model.decoder import LayeredDecoder


def make_model(*, num_layers: int = 5, vocab_size: int = 128, seed: int = 0) -> Any:
    """A random Llama. Later layers are weaker, so exits agree sometimes; norm weights vary, so that norms matter."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config).float().eval()
    with torch.no_grad():
        for index, layer in enumerate(model.model.layers):
            for weight in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight):
                weight *= 1.0 if index == 0 else 0.4
        model.model.norm.weight.uniform_(0.2, 3.0)
    return model


def make_requests(count: int = 5, *, max_new_tokens: int = 24, vocab_size: int = 128) -> list[Request]:
    draw = random.Random(3)
    return [
        Request(str(index), [draw.randrange(1, vocab_size) for _ in range(3 + 2 * index)], max_new_tokens)
        for index in range(count)
    ]


def save_checkpoint(directory: Path) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(["<eos>", *alphabet])}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>").save_pretrained(directory)
    make_model(num_layers=4, vocab_size=288).save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def decoder() -> LayeredDecoder:
    """Five layers in fp32."""
    return LayeredDecoder(make_model())


@pytest.fixture(scope="session")
def engine(decoder: LayeredDecoder) -> Engine:
    """An engine for up to 8 draft tokens, in exact numerics, without end tokens."""
    return Engine(decoder)


@pytest.fixture(scope="session")
def requests_maker() -> Callable[..., list[Request]]:
    """Return `make_requests`."""
    return make_requests


@pytest.fixture(scope="session")
def model_maker() -> Callable[..., Any]:
    """Return `make_model`."""
    return make_model


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint directory of its own for each test: model and tokenizer."""
    return save_checkpoint(tmp_path / "checkpoint")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """A JSONL file of 10 prompts."""
    path, draw = tmp_path / "prompts.jsonl", random.Random(7)
    lines = [{"id": f"p{i}", "prompt": "".join(draw.choices("abc def", k=6 + i))} for i in range(10)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path
