"""What memory training takes besides the weights trained, told from the model's config before anything is loaded.

Weights are counted exactly; what a step needs besides is a rough sum of the tensors it holds at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from selfspec_tune.model.families import check_supported
from selfspec_tune.train.anchor import frozen_copy
from selfspec_tune.train.loss import LOGITS_PER_CHUNK

TRAINED_BYTES = 16
"""Of a trained parameter: weight, gradient and AdamW's two moments, in fp32."""
HELD_PER_TOKEN = (14, 5)
"""Numbers of a layer kept for the backward pass, in hidden and in MLP sizes."""


@dataclass(frozen=True)
class HeadMemory:
    """Bytes on the training device.

    Attributes:
        target: the frozen model's weights.
        trained: the head with its gradients and optimiser states.
        lm_head: the model's LM head, which the loss reads.
        step: activations and logits of a training step.
    """

    target: int
    trained: int
    lm_head: int
    step: int

    @property
    def together(self) -> int:
        """Without --cache-targets: the target stays."""
        return self.target + self.trained + self.step

    @property
    def cached(self) -> int:
        """With --cache-targets, once the target is gone."""
        return self.trained + self.lm_head + self.step

    def __str__(self) -> str:
        total, target, cached = (f"{value / 1e9:.1f} GB" for value in (self.together, self.target, self.cached))
        return f"about {total}; with --cache-targets {target} for one pass of the model, then {cached}"


def head_memory(config: Any, *, tokens: int, dtype: torch.dtype) -> HeadMemory:
    """Estimate what `train --method exit-head` needs.

    Args:
        config: a supported transformers config.
        tokens: of a batch on one device.
        dtype: of the frozen model while it runs.

    Raises:
        UserError: the architecture is not supported.
    """
    model = _outline(config)
    layer = sum(parameter.numel() for parameter in model.model.layers[0].parameters())
    hidden, mlp = HELD_PER_TOKEN
    held = tokens * (hidden * config.hidden_size + mlp * config.intermediate_size)
    return HeadMemory(
        target=sum(parameter.numel() for parameter in model.parameters()) * dtype.itemsize,
        trained=(layer + config.hidden_size) * TRAINED_BYTES,
        lm_head=model.lm_head.weight.numel() * dtype.itemsize,
        step=4 * (held + 3 * LOGITS_PER_CHUNK),
    )


def anchor_memory(config: Any, *, share_embeddings: bool, compute: torch.dtype) -> int:
    """Return the bytes of the frozen copy that `train --anchor-weight` keeps without LoRA, see `frozen_copy`.

    Raises:
        UserError: the architecture is not supported.
    """
    base = frozen_copy(_outline(config), share_embeddings=share_embeddings, compute=compute)
    return sum(weight.nbytes for weight in base.parameters())


def _outline(config: Any) -> Any:
    """Return the model of a config without numbers, in the dtype that the config names."""
    from transformers import AutoModelForCausalLM

    check_supported(config)
    dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)
