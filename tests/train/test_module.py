"""The training forward against transformers' own, layer dropout, windows, and the mask of predicted tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from selfspec_tune.train.module import EarlyExitModule

# fp32; the same layers on the same rows, but transformers may take another attention kernel.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}

FAMILIES = {
    "llama": {},
    "qwen2": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
    "qwen3": {},
    "mistral": {"sliding_window": 6},
}


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path: Path, model_maker: Callable[..., Any]) -> Any:
    return model_maker(tmp_path / "m", model_type=request.param, **FAMILIES[request.param])


@pytest.fixture
def llama(tmp_path: Path, model_maker: Callable[..., Any]) -> Any:
    return model_maker(tmp_path / "m", tied=False)


def tokens(length: int = 20) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, 288, (2, length), generator=torch.Generator().manual_seed(2))
    return ids, torch.ones_like(ids, dtype=torch.bool)


def test_hidden_states_are_those_of_transformers_for_every_family_and_window(model: Any) -> None:
    ids, _ = tokens()
    with torch.no_grad():
        final, *exits = EarlyExitModule(model).normed_hidden(ids, (1, 3))
        reference = model.model(ids, output_hidden_states=True)
    torch.testing.assert_close(final, reference.last_hidden_state, **TOLERANCE)
    for tap, layer in zip(exits, (1, 3), strict=True):
        expected = model.model.norm(reference.hidden_states[layer])
        torch.testing.assert_close(tap, expected, **TOLERANCE)


def test_a_window_is_really_narrower_than_full_attention(tmp_path: Path, model_maker: Callable[..., Any]) -> None:
    ids, _ = tokens()
    changed = ids.clone()
    changed[:, 0] = (ids[:, 0] + 1) % 288
    module = EarlyExitModule(model_maker(tmp_path / "m", model_type="mistral", sliding_window=3))
    with torch.no_grad():
        before, after = module.normed_hidden(ids, ())[0], module.normed_hidden(changed, ())[0]
    # 4 layers of 3 positions see 8 positions back, not further.
    assert (before[:, 8] != after[:, 8]).any()
    torch.testing.assert_close(before[:, 9:], after[:, 9:], rtol=0, atol=0)


def test_dropped_layers_are_not_called_and_the_others_are(llama: Any) -> None:
    called: list[int] = []
    for index, layer in enumerate(llama.model.layers):
        layer.register_forward_hook(lambda *_, index=index: called.append(index))
    module = EarlyExitModule(llama)
    ids, counted = tokens()
    total, _ = module(ids, counted, (2,), frozenset({1, 3}))
    assert called == [0, 2]
    total.backward()
    for index, layer in enumerate(llama.model.layers):
        has_gradient = layer.mlp.down_proj.weight.grad is not None
        assert has_gradient == (index in (0, 2)), index


def test_a_dropped_layer_passes_its_input_on(llama: Any) -> None:
    ids, _ = tokens()
    with torch.no_grad():
        module = EarlyExitModule(llama)
        final, at_two = module.normed_hidden(ids, (2,), frozenset({1, 2, 3}))
        expected = module.normed_hidden(ids, (1,))[1]
    torch.testing.assert_close(final, expected, rtol=0, atol=0)
    torch.testing.assert_close(at_two, expected, rtol=0, atol=0)


def test_uncounted_tokens_are_read_but_not_predicted(llama: Any) -> None:
    ids, counted = tokens()
    counted[0, :7] = False
    counted[1, 12:] = False
    module = EarlyExitModule(llama, exit_weight=0.0).train()
    total, losses = module(ids, counted, (1,))
    labels = torch.where(counted, ids, -100)
    expected = F.cross_entropy(llama(ids).logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(losses[0], expected.detach(), rtol=1e-5, atol=0)


def test_evaluation_counts_perplexity_and_agreement_with_the_final_layer(llama: Any) -> None:
    ids, counted = tokens()
    counted[1, 9:] = False
    module = EarlyExitModule(llama).eval()
    with torch.no_grad():
        (counts,) = module(ids, counted, (1, 3))
        reference = llama.model(ids, output_hidden_states=True)
        final = llama.lm_head(reference.last_hidden_state)
    keep = counted[:, 1:]
    assert counts[0] == keep.sum()
    nll = F.cross_entropy(final[:, :-1][keep], ids[:, 1:][keep])
    assert math.exp(counts[1] / counts[0]) == pytest.approx(math.exp(nll), rel=1e-5)
    for place, layer in ((2, 1), (3, 3)):
        exit_logits = llama.lm_head(llama.model.norm(reference.hidden_states[layer]))
        agree = (exit_logits.argmax(-1) == final.argmax(-1))[:, :-1][keep]
        assert counts[place] == agree.sum()
        assert 0 < counts[place] < counts[0]


def test_gradient_checkpointing_changes_no_gradient(llama: Any) -> None:
    ids, counted = tokens()
    gradients = []
    for switch in (False, True):
        llama.zero_grad()
        total, _ = EarlyExitModule(llama, gradient_checkpointing=switch).train()(ids, counted, (1, 2), frozenset({2}))
        total.backward()
        gradients.append({n: p.grad.clone() for n, p in llama.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], expected, rtol=1e-6, atol=1e-8)


def test_a_tied_head_gets_the_gradient_of_both_uses(tmp_path: Path, model_maker: Callable[..., Any]) -> None:
    model = model_maker(tmp_path / "m", tied=True)
    ids, counted = tokens()
    total, _ = EarlyExitModule(model, exit_weight=0.4, exit_loss="ce").train()(ids, counted, (2,))
    total.backward()
    fused = model.lm_head.weight.grad.clone()
    model.zero_grad()
    hidden = model.model(ids, output_hidden_states=True)
    heads = [hidden.last_hidden_state, model.model.norm(hidden.hidden_states[2])]
    final, early = (F.cross_entropy(model.lm_head(h)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()) for h in heads)
    (0.6 * final + 0.4 * early).backward()
    expected = model.lm_head.weight.grad
    torch.testing.assert_close(fused, expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item())
