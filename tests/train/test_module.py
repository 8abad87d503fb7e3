"""The training forward against transformers' own, layer dropout, windows, and the mask of predicted tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from selfspec_tune.model.exit_head import ExitHead
from selfspec_tune.train.anchor import frozen_copy, widen
from selfspec_tune.train.lora import add_adapters
from selfspec_tune.train.module import EarlyExitModule, ExitHeadModule

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
    total, *_ = module(ids, counted, (2,), frozenset({1, 3}))
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
    module = EarlyExitModule(llama, exit_loss_weight=0.0).train()
    total, losses, _ = module(ids, counted, (1,))
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
        module = EarlyExitModule(llama, gradient_checkpointing=switch).train()
        total, *_ = module(ids, counted, (1, 2), frozenset({2}))
        total.backward()
        gradients.append({n: p.grad.clone() for n, p in llama.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], expected, rtol=1e-6, atol=1e-8)


def test_a_tied_head_gets_the_gradient_of_both_uses(tmp_path: Path, model_maker: Callable[..., Any]) -> None:
    model = model_maker(tmp_path / "m", tied=True)
    ids, counted = tokens()
    total, *_ = EarlyExitModule(model, exit_loss_weight=0.4, exit_loss="ce").train()(ids, counted, (2,))
    total.backward()
    fused = model.lm_head.weight.grad.clone()
    model.zero_grad()
    hidden = model.model(ids, output_hidden_states=True)
    heads = [hidden.last_hidden_state, model.model.norm(hidden.hidden_states[2])]
    final, early = (F.cross_entropy(model.lm_head(h)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()) for h in heads)
    (0.6 * final + 0.4 * early).backward()
    expected = model.lm_head.weight.grad
    torch.testing.assert_close(fused, expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item())


def perturb(model: Any, std: float = 0.05) -> None:
    """Move every trainable weight, as training would."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight += std * torch.randn(weight.shape, generator=generator)


def kl_to(base: Any, model: Any, ids: torch.Tensor) -> torch.Tensor:
    """KL(base || model) over the predicted rows, by transformers' own forward."""
    with torch.no_grad():
        p, q = (each(ids).logits[:, :-1].flatten(0, 1).log_softmax(-1) for each in (base, model))
    return F.kl_div(q, p, reduction="batchmean", log_target=True)


def test_the_total_weighs_exits_by_depth_and_by_the_share_of_the_step(llama: Any) -> None:
    ids, counted = tokens()
    module = EarlyExitModule(llama, exit_loss_weight=0.5, exit_weights="quadratic").train()
    total, losses, agreed = module(ids, counted, (1, 2))
    torch.testing.assert_close(total, 0.5 * losses[0] + 0.1 * losses[1] + 0.4 * losses[2], rtol=1e-5, atol=0)
    assert len(agreed) == 3 and 0 < agreed[1] < 1 and 0 < agreed[2] < 1
    total, losses, _ = module(ids, counted, (1, 2), exit_share=0.1)
    torch.testing.assert_close(total, 0.9 * losses[0] + 0.02 * losses[1] + 0.08 * losses[2], rtol=1e-5, atol=0)


def test_a_mixture_goes_from_kl_to_total_variation(llama: Any) -> None:
    ids, counted = tokens()

    def exit_losses(kind: str, mixture: tuple[float, ...] | None = None) -> torch.Tensor:
        losses: torch.Tensor = EarlyExitModule(llama, exit_loss=kind).train()(ids, counted, (1, 3), mixture=mixture)[1]
        return losses[1:]

    kl, tv, mixed = exit_losses("kl"), exit_losses("tv"), exit_losses("mixture", (1.0, 0.25))
    torch.testing.assert_close(mixed[0], kl[0], rtol=1e-5, atol=0)
    torch.testing.assert_close(mixed[1], 0.25 * kl[1] + 0.75 * tv[1], rtol=1e-5, atol=0)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_an_anchor_to_a_frozen_copy_is_kl_to_the_base_as_it_was(
    tmp_path: Path, model_maker: Callable[..., Any], tied: bool, frozen: bool
) -> None:
    before, model = model_maker(tmp_path / "a", tied=tied), model_maker(tmp_path / "b", tied=tied)
    if frozen:
        model.get_input_embeddings().requires_grad_(False)
        model.get_output_embeddings().requires_grad_(False)
    base = frozen_copy(model, share_embeddings=frozen, compute=torch.float32)
    perturb(model)
    module = EarlyExitModule(model, anchor_weight=0.75, exit_loss_weight=0.0, base=base).train()
    ids, counted = tokens()
    total, losses, _ = module(ids, counted, (1,))
    expected = kl_to(before, model, ids)
    assert expected > 0.01
    torch.testing.assert_close(losses[-1], expected, rtol=1e-4, atol=0)
    torch.testing.assert_close(total, 0.25 * losses[0] + 0.75 * losses[-1], rtol=1e-5, atol=0)
    total.backward()
    # The base is nobody's weight: not trained, not wrapped, not saved; and of frozen embeddings there is no copy.
    assert all(weight.grad is None for weight in base.parameters())
    assert {id(w) for w in module.parameters()}.isdisjoint({id(w) for w in base.parameters()})
    assert not [name for name in module.state_dict() if not name.startswith("model.")]
    assert (base.lm_head is None and base.model.embed_tokens is None) == frozen


def test_the_base_runs_the_layers_that_are_dropped(llama: Any) -> None:
    base = frozen_copy(llama, share_embeddings=False, compute=torch.float32)
    called: list[int] = []
    for index, layer in enumerate(base.model.layers):
        layer.register_forward_hook(lambda *_, index=index: called.append(index))
    ids, counted = tokens()
    module = EarlyExitModule(llama, anchor_weight=0.5, base=base).train()
    whole, short = (module(ids, counted, (2,), dropped) for dropped in (frozenset(), frozenset({1, 3})))
    assert called == [0, 1, 2, 3] * 2
    assert abs(whole[1][-1]) < 1e-6 and short[1][-1] > 0.01


@pytest.mark.parametrize("targets", [("all-linear",), ("q_proj", "lm_head"), ("embed_tokens",)])
@pytest.mark.parametrize("tied", [True, False])
def test_an_anchor_of_adapters_is_kl_to_the_same_weights_without_them(
    tmp_path: Path, model_maker: Callable[..., Any], tied: bool, targets: tuple[str, ...]
) -> None:
    before, model = model_maker(tmp_path / "a", tied=tied), model_maker(tmp_path / "b", tied=tied)
    add_adapters(model, rank=4, alpha=8.0, targets=targets)
    ids, counted = tokens()
    module = EarlyExitModule(model, anchor_weight=1.0, exit_loss_weight=0.0).train()
    _, losses, _ = module(ids, counted, (), frozenset())
    assert abs(losses[-1]) < 1e-6
    perturb(model)
    total, losses, _ = module(ids, counted, (1,), frozenset())
    moved = module.eval()(ids, counted, (1,))[0]
    with torch.no_grad():
        logits = F.linear(module.normed_hidden(ids, ())[0], effective_head(model))[:, :-1].flatten(0, 1)
        expected = F.kl_div(
            logits.log_softmax(-1),
            before(ids).logits[:, :-1].flatten(0, 1).log_softmax(-1),
            reduction="batchmean",
            log_target=True,
        )
    assert expected > 0.01
    torch.testing.assert_close(total.detach(), expected, rtol=1e-4, atol=0)
    # Switching the adapters off for the base has not left them off.
    nll = F.cross_entropy(logits, ids[:, 1:].flatten(), reduction="sum")
    torch.testing.assert_close(moved[1].float(), nll, rtol=1e-5, atol=0)
    total.backward()
    for name, weight in model.named_parameters():
        assert (weight.grad is not None) == ("lora_" in name), name


def effective_head(model: Any) -> torch.Tensor:
    """The LM head with its adapter, by peft's own account of what the adapter adds."""
    owner = model.model.embed_tokens if model.config.tie_word_embeddings else model.lm_head
    weight: torch.Tensor = model.lm_head.weight
    return weight + owner.get_delta_weight("default") if hasattr(owner, "get_delta_weight") else weight


def test_checkpointed_layers_with_adapters_and_an_anchor_have_the_same_gradients(llama: Any) -> None:
    add_adapters(llama, rank=4, alpha=8.0, targets=("all-linear",))
    perturb(llama)
    ids, counted = tokens()
    gradients = []
    for switch in (False, True):
        llama.zero_grad()
        module = EarlyExitModule(llama, anchor_weight=0.5, gradient_checkpointing=switch).train()
        module(ids, counted, (1, 2), frozenset({2}))[0].backward()
        gradients.append({n: p.grad.clone() for n, p in llama.named_parameters() if p.grad is not None})
    # The recomputation happens after the base's pass, with the adapters on.
    assert gradients[0].keys() == gradients[1].keys() and len(gradients[0]) == 2 * 3 * 7
    for name, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("targets", [("all-linear",), ("v_proj", "embed_tokens")])
def test_frozen_matrices_in_bf16_give_what_they_give_in_fp32_under_autocast(
    tmp_path: Path, model_maker: Callable[..., Any], targets: tuple[str, ...]
) -> None:
    ids, counted = tokens()
    results = []
    for keep in (True, False):
        model = model_maker(tmp_path / f"m{keep}", tied=True).bfloat16()
        torch.manual_seed(1)
        add_adapters(model, rank=4, alpha=8.0, targets=targets)
        widen(model, keep_frozen=keep)
        kept = [name for name, weight in model.named_parameters() if weight.dtype == torch.bfloat16]
        assert bool(kept) == keep and not [name for name in kept if "lora_" in name or "norm" in name]
        perturb(model)
        with torch.autocast("cpu", torch.bfloat16):
            results.append(EarlyExitModule(model).train()(ids, counted, (1, 3)))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["kl", "ce", "tv", "mixture"])
def test_a_head_learns_by_every_loss_and_has_all_of_it(llama: Any, kind: Any) -> None:
    target = EarlyExitModule(llama.requires_grad_(False)).eval()
    module = ExitHeadModule(target, ExitHead(llama, 1, torch.float32), states_dtype=torch.float32, exit_loss=kind)
    ids, counted = tokens()
    counted[0, :7] = False
    mixture = (0.25,) if kind == "mixture" else None
    total, losses, agreed = module.train()(ids, counted, (1,), mixture=mixture, exit_share=0.1)
    with torch.no_grad():
        final, two = target.normed_hidden(ids, (2,))  # an untrained head is the next layer
        keep = counted[:, 1:]
        p, q = (llama.lm_head(each)[:, :-1][keep].log_softmax(-1) for each in (final, two))
        kl = F.kl_div(q, p, reduction="batchmean", log_target=True)
        tv = (p.exp() - q.exp()).abs().sum(-1).mean() / 2
        ce = F.nll_loss(q, ids[:, 1:][keep])
    expected = {"kl": kl, "ce": ce, "tv": tv, "mixture": 0.25 * kl + 0.75 * tv}[kind]
    torch.testing.assert_close(total.detach(), expected, rtol=1e-4, atol=0)
    torch.testing.assert_close(losses[1], expected, rtol=1e-4, atol=0)
    torch.testing.assert_close(agreed[1], 1 - tv, rtol=1e-4, atol=0)
    total.backward()
    assert all(weight.grad is not None and weight.grad.abs().sum() > 0 for weight in module.parameters())
    assert all(weight.grad is None for weight in llama.parameters())
