"""From a directory, hub name or LoRA adapter directory to a model and a tokenizer, with errors a user can act on."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from selfspec_tune.errors import UserError
from selfspec_tune.files import read_json
from selfspec_tune.model.families import SUPPORTED, check_supported


def resolve_device(device: str) -> torch.device:
    """Turn a flag into a device; auto is cuda where there is one, else cpu."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
        torch.empty(0, device=resolved)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"device cannot be used: {reason}", got=device, allowed="auto, cpu, cuda, cuda:N") from None
    return resolved


def checkpoint_dir(name: str) -> Path | None:
    """Return the local directory `name` stands for, or None when it is a hub name."""
    path = Path(name)
    return path if path.is_dir() else None


def load_model(name: str, *, dtype: str = "auto", device: str = "auto") -> Any:
    """Load a supported causal language model in eval mode on `device`.

    Args:
        name: checkpoint directory, hub name, or LoRA adapter directory (merged into its base).
        dtype: auto (the checkpoint's own), float32, bfloat16 or float16.
        device: auto, cpu, cuda, cuda:N.

    Raises:
        UserError: not a checkpoint, an unsupported architecture, an unusable device.
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    resolved = resolve_device(device)
    directory = checkpoint_dir(name)
    if directory is not None and (directory / "adapter_config.json").is_file():
        return _load_adapter(directory, dtype=dtype, device=device)
    check_supported(load_config(name))
    try:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=_torch_dtype(dtype))
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise UserError(f"the weights of {name} cannot be loaded: {_first_line(error)}") from None
    return model.to(resolved).eval()


def load_config(name: str) -> Any:
    """Load the transformers config of a checkpoint (for an adapter, its base's); UserError where there is none."""
    from transformers import AutoConfig

    directory = checkpoint_dir(name)
    if directory is not None and (directory / "adapter_config.json").is_file():
        return load_config(_adapter_base(directory))
    if directory is not None and not (directory / "config.json").is_file():
        raise UserError(f"{name} is not a checkpoint: it has no config.json", command=f"ls {name}")
    try:
        return AutoConfig.from_pretrained(name)
    except (OSError, ValueError, KeyError) as error:
        if directory is not None:
            got = read_json(directory / "config.json").get("model_type")
            raise UserError("this architecture is not supported", got=got, allowed=", ".join(SUPPORTED)) from None
        raise UserError(
            f"no model found at {name!r}: {_first_line(error)}",
            allowed="a checkpoint or LoRA adapter directory, or a hub name such as HuggingFaceTB/SmolLM2-135M",
        ) from None


def load_tokenizer(name: str) -> Any:
    """Load the tokenizer beside a checkpoint (for an adapter without one, its base's)."""
    from transformers import AutoTokenizer

    directory = checkpoint_dir(name)
    is_adapter = directory is not None and (directory / "adapter_config.json").is_file()
    if directory is not None and is_adapter and not (directory / "tokenizer_config.json").is_file():
        return load_tokenizer(_adapter_base(directory))
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"no tokenizer found at {name!r}: {_first_line(error)}") from None


def end_tokens(model: Any) -> tuple[int, ...]:
    """Return the end-of-text token ids of the checkpoint's generation config."""
    return _end_tokens(model.config, model.generation_config)


@dataclass(frozen=True)
class Outline:
    """What is known of a model without its weights; its head is [vocab_size, hidden_size] numbers of `dtype`."""

    vocab_size: int
    hidden_size: int
    dtype: torch.dtype
    end_tokens: tuple[int, ...]

    def head_bytes(self, rows: int) -> int:
        """Return the bytes of so many rows of the head."""
        return rows * self.hidden_size * self.dtype.itemsize


def load_outline(name: str, *, dtype: str = "auto") -> Outline:
    """Return the outline of a checkpoint (see `load_model`); without a dtype in its config, auto is taken for float32.

    Raises:
        UserError: not a checkpoint, or an unsupported architecture.
    """
    from transformers import GenerationConfig

    directory, config = checkpoint_dir(name), load_config(name)
    check_supported(config)
    if directory is not None and (directory / "adapter_config.json").is_file():
        name = _adapter_base(directory)
    try:
        generation = GenerationConfig.from_pretrained(name)
    except OSError:
        generation = None
    known = getattr(config, "dtype", None) if dtype == "auto" else dtype
    weights = known if isinstance(known, torch.dtype) else getattr(torch, known or "float32")
    return Outline(config.vocab_size, config.hidden_size, weights, _end_tokens(config, generation))


def _end_tokens(config: Any, generation_config: Any) -> tuple[int, ...]:
    ids = getattr(generation_config, "eos_token_id", None)
    if ids is None:
        ids = config.eos_token_id
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list | tuple) else (ids,)


def _load_adapter(directory: Path, *, dtype: str, device: str) -> Any:
    from peft import PeftModel

    base = load_model(_adapter_base(directory), dtype=dtype, device=device)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return PeftModel.from_pretrained(base, str(directory)).merge_and_unload().eval()
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"the adapter in {directory} cannot be merged: {_first_line(error)}") from None


def _adapter_base(directory: Path) -> str:
    base = read_json(directory / "adapter_config.json").get("base_model_name_or_path")
    if not base:
        raise UserError(f"{directory}/adapter_config.json names no base model", allowed="base_model_name_or_path")
    return str(base)


def _torch_dtype(dtype: str) -> Any:
    return dtype if dtype == "auto" else getattr(torch, dtype)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
