"""Tiny models whose early exits agree sometimes, prompts for them, and a checkpoint of its own for each test."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny import tiny_model

from selfspec_tune.decode.engine import Engine
from selfspec_tune.decode.requests import Request
from selfspec_tune.model.cache import SharedKVCache
from selfspec_tune.model.decoder import LayeredDecoder

VOCAB = 128


def make_model() -> Any:
    """Five layers in fp32 without an end token; the norms' weights vary, so that leaving one out shows."""
    return tiny_model(
        num_hidden_layers=5,
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        head_dim=8,
        late=0.4,
        eos_token_id=None,
        pad_token_id=None,
    )


@pytest.fixture(autouse=True)
def kept_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let each test keep its interrupted sweeps apart; return where."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "selfspec" / "sweeps"


@pytest.fixture(scope="session")
def decoder() -> LayeredDecoder:
    """The tiny model, for tests in fast numerics."""
    return LayeredDecoder(make_model())


@pytest.fixture(scope="session")
def engine() -> Engine:
    """An engine in exact numerics with a model of its own."""
    return Engine(LayeredDecoder(make_model()))


@pytest.fixture(scope="session")
def reference() -> Any:
    """The same weights as a transformers model that nothing else drives."""
    return make_model()


@pytest.fixture(scope="session")
def make_requests() -> Callable[..., list[Request]]:
    """Return a function (count, max_new_tokens) → requests of random tokens, of different lengths."""

    def make(count: int, max_new_tokens: int) -> list[Request]:
        draw = random.Random(3)
        lengths = [3 + 2 * index for index in range(count)]
        return [Request(str(n), [draw.randrange(1, VOCAB) for _ in range(n)], max_new_tokens) for n in lengths]

    return make


@pytest.fixture(scope="session")
def prefilled() -> Callable[[LayeredDecoder, list[int]], SharedKVCache]:
    """Return a function that gives a cache with a prompt committed."""

    def prefill(decoder: LayeredDecoder, prompt_ids: list[int]) -> SharedKVCache:
        import torch

        cache = decoder.new_cache(1, 256)
        with torch.inference_mode():
            decoder.prefill(torch.tensor([prompt_ids]), cache)
        return cache

    return prefill


@pytest.fixture
def own_checkpoint(save_tiny: Callable[..., Path]) -> Path:
    """A checkpoint directory that this test alone writes into."""
    return save_tiny("sweep", num_hidden_layers=4, hidden_size=32, num_attention_heads=2, num_key_value_heads=1)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """A JSONL file of 10 prompts."""
    path, draw = tmp_path / "prompts.jsonl", random.Random(7)
    lines = [{"id": f"p{index}", "prompt": "".join(draw.choices("abc def", k=6 + index))} for index in range(10)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path
