"""A tiny model that has learnt a tiny language, the same one damaged, held-out text and prompts of that language."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

WORDS = ["the", "a", "cat", "dog", "bird", "sees", "hears", "likes", "small", "big", "red", "old", "house", "tree"]


def sentences(seed: int, count: int) -> list[str]:
    """Random sentences of eight words."""
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=8)) + "." for _ in range(count)]


@pytest.fixture(scope="session")
def learnt(save_tiny: Callable[..., Path]) -> Path:
    """An fp32 checkpoint that predicts the language well, so that damage shows in its perplexity."""
    from transformers import AutoModelForCausalLM

    directory = save_tiny("learnt", late=0.3, initializer_range=0.05)
    model = AutoModelForCausalLM.from_pretrained(directory)
    text = " ".join(sentences(0, 400)).encode()
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(30):
        starts = torch.randint(len(text) - 48, (4,), generator=generator).tolist()
        batch = torch.tensor([list(text[start : start + 48]) for start in starts])
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(directory)
    return directory


@pytest.fixture
def damaged(learnt: Path, tmp_path: Path) -> Path:
    """The learnt model with noise on the last quarter of its layers."""
    from transformers import AutoModelForCausalLM

    directory = shutil.copytree(learnt, tmp_path / "damaged")
    model = AutoModelForCausalLM.from_pretrained(directory)
    layers = model.model.layers
    torch.manual_seed(1)
    with torch.no_grad():
        for layer in layers[-max(1, len(layers) // 4) :]:
            for parameter in layer.parameters():
                parameter += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(directory)
    return Path(directory)


@pytest.fixture
def copy(learnt: Path, tmp_path: Path) -> Path:
    """A copy of the learnt model that a test may write into."""
    return Path(shutil.copytree(learnt, tmp_path / "copy"))


@pytest.fixture(scope="session")
def heldout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Held-out text, one record per few sentences."""
    path = tmp_path_factory.mktemp("heldout") / "heldout.jsonl"
    return write_jsonl(path, [{"text": " ".join(sentences(seed, 3))} for seed in range(100, 112)])


@pytest.fixture(scope="session")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three prompts of different lengths; the longest ends before a block's edge that its completion crosses."""
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    texts = ["the cat", " ".join(sentences(7, 1)), " ".join(sentences(8, 6))[:120]]
    return write_jsonl(path, [{"id": f"p{number}", "prompt": text} for number, text in enumerate(texts)])


def write_jsonl(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def jsonl() -> Callable[[Path, list[Any]], Path]:
    """Return `write_jsonl`."""
    return write_jsonl


@pytest.fixture(scope="session")
def make_texts() -> Callable[[Path, int, int], Path]:
    """Return `make(path, count, seed)`: write so many documents of the language, other ones for seeds far apart."""

    def make(path: Path, count: int, seed: int) -> Path:
        return write_jsonl(path, [{"text": " ".join(sentences(seed + number, 3))} for number in range(count)])

    return make
