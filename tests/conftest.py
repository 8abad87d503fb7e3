"""Fixtures shared by all tests: tiny checkpoints on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from selfspec_kernels import cpu
from tiny import byte_tokenizer, tiny_model

# Tiny models gain nothing from threads, and on a busy machine every barrier waits for the slowest.
torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep what sweeps leave when they are interrupted out of the user's home, in subprocesses too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def reference_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute as on a machine for which no op is compiled."""
    monkeypatch.setattr(cpu, "enabled", False)


@pytest.fixture(params=["compiled", "reference"])
def both_ops(request: pytest.FixtureRequest) -> None:
    """Run a test with the compiled ops and with the reference."""
    if request.param == "reference":
        request.getfixturevalue("reference_ops")


@pytest.fixture(scope="session")
def save_tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that saves a tiny checkpoint with its tokenizer and returns the directory."""

    def save(name: str = "tiny", *, dtype: torch.dtype = torch.float32, **settings: Any) -> Path:
        directory = tmp_path_factory.mktemp(name)
        tiny_model(**settings).to(dtype).save_pretrained(directory)
        byte_tokenizer().save_pretrained(directory)
        return directory

    return save


@pytest.fixture(scope="session")
def checkpoint(save_tiny: Callable[..., Path]) -> Path:
    """One tiny Llama checkpoint whose early exits agree with the last layer about half of the time."""
    return save_tiny(late=0.3)
