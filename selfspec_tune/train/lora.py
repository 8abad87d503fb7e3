"""Low-rank adapters on a model's matrices, through `peft`: where they go, how they are switched off, how they merge.

A matrix W with an adapter acts as W + (alpha / rank) B A (LoRA, arXiv 2106.09685). peft puts the adapter around the
matrix where it stands, so the layers are called as before. Knows no loss, no step and no file.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from selfspec_tune.errors import UserError, did_you_mean

ALL_LINEAR = "all-linear"
ADAPTER = "default"


def add_adapters(model: Any, *, rank: int, alpha: float, targets: Sequence[str]) -> None:
    """Put fp32 adapters around matrices of `model`, in place, and leave nothing else of it trainable.

    Untrained, they add nothing. With tied embeddings the head is the embedding, and either name adapts both as one.

    Args:
        model: a transformers causal language model of a supported family.
        rank: of each adapter.
        alpha: what an adapter adds is multiplied by alpha / rank.
        targets: names of matrices such as q_proj, in every layer that has one; all-linear for all matrices of the
            layers; embed_tokens or lm_head.

    Raises:
        UserError: no target, or a name that no matrix has.
    """
    from peft import LoraConfig, inject_adapter_in_model

    found = target_paths(model)
    layers = [name for name in found if name not in ("embed_tokens", "lm_head")]
    chosen: dict[str, None] = {}
    for target in targets:
        if target != ALL_LINEAR and target not in found:
            raise UserError(
                f"the model has no matrix {target!r}{did_you_mean(target, (ALL_LINEAR, *found))}",
                got=target,
                allowed=", ".join((ALL_LINEAR, *found)),
                command="--lora-targets all-linear",
            )
        for name in layers if target == ALL_LINEAR else [target]:
            chosen |= dict.fromkeys(found[name])
    if not chosen:
        raise UserError("adapters need a target", allowed=", ".join((ALL_LINEAR, *found)))
    settings = LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(chosen), lora_dropout=0.0, bias="none")
    with warnings.catch_warnings():  # peft warns of a tied embedding; that is what `head_weight` and merging see to
        warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings=True`")
        inject_adapter_in_model(settings, model, ADAPTER)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def target_paths(model: Any) -> dict[str, list[str]]:
    """Return name → paths of all matrices that may get an adapter, those of the layers first."""
    found: dict[str, list[str]] = {}
    for path, module in model.model.layers.named_modules():
        if isinstance(module, nn.Linear):
            found.setdefault(path.rpartition(".")[2], []).append(f"model.layers.{path}")
    embeddings = ["model.embed_tokens"]
    found["embed_tokens"] = embeddings
    found["lm_head"] = embeddings if _is_tied(model) else ["lm_head"]
    return found


def adapted_layers(model: nn.Module) -> tuple[Any, ...]:
    """Return the modules of `model` that carry an adapter; empty where there are none."""
    return tuple(site.layer for site in _sites(model))


@contextmanager
def without_adapters(layers: Sequence[Any]) -> Iterator[None]:
    """Let the adapted layers act as their base does.

    peft's own switch also takes the adapters' `requires_grad`, which shards of parameters do not survive.
    """
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def head_weight(model: Any) -> torch.Tensor:
    """Return the [V, d] matrix that makes logits, its adapter included: a view of the head where it has none."""
    weight: torch.Tensor = model.lm_head.weight
    owner = model.model.embed_tokens if _is_tied(model) else model.lm_head
    for site in _sites(owner):
        with torch.autocast(weight.device.type, enabled=False):
            return weight + site.delta(*site.factors)
    return weight


@torch.no_grad()
def merge_adapters(model: nn.Module) -> None:
    """Add what the adapters add to the matrices themselves, in place; the adapters add nothing afterwards."""
    for site in _sites(model):
        weight, (a, b) = site.layer.base_layer.weight, site.factors
        weight.copy_(weight.float() + site.delta(a, b))
        (a if site.is_embedding else b).zero_()


def changed_by_merging(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that `merge_adapters` writes to."""
    changed = ((site.layer.base_layer.weight, site.factors[0 if site.is_embedding else 1]) for site in _sites(model))
    return [parameter for pair in changed for parameter in pair]


def merged_weights(model: nn.Module, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the weights of `model` without adapters: theirs added to the matrices, under the names of the plain model.

    Args:
        model: tells where the adapters are; its own weights are not read, as they may be shards.
        weights: its state dict, in full.
    """
    plain = dict(weights)
    for site in _sites(model):
        a, b = (plain.pop(name) for name in site.factor_names)
        weight = plain.pop(f"{site.path}.base_layer.weight")
        delta = site.delta(a.to(weight.device), b.to(weight.device))
        plain[f"{site.path}.weight"] = (weight.float() + delta).to(weight.dtype)
        if f"{site.path}.base_layer.bias" in plain:
            plain[f"{site.path}.bias"] = plain.pop(f"{site.path}.base_layer.bias")
    if plain.keys() != weights.keys() and _is_tied(model):
        plain["lm_head.weight"] = plain["model.embed_tokens.weight"]
    return plain


@dataclass(frozen=True)
class _Site:
    """One adapted matrix."""

    path: str
    layer: Any

    @property
    def is_embedding(self) -> bool:
        return bool(self.layer.lora_embedding_A)

    @property
    def factors(self) -> tuple[nn.Parameter, nn.Parameter]:
        layer = self.layer
        if self.is_embedding:
            return layer.lora_embedding_A[ADAPTER], layer.lora_embedding_B[ADAPTER]
        return layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight

    @property
    def factor_names(self) -> tuple[str, str]:
        kind = "lora_embedding_{}." + ADAPTER if self.is_embedding else "lora_{}." + ADAPTER + ".weight"
        return f"{self.path}.{kind.format('A')}", f"{self.path}.{kind.format('B')}"

    def delta(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """[r, in], [out, r] → what the adapter adds to the [out, in] matrix; to an embedding's, which is [in, out]."""
        product = b @ a * self.layer.scaling[ADAPTER]
        return product.T if self.is_embedding else product


def starts_at_zero(name: str) -> bool:
    """Whether a parameter is the factor of an adapter that is zero before training: what it adds is linear in it."""
    return ".lora_B." in name or ".lora_embedding_A." in name


def _sites(model: nn.Module) -> list[_Site]:
    return [_Site(path, module) for path, module in model.named_modules() if hasattr(module, "lora_embedding_A")]


def _is_tied(model: Any) -> bool:
    return bool(model.config.tie_word_embeddings)
