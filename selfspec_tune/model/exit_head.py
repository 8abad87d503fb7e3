"""The early-exit head: one decoder layer and a norm of its own after layer E of a frozen model, and its file.

It turns the hidden states at exit E into ones that the model's own LM head reads. The file, `exit_head.safetensors`
beside the checkpoint, says for which weights it was trained; with others it is refused. Knows no loss and no draft.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from selfspec_tune.artifact import EXIT_HEAD_FILE, check_fingerprint
from selfspec_tune.errors import UserError

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class HeadFacts:
    """What the file says of a head, in the metadata of its header.

    Attributes:
        exit_layer: E, the layers that run before the head.
        checkpoint_fingerprint: of the frozen checkpoint, see `artifact.fingerprint`.
        loss: kl, ce, tv or mixture.
        steps: optimiser steps trained.
        config: the options of the training run.
    """

    exit_layer: int
    checkpoint_fingerprint: str
    loss: str
    steps: int
    config: dict[str, Any]
    schema_version: int = SCHEMA_VERSION


class ExitHead(nn.Module):
    """A decoder layer `block` and a final `norm`, both of the model's own architecture.

    Args:
        model: a supported transformers causal language model; nothing of it is shared or changed.
        exit_layer: E, 1 ≤ E < L. The untrained head is a copy of the model's next layer, E, and of its final norm.
        dtype: of the copies.
    """

    def __init__(self, model: Any, exit_layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        layer, norm = model.model.layers[exit_layer], model.model.norm
        self.exit_layer = exit_layer
        with torch.device("meta"):  # not a deepcopy: weights may be views of larger, fused ones
            self.block = type(layer)(model.config, exit_layer)
            self.norm = type(norm)(model.config.hidden_size, eps=norm.variance_epsilon)
        for copy, original in ((self.block, layer), (self.norm, norm)):
            weights = {name: weight.detach().to(dtype, copy=True) for name, weight in original.state_dict().items()}
            copy.load_state_dict(weights, assign=True)
        self.requires_grad_(True)


def save_exit_head(directory: Path, head: nn.Module, facts: HeadFacts, dtype: torch.dtype) -> Path:
    """Write a head in `dtype` into `directory`, whole or not at all, and return the path."""
    from safetensors.torch import save_file

    path = directory / EXIT_HEAD_FILE
    temporary = directory / f".{path.name}.{os.getpid()}.tmp"
    weights = {name: weight.detach().to("cpu", dtype).contiguous() for name, weight in head.state_dict().items()}
    metadata = {name: json.dumps(value, sort_keys=True) for name, value in asdict(facts).items()}
    try:
        save_file(weights, temporary, metadata={"format": "pt", **metadata})
        with temporary.open("rb") as handle:
            os.fsync(handle.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return path


def read_facts(checkpoint: Path) -> HeadFacts:
    """Return what the head beside `checkpoint` says of itself.

    Raises:
        UserError: there is no head, its file is broken or of another schema, or it was trained for other weights.
    """
    from safetensors import SafetensorError, safe_open

    path = checkpoint / EXIT_HEAD_FILE
    again = _command(checkpoint)
    if not path.is_file():
        raise UserError(f"{checkpoint} has no exit head", command=again)
    names = {field.name for field in fields(HeadFacts)}
    try:
        with safe_open(path, framework="pt") as handle:
            metadata = handle.metadata() or {}
        facts = HeadFacts(**{name: json.loads(text) for name, text in metadata.items() if name in names})
    except (SafetensorError, ValueError, TypeError) as error:
        raise UserError(f"{path} cannot be read: {error}", command=again) from None
    if facts.schema_version != SCHEMA_VERSION:
        got = facts.schema_version
        raise UserError(f"{path} has an unknown schema", got=got, allowed=SCHEMA_VERSION, command=again)
    check_fingerprint(checkpoint, facts.checkpoint_fingerprint, f"{path} was trained for other weights", again)
    return facts


def load_exit_head(checkpoint: Path, model: Any) -> ExitHead:
    """Load the head beside `checkpoint` in the dtype and on the device of its loaded `model`, frozen.

    Raises:
        UserError: as `read_facts`, or the head does not fit the model.
    """
    from safetensors.torch import load_file

    facts, again = read_facts(checkpoint), _command(checkpoint)
    num_layers, weight = len(model.model.layers), model.model.norm.weight
    if not 1 <= facts.exit_layer < num_layers:
        allowed = f"1..{num_layers - 1}"
        raise UserError(
            "the exit head has no place in this model", got=facts.exit_layer, allowed=allowed, command=again
        )
    head = ExitHead(model, facts.exit_layer, weight.dtype)
    try:
        head.load_state_dict(load_file(checkpoint / EXIT_HEAD_FILE))
    except RuntimeError as error:
        raise UserError(f"the exit head does not fit the model: {error}", command=again) from None
    return head.to(weight.device).requires_grad_(False).eval()


def _command(checkpoint: Path) -> str:
    return f"selfspec train --method exit-head --model {checkpoint} --output {checkpoint} --train-data FILE.jsonl"
