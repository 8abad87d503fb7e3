"""Adapters: where they go, that they merge into what was trained, and whole runs of them."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from selfspec_tune.config import TrainConfig
from selfspec_tune.errors import UserError
from selfspec_tune.train.data import load_sequences
from selfspec_tune.train.loop import train
from selfspec_tune.train.lora import (
    adapted_layers,
    add_adapters,
    head_weight,
    merge_adapters,
    merged_weights,
    without_adapters,
)
from selfspec_tune.train.weights import rounded

Make = Callable[..., TrainConfig]
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def tied(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def model(tmp_path: Path, model_maker: Callable[..., Any], tied: bool) -> Any:
    return model_maker(tmp_path / "m", model_type="qwen2", tied=tied)  # its q, k and v have biases


def perturb(model: Any) -> None:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight += 0.1 * torch.randn(weight.shape, generator=generator)


def ids() -> torch.Tensor:
    return torch.randint(0, 288, (2, 20), generator=torch.Generator().manual_seed(2))


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return F.linear(model.model(ids()).last_hidden_state, head_weight(model))


def adapted(model: Any) -> set[str]:
    return {name.partition(".lora_")[0] for name, weight in model.named_parameters() if weight.requires_grad}


def test_all_linear_is_every_matrix_of_the_layers_and_nothing_else(model: Any) -> None:
    add_adapters(model, rank=4, alpha=8.0, targets=("all-linear",))
    owners = {"q_proj": "self_attn", "k_proj": "self_attn", "v_proj": "self_attn", "o_proj": "self_attn"}
    expected = {f"model.layers.{i}.{owners.get(name, 'mlp')}.{name}" for i in range(4) for name in ALL}
    assert adapted(model) == expected
    assert all("lora_" in name for name, weight in model.named_parameters() if weight.requires_grad)


def test_named_targets_only(model: Any, tied: bool) -> None:
    add_adapters(model, rank=4, alpha=8.0, targets=("v_proj", "lm_head"))
    expected = {f"model.layers.{i}.self_attn.v_proj" for i in range(4)}
    assert adapted(model) == expected | {"model.embed_tokens" if tied else "lm_head"}


@pytest.mark.parametrize("targets", [("qproj",), ("all-linear", "qproj"), ("norm",), ()])
def test_a_name_that_no_matrix_has_is_a_user_error(model: Any, targets: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as caught:
        add_adapters(model, rank=4, alpha=8.0, targets=targets)
    text = str(caught.value)
    assert all(name in text for name in (*ALL, "embed_tokens", "lm_head", "all-linear"))
    assert ("did you mean 'q_proj'" in text) == ("qproj" in targets)
    assert not adapted_layers(model)


@pytest.mark.parametrize("targets", [("all-linear",), ("q_proj", "lm_head"), ("up_proj", "embed_tokens")])
def test_merging_gives_a_plain_model_that_computes_the_same(
    tmp_path: Path, model: Any, model_maker: Callable[..., Any], tied: bool, targets: tuple[str, ...]
) -> None:
    plain = model_maker(tmp_path / "p", model_type="qwen2", tied=tied)
    base = logits(plain)
    add_adapters(model, rank=4, alpha=8.0, targets=targets)
    torch.testing.assert_close(logits(model), base, rtol=1e-6, atol=1e-6)  # untrained, they add nothing
    perturb(model)
    moved = logits(model)
    assert (moved - base).abs().max() > 0.5
    with without_adapters(adapted_layers(model)), torch.no_grad():
        torch.testing.assert_close(model.lm_head(model.model(ids()).last_hidden_state), base, rtol=1e-6, atol=1e-6)
    # Beside the model, its weights untouched …
    beside = merged_weights(model, dict(model.state_dict()))
    assert beside.keys() == plain.state_dict().keys()
    assert torch.equal(logits(model), moved)
    plain.load_state_dict(beside)
    assert (plain.lm_head.weight is plain.model.embed_tokens.weight) == tied
    torch.testing.assert_close(logits(plain), moved, rtol=1e-4, atol=1e-4)
    # … and in place, to the bit the same, twice no different from once.
    for _ in range(2):
        merge_adapters(model)
        torch.testing.assert_close(logits(model), moved, rtol=1e-4, atol=1e-4)
        inside = merged_weights(model, dict(model.state_dict()))
        assert all(torch.equal(inside[name], weight) for name, weight in beside.items())


def test_weights_are_as_saved_within_and_have_their_own_bits_after(model: Any) -> None:
    add_adapters(model, rank=4, alpha=8.0, targets=("all-linear", "embed_tokens"))
    perturb(model)
    own = {name: weight.clone() for name, weight in model.state_dict().items()}
    expected = {name: weight.bfloat16().float() for name, weight in merged_weights(model, own).items()}
    with rounded(model, torch.bfloat16):
        inside = merged_weights(model, dict(model.state_dict()))
        assert all(torch.equal(inside[name], weight) for name, weight in expected.items())
    assert all(torch.equal(own[name], weight) for name, weight in model.state_dict().items())


def reload(directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory).eval()


def perplexity(model: Any, config: TrainConfig, tokenizer: Any) -> float:
    _, held_out = load_sequences(
        config.train_data, config.eval_data, tokenizer, length=config.sequence_length, num_train=4, num_eval=6
    )
    rows = held_out.ids.long()
    with torch.no_grad():
        predicted = model.float()(rows).logits[:, :-1]
    return math.exp(F.cross_entropy(predicted.flatten(0, 1), rows[:, 1:].flatten()))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("options", [{}, {"lora_targets": ("all-linear", "lm_head")}, {"anchor_weight": 0.5}])
def test_save_and_reload_give_the_same_perplexity(
    make_config: Make,
    tmp_path: Path,
    tokenizer: Any,
    tokenizer_maker: Callable[..., Any],
    model_maker: Callable[..., Any],
    tied: bool,
    dtype: str,
    options: dict[str, Any],
) -> None:
    base = tmp_path / "base"
    model_maker(base, tied=tied).to(getattr(torch, dtype)).save_pretrained(base)
    tokenizer_maker(base)
    config = make_config(model=str(base), lora_rank=4, learning_rate=1e-2, **options)
    facts = train(config)
    trained = reload(tmp_path / "out")
    assert trained.dtype == getattr(torch, dtype)
    assert (trained.lm_head.weight is trained.model.embed_tokens.weight) == tied
    assert not [name for name in trained.state_dict() if "lora" in name or "base_layer" in name]
    # Merged and rounded before the last evaluation, so even bf16 must agree; fp32 sums in another order.
    assert perplexity(trained, config, tokenizer) == pytest.approx(facts["perplexity_after"], rel=1e-5)
    assert facts["perplexity_after"] < 0.95 * facts["perplexity_before"]
    same = torch.equal(trained.model.embed_tokens.weight, reload(base).model.embed_tokens.weight)
    assert same == (not tied or "lora_targets" not in options)


def test_only_adapters_are_in_the_optimizer_and_a_run_resumes_to_the_bit(make_config: Make, tmp_path: Path) -> None:
    options = {"lora_rank": 4, "anchor_weight": 0.25, "learning_rate": 1e-2}
    train(make_config(output=tmp_path / "straight", **options))
    config = make_config(output=tmp_path / "resumed", **options)

    def interrupt(stage: str, done: int, total: int) -> None:
        if (stage, done) == ("train", 3):
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(config, interrupt)
    (state,) = (tmp_path / "resumed" / "state").iterdir()
    moments = torch.load(state / "optimizer.bin", weights_only=False)["state"]
    assert len(moments) == 2 * 4 * len(ALL)
    assert all(min(moment["exp_avg"].shape) == 4 for moment in moments.values())
    train(config)
    from safetensors.torch import load_file

    left, right = (load_file(tmp_path / name / "model.safetensors") for name in ("straight", "resumed"))
    assert left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)
    losses = [
        [json.loads(line).get("losses") for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("straight", "resumed")
    ]
    assert losses[0] == losses[1]
