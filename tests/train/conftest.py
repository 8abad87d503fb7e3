"""A tiny real model with a tiny real tokenizer, small data files, and a config that trains them in a second."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from selfspec_tune.config import TrainConfig
from selfspec_tune.train.loop import train

WORDS = (
    "the",
    "a",
    "cat",
    "dog",
    "bird",
    "sees",
    "hears",
    "likes",
    "small",
    "big",
    "red",
    "old",
    "house",
    "tree",
    "and",
)
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'bad' %}{{ raise_exception('no such role') }}{% endif %}"
    "<{{ m['role'] }}> {{ m['content'] }} <eos>\n{% endfor %}"
)


def save_tokenizer(directory: Path, *, chat_template: str | None = TEMPLATE) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(["<eos>", *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(directory)
    return tokenizer


def save_model(directory: Path, *, model_type: str = "llama", tied: bool = True, **extra: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        model_type,
        vocab_size=288,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=None,
        initializer_range=0.2,
        **extra,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.generation_config.temperature = 0.7
    model.generation_config.do_sample = True
    model.save_pretrained(directory)
    return model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A 4-layer Llama checkpoint with tied embeddings and a byte tokenizer."""
    directory = tmp_path_factory.mktemp("tiny")
    save_model(directory)
    save_tokenizer(directory)
    return directory


@pytest.fixture(scope="session")
def tokenizer(tiny: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny)


def write_jsonl(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """train.jsonl and heldout.jsonl: random sentences of a small vocabulary."""
    directory, draw = tmp_path_factory.mktemp("corpus"), random.Random(5)
    for name, count in (("train", 120), ("heldout", 12)):
        write_jsonl(
            directory / f"{name}.jsonl", [{"text": " ".join(draw.choices(WORDS, k=20)) + "."} for _ in range(count)]
        )
    return directory


@pytest.fixture
def make_config(tiny: Path, corpus: Path, tmp_path: Path) -> Callable[..., TrainConfig]:
    """Build a TrainConfig for the tiny model; keyword arguments override it."""

    def make(**options: Any) -> TrainConfig:
        defaults: dict[str, Any] = {
            "model": str(tiny),
            "output": tmp_path / "out",
            "train_data": (str(corpus / "train.jsonl"),),
            "eval_data": (str(corpus / "heldout.jsonl"),),
            "device": "cpu",
            "sequence_length": 48,
            "batch_size": 2,
            "max_steps": 6,
            "warmup_steps": 2,
            "learning_rate": 1e-3,
            "exits": (1, 2, 3),
            "exits_per_step": 2,
            "layer_dropout": 0.5,
            "eval_every": 4,
            "eval_sequences": 6,
            "save_every": 100,
        }
        return TrainConfig(**{**defaults, **options})

    return make


@pytest.fixture(scope="session")
def model_maker() -> Callable[..., Any]:
    """Return `save_model`, for tests that need a family or a head of their own."""
    return save_model


@pytest.fixture(scope="session")
def tokenizer_maker() -> Callable[..., Any]:
    """Return `save_tokenizer`."""
    return save_tokenizer


@pytest.fixture(scope="session")
def jsonl() -> Callable[[Path, list[Any]], Path]:
    """Return `write_jsonl`."""
    return write_jsonl


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory, jsonl: Callable[..., Path]) -> Path:
    """General text, unlike the corpus."""
    file = tmp_path_factory.mktemp("general") / "digits.jsonl"
    return jsonl(file, [{"text": f"{n * 7919:010d} " * 6} for n in range(200)])


@pytest.fixture(scope="session")
def learnt(tiny: Path, digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model after it has learnt the general text: training on the corpus makes it forget."""
    output = tmp_path_factory.mktemp("learnt") / "base"
    options: dict[str, Any] = {"sequence_length": 48, "max_steps": 40, "learning_rate": 5e-3, "eval_sequences": 2}
    options |= {"exits": (2,), "exit_loss_weight": 0.1}
    train(TrainConfig(model=str(tiny), output=output, train_data=(str(digits),), device="cpu", **options))
    return output
