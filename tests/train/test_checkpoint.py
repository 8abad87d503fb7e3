"""The saved checkpoint: plain transformers loads it, and it measures what the run says it measures."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from selfspec_tune.config import TrainConfig
from selfspec_tune.train.checkpoint import base_name, identity, identity_hash
from selfspec_tune.train.data import load_sequences
from selfspec_tune.train.loop import train

Make = Callable[..., TrainConfig]


def reload(directory: Path) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(directory).eval(), AutoTokenizer.from_pretrained(directory)


def perplexity(model: Any, config: TrainConfig, tokenizer: Any) -> float:
    _, held_out = load_sequences(
        config.train_data, config.eval_data, tokenizer, length=config.sequence_length, num_train=4, num_eval=6
    )
    ids = held_out.ids.long()
    with torch.no_grad():
        logits = model.float()(ids).logits[:, :-1]
    return math.exp(F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False])
def test_save_and_reload_give_the_same_perplexity(
    make_config: Make,
    tmp_path: Path,
    model_maker: Callable[..., Any],
    tokenizer_maker: Callable[..., Any],
    dtype: str,
    tied: bool,
) -> None:
    base = tmp_path / "base"
    model_maker(base, tied=tied).to(getattr(torch, dtype)).save_pretrained(base)
    tokenizer_maker(base)
    config = make_config(model=str(base))
    facts = train(config)
    model, tokenizer = reload(tmp_path / "out")
    assert model.dtype == getattr(torch, dtype) and facts["dtype"] == dtype
    # Weights are rounded before the last evaluation, so even bf16 must agree; fp32 sums in another order.
    assert perplexity(model, config, tokenizer) == pytest.approx(facts["perplexity_after"], rel=1e-5)
    assert facts["perplexity_after"] != pytest.approx(facts["perplexity_before"], rel=1e-3)
    assert model.config.tie_word_embeddings == tied
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


def test_the_checkpoint_is_complete(make_config: Make, tmp_path: Path, tokenizer: Any) -> None:
    train(make_config())
    model, again = reload(tmp_path / "out")
    assert again.chat_template == tokenizer.chat_template
    assert again("some text")["input_ids"] == tokenizer("some text")["input_ids"]
    assert model.generation_config.temperature == 0.7
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert not [name for name in names if "incomplete" in name or name.startswith(".") or name == "state"]
    assert "selfspec.json" not in names


def test_dtype_overrides_that_of_the_base(make_config: Make, tmp_path: Path) -> None:
    facts = train(make_config(dtype="bfloat16", max_steps=1))
    assert reload(tmp_path / "out")[0].dtype == torch.bfloat16
    assert facts["dtype"] == "bfloat16"


def test_the_base_is_recorded_so_that_later_commands_find_it(
    make_config: Make, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tiny.parent)
    assert base_name(tiny.name) == str(tiny)
    assert base_name("owner/name") == "owner/name"
    here, there = identity(make_config(model=tiny.name)), identity(make_config(model=str(tiny)))
    assert here == there and identity_hash(here) == identity_hash(there)
    assert identity_hash(identity(make_config(seed=1))) != identity_hash(here)
