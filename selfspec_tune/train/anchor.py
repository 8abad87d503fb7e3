"""What of a model is held still: the frozen copy that an anchor looks up to, and the dtypes of frozen matrices."""

from __future__ import annotations

import copy
from typing import Any

import torch

from selfspec_tune.train.lora import adapted_layers


def frozen_copy(model: Any, *, share_embeddings: bool, compute: torch.dtype) -> Any:
    """Return a frozen copy of `model`, taken before any training.

    Args:
        model: a transformers causal language model.
        share_embeddings: leave embeddings and LM head out (None), as the model's own stay as they are.
        compute: dtype of matrix products in training. Under bf16 autocast the layers' matrices are kept in bf16, which
            they would be rounded to anyway, and embeddings in their own dtype; else all is fp32.
    """
    shared = (model.get_input_embeddings(), model.get_output_embeddings()) if share_embeddings else ()
    base = copy.deepcopy(model, {id(module): None for module in shared}).requires_grad_(False).eval()
    matrices = {id(weight) for weight in base.model.layers.parameters() if weight.ndim == 2}
    for weight in base.parameters():
        if id(weight) in matrices:
            weight.data = weight.data.to(compute)
        elif weight.ndim < 2 or compute == torch.float32:
            weight.data = weight.data.float()
    return base


def widen(model: Any, *, keep_frozen: bool) -> None:
    """Turn weights into fp32, in place; with `keep_frozen` matrices that are not trained keep their dtype.

    Under bf16 autocast a bf16 matrix gives the same products as its copy in fp32, at half the memory. An embedding with
    an adapter is widened all the same: it is read, not multiplied.
    """
    read = {id(layer.base_layer.weight) for layer in adapted_layers(model) if layer.lora_embedding_A}
    for weight in model.parameters():
        if not keep_frozen or weight.requires_grad or weight.ndim < 2 or id(weight) in read:
            weight.data = weight.data.float()
