"""The memory a head's training is said to take, against models that are really there."""

from __future__ import annotations

import pytest
import torch
from tiny import tiny_model
from transformers import LlamaConfig

from selfspec_tune.errors import UserError
from selfspec_tune.model.exit_head import ExitHead
from selfspec_tune.train.anchor import frozen_copy
from selfspec_tune.train.memory import anchor_memory, head_memory


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}])
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
def test_weights_are_counted_as_they_are(model_type, changes):
    model = tiny_model(model_type, **changes)
    found = head_memory(model.config, tokens=64, dtype=torch.bfloat16)
    assert found.target == sum(parameter.numel() for parameter in model.parameters()) * 2
    assert found.lm_head == model.lm_head.weight.numel() * 2
    head = ExitHead(model, 2, torch.float32)
    optimiser = torch.optim.AdamW(head.parameters())
    for parameter in head.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimiser.step()
    moments = [value for state in optimiser.state.values() for value in state.values() if value.dim()]
    held = [tensor for parameter in head.parameters() for tensor in (parameter, parameter.grad)] + moments
    assert found.trained == sum(tensor.nbytes for tensor in held)


def test_a_step_on_more_tokens_holds_more():
    config = tiny_model().config
    few, many = (head_memory(config, tokens=tokens, dtype=torch.bfloat16) for tokens in (64, 6400))
    assert many.step > few.step and (many.target, many.trained) == (few.target, few.trained)
    assert many.together - many.cached == many.target - many.lm_head


def test_a_head_for_a_7b_model_fits_a_card_of_24_gb():
    seven = head_memory(LlamaConfig(), tokens=4 * 512, dtype=torch.bfloat16)
    assert 13e9 < seven.target < 14e9 and seven.together < 20e9 and seven.cached < 6e9
    assert str(seven).startswith("about 17.8 GB; with --cache-targets 13.5 GB for one pass of the model, then 4.6 GB")


def test_another_architecture_is_a_user_error():
    config = LlamaConfig()
    config.model_type = "mamba"
    with pytest.raises(UserError, match="not supported"):
        head_memory(config, tokens=64, dtype=torch.bfloat16)


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_an_anchor_takes_what_its_copy_does(tied, shared, compute):
    model = tiny_model(tie_word_embeddings=tied).bfloat16()
    model.config.dtype = torch.bfloat16
    base = frozen_copy(model, share_embeddings=shared, compute=compute)
    found = anchor_memory(model.config, share_embeddings=shared, compute=compute)
    assert found == sum(weight.untyped_storage().nbytes() for weight in base.parameters())
    embeddings = (1 if tied else 2) * model.lm_head.weight.numel()
    layers = sum(weight.numel() for weight in model.parameters()) - embeddings
    counted = layers + (0 if shared else embeddings)
    # Norms are in fp32 always; they are the little that is left over.
    assert 0 <= found - counted * compute.itemsize < 0.02 * found
