"""What `selfspec regress` reads before a model is loaded, so that a mistake shows at once and not after minutes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from selfspec_tune import artifact, trained_on
from selfspec_tune.artifact import Artifact
from selfspec_tune.config import MAX_DRAFT_TOKENS, RegressConfig, flag, parse_share
from selfspec_tune.decode.prompts import read_requests
from selfspec_tune.decode.requests import Request
from selfspec_tune.decode.sampling import SamplingParams
from selfspec_tune.errors import UserError
from selfspec_tune.files import read_json
from selfspec_tune.model.families import describe
from selfspec_tune.model.load import checkpoint_dir, load_config, load_tokenizer
from selfspec_tune.regress import documents, quality
from selfspec_tune.regress.documents import Document, TextSet
from selfspec_tune.regress.tasks import check_tasks

FACTS = "training.json"
"""What `selfspec train` leaves beside a checkpoint; its `base` is the checkpoint trained from."""


@dataclass
class Inputs:
    """Everything read before a model is loaded.

    Attributes:
        base: the checkpoint to compare with, None where perplexity is not tested.
        texts, settings: text sets, and in words how they become scored tokens.
        tasks: downstream tasks to score.
        requests: prompts to decode.
        max_increase, max_drop: allowed for perplexity, as a share, and for a task's score.
        artifact: the usable selfspec.json, None where there is none.
        notices: for the user, on what is not tested.
    """

    base: str | None
    artifact: Artifact | None
    notices: list[str]
    tokenizer: Any = None
    texts: list[TextSet] = field(default_factory=list)
    settings: dict[str, str] = field(default_factory=dict)
    tasks: list[str] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    max_increase: float = 0.0
    max_drop: float = 0.0

    @property
    def documents(self) -> list[Document]:
        """The documents of all text sets, in order."""
        return [document for text in self.texts for document in text.documents]


def read_inputs(model: str, config: RegressConfig) -> Inputs:
    """Read texts, prompts, tokenizers and selfspec.json, and say what cannot be tested.

    Raises:
        UserError: a bad number or file, another vocabulary in the base, or nothing left to test.
    """
    max_increase = parse_share("max_perplexity_increase", config.max_perplexity_increase)
    max_drop = parse_share("max_task_drop", config.max_task_drop)
    _check_numbers(config)
    names = [name.strip() for given in config.tasks for name in given.split(",")]
    if config.base is not None and not config.text and not names:
        raise UserError("a base is compared on held-out text, and none was given", command="--text HELDOUT.txt")
    base = find_base(model, config) if config.text or names else None
    if base is None and (config.text or names):
        raise UserError(
            "no base is known to compare with: the model has no training.json that names one",
            got="--text" if config.text else "--tasks",
            command=f"selfspec regress {model} --base BASE ..., or leave {'--text' if config.text else '--tasks'} out",
        )
    if base is None and config.prompts is None:
        raise UserError(
            "there is nothing to test",
            allowed="--prompts for losslessness; --base and --text for perplexity",
            command=f"selfspec regress {model} --prompts PROMPTS.jsonl --base BASE --text HELDOUT.txt",
        )
    num_layers = describe(load_config(model)).num_layers if config.exit_layers else 0
    for exit_layer in config.exit_layers:
        if not 1 <= exit_layer < num_layers:
            raise UserError("--exit-layers is out of range", got=exit_layer, allowed=f"1..{num_layers - 1}")
    tokenizer = load_tokenizer(model)
    inputs = Inputs(base, *_known_artifact(model), tokenizer, max_increase=max_increase, max_drop=max_drop)
    if base is not None:
        _check_same(model, base, tokenizer)
        inputs.tasks = names
        if config.text:
            _read_texts(model, tokenizer, config, inputs)
    if not inputs.texts:
        untested = "perplexity was not tested" + ("" if names else ", the weights were not compared")
        inputs.notices.append(f"no held-out text (--text): {untested}")
    if inputs.tasks:
        check_tasks(inputs.tasks)
    if config.prompts is None:
        inputs.notices.append("no prompts (--prompts): losslessness was not tested")
    else:
        _, inputs.requests = read_requests(
            config.prompts, tokenizer, config, max_new_tokens=config.max_new_tokens, limit=config.num_prompts
        )
    return inputs


def find_base(model: str, config: RegressConfig) -> str | None:
    """Return the base to compare with: the flag's, else the one that training.json names, else None."""
    directory = checkpoint_dir(model)
    if config.base is not None or directory is None or not (directory / FACTS).is_file():
        return config.base
    facts = read_json(directory / FACTS)
    base = facts.get("base") if isinstance(facts, dict) else None
    if base is None:
        return None
    if Path(base).is_absolute() and not Path(base).is_dir():
        raise UserError(
            f"the base that {directory / FACTS} names is gone", got=base, command="--base DIR, where it is now"
        )
    return str(base)


def is_adapter(name: str) -> bool:
    """Return whether `name` is a LoRA adapter directory, whose config on disk is its base's."""
    directory = checkpoint_dir(name)
    return directory is not None and (directory / "adapter_config.json").is_file()


def same_weights(model: str, base: str) -> bool:
    """Return whether both are directories with one fingerprint."""
    directories = [checkpoint_dir(name) for name in (model, base)]
    prints = [artifact.fingerprint(directory) for directory in directories if directory is not None]
    return len(prints) == 2 and prints[0] == prints[1]


def _check_numbers(config: RegressConfig) -> None:
    least = {
        "sampling_texts": 0,
        "num_prompts": 1,
        "max_new_tokens": 1,
        "max_documents": 1,
        "max_windows": 1,
        "window_length": 2,
    }
    for name, minimum in least.items():
        if getattr(config, name) < minimum:
            raise UserError(f"{flag(name)} is too small", got=getattr(config, name), allowed=f"{minimum} or more")
    for k in config.num_draft_tokens:
        if not 1 <= k <= MAX_DRAFT_TOKENS:
            raise UserError("--num-draft-tokens is out of range", got=k, allowed=f"1..{MAX_DRAFT_TOKENS}")
    SamplingParams(config.sampling_temperature, 0, config.sampling_top_p)
    if config.task_limit is not None and config.task_limit < 1:
        raise UserError("--task-limit is too small", got=config.task_limit, allowed="1 or more")
    if config.sampling_texts and config.sampling_temperature <= 0:
        raise UserError("--sampling-temperature is too small", got=config.sampling_temperature, allowed="above 0")
    if config.report is not None and config.report.exists() and not config.report.is_dir():
        raise UserError("--report is not a directory", got=config.report, allowed="a directory, made if need be")


def _check_same(model: str, base: str, tokenizer: Any) -> None:
    quality.check_same_vocabulary(tokenizer, load_tokenizer(base))
    if not is_adapter(model) and not is_adapter(base):
        quality.check_same_size(load_config(model), load_config(base))


def _read_texts(model: str, tokenizer: Any, config: RegressConfig, inputs: Inputs) -> None:
    longest = describe(load_config(model)).max_context
    if config.window_length > longest:
        got, allowed = config.window_length, f"at most {longest}"
        raise UserError("window_length is longer than the model's context", got=got, allowed=allowed)
    sizes = {"window_length": config.window_length, "max_windows": config.max_windows}
    inputs.texts = documents.read_sets(
        config.text, tokenizer, text_field=config.text_field, max_documents=config.max_documents, **sizes
    )
    inputs.settings = documents.describe(inputs.texts, tokenizer, **sizes)
    texts = [tokenizer.decode(torch.cat(document.windows)) for document in inputs.documents]
    inputs.notices += trained_on.notices(checkpoint_dir(model), texts, what="texts", flattered="perplexity")


def _known_artifact(model: str) -> tuple[Artifact | None, list[str]]:
    directory = checkpoint_dir(model)
    if directory is None:
        return None, []
    try:
        return artifact.read(directory), []
    except UserError as error:
        return None, [f"{error.what}: it is replaced"]
