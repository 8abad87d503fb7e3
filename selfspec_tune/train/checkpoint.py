"""What a run leaves on disk: resumable states while it lasts, a transformers checkpoint and the run's facts at its end.

    output/metrics.jsonl            one line per step and evaluation
    output/state/step-000050/       the latest state; gone when the run is finished
    output/model.safetensors ...    the checkpoint, complete with tokenizer, generation config, chat template
    output/trained_on.npy           hashes of the texts it was trained on, see `trained_on.py`
    output/training.json            the facts of the run; its presence says that the run is finished

A head's run leaves exit_head.metrics.jsonl, exit_head.state/, exit_head.safetensors, exit_head.json and trained_on.npy
instead, so that its output may be the model's own directory; another one is completed with the model's files.
Everything is written under another name and then renamed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from selfspec_tune.artifact import fingerprint
from selfspec_tune.config import TrainConfig
from selfspec_tune.errors import UserError
from selfspec_tune.files import read_json, write_json
from selfspec_tune.model.load import checkpoint_dir
from selfspec_tune.train.lora import merge_adapters, merged_weights


@dataclass(frozen=True)
class RunFiles:
    """Names of what a run writes into its output, and what to remove to start anew."""

    facts: str
    metrics: str
    states: str
    all: str


FILES = {
    "layer-skip": RunFiles("training.json", "metrics.jsonl", "state", ""),
    "exit-head": RunFiles("exit_head.json", "exit_head.metrics.jsonl", "exit_head.state", "/exit_head.*"),
}
# These change neither what is computed nor how it is measured; a run may be resumed with other values.
FREE_FIELDS = ("output", "json", "tracker", "save_every", "eval_every", "max_minutes", "device", "cache_targets")


def base_name(model: str) -> str:
    """Return how the base is recorded: the absolute path of a directory, else the hub name."""
    directory = checkpoint_dir(model)
    return str(directory.resolve()) if directory else model


def identity(config: TrainConfig) -> dict[str, Any]:
    """Return the options that make a run the same run, as JSON values; paths that exist are absolute."""
    options = {name: value for name, value in asdict(config).items() if name not in FREE_FIELDS}
    options["model"] = base_name(str(config.model))
    options["exits"] = config.chosen_exits
    directory = checkpoint_dir(str(config.model))
    if config.method == "exit-head" and directory is not None:
        options["checkpoint"] = fingerprint(directory)  # a head is of no use to other weights in the same place
    for name in ("train_data", "eval_data"):
        options[name] = [str(Path(s).resolve()) if Path(s).exists() else s for s in options[name]]
    plain: dict[str, Any] = json.loads(json.dumps(options))
    return plain


def identity_hash(options: dict[str, Any]) -> str:
    """Return a SHA-256 of an identity."""
    return hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest()


def finished(config: TrainConfig) -> dict[str, Any] | None:
    """Return the facts of the run that `output` already holds; None where this run is not finished.

    Raises:
        UserError: `output` holds another run, finished or not, or a checkpoint that no run of ours wrote.
    """
    output, files = Path(str(config.output)), FILES[config.method]
    if output.exists() and not output.is_dir():
        raise UserError("output is a file", got=output, allowed="a directory", command="--output OTHER_DIR")
    if (output / files.facts).is_file():
        facts: dict[str, Any] = read_json(output / files.facts)
        refuse_other_run(f"{output}{files.all}", facts.get("config", {}), identity(config), what="a finished run")
        return facts
    state = latest_state(output / files.states)
    if state is not None:
        there = _state_identity(state)["config"]
        refuse_other_run(f"{output}{files.all}", there, identity(config), what="the state of a run")
    if (output / "config.json").exists() and not _may_hold_checkpoint(output, config, resuming=state is not None):
        raise UserError("output holds a checkpoint that is not ours", got=output, command="--output OTHER_DIR")
    return None


def _may_hold_checkpoint(output: Path, config: TrainConfig, *, resuming: bool) -> bool:
    """Whether the checkpoint in `output` is the run's own: left half by it, or that of the model a head is for."""
    if config.method == "layer-skip":
        return resuming
    try:
        return fingerprint(output) == fingerprint(files_of(str(config.model)))
    except OSError:  # a hub name of which nothing is here
        return False


def refuse_other_run(place: str, there: dict[str, Any], here: dict[str, Any], *, what: str) -> None:
    """Raise a UserError naming the options in which two identities differ; return if they are the same."""
    there = {"method": "layer-skip", **there}  # there was no other when the first runs were recorded
    here = {"method": "layer-skip", **here}
    differing = sorted(name for name in there.keys() | here.keys() if there.get(name) != here.get(name))
    if differing:
        raise UserError(
            f"{place} holds {what} with other options: {', '.join(differing)}",
            got="; ".join(f"{name}={here.get(name)!r}" for name in differing),
            allowed="; ".join(f"{name}={there.get(name)!r}" for name in differing),
            command=f"--output OTHER_DIR, or rm -r {place} to start anew",
        )


def latest_state(states: Path) -> Path | None:
    """Return the newest complete state directory under `states`, or None."""
    found = sorted(states.glob("step-*"))
    return found[-1] if found else None


def save_state(accelerator: Any, states: Path, step: int, about: dict[str, Any]) -> None:
    """Write the state of everything accelerate knows of, then rename it and remove older ones. All ranks call this.

    Args:
        accelerator: holds the model, the optimizer, the random states and the registered objects.
        states: the directory of the run's states.
        step: optimiser steps done.
        about: {"config": identity, "data": digest of the tokens, "processes": number of ranks}.
    """
    temporary = states / "incomplete"
    if accelerator.is_main_process:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    accelerator.wait_for_everyone()
    accelerator.save_state(str(temporary), safe_serialization=False)  # safetensors would warn of the tied head
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        write_json(temporary / "about.json", about)
        final = states / f"step-{step:08d}"
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
        for old in states.glob("step-*"):
            if old != final:
                shutil.rmtree(old)
    accelerator.wait_for_everyone()


def load_state(accelerator: Any, states: Path, about: dict[str, Any]) -> bool:
    """Load the latest state into everything accelerate knows of; False where there is none.

    Raises:
        UserError: the state belongs to other options, other data or another number of processes.
    """
    state = latest_state(states)
    if state is None:
        return False
    there, place = _state_identity(state), str(states)
    refuse_other_run(place, there["config"], about["config"], what="the state of a run")
    facts = ("data", "processes")
    refuse_other_run(place, {k: there[k] for k in facts}, {k: about[k] for k in facts}, what="the state of a run")
    accelerator.load_state(str(state))
    return True


def round_weights(module: torch.nn.Module, dtype: torch.dtype) -> None:
    """Merge adapters and round weights to what `dtype` can hold, in place: what is measured last is what is saved."""
    merge_adapters(module)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(parameter.to(dtype))


def save_checkpoint(accelerator: Any, module: Any, tokenizer: Any, output: Path, dtype: torch.dtype) -> None:
    """Write a checkpoint that plain transformers loads. All ranks call this; the main one writes.

    Args:
        accelerator: gathers sharded weights.
        module: the prepared `EarlyExitModule`.
        tokenizer: saved beside the weights, chat template included.
        output: the run's directory.
        dtype: of the saved weights.
    """
    weights = accelerator.get_state_dict(module)
    if accelerator.is_main_process:
        model = accelerator.unwrap_model(module).model
        temporary = output / "checkpoint.incomplete"
        shutil.rmtree(temporary, ignore_errors=True)
        weights = merged_weights(model, {name.removeprefix("model."): w for name, w in weights.items()})
        _save_pretrained(model, weights, temporary, dtype)
        tokenizer.save_pretrained(temporary)
        for path in sorted(temporary.iterdir()):
            path.replace(output / path.name)
        temporary.rmdir()
    accelerator.wait_for_everyone()


def files_of(base: str) -> Path:
    """Return the directory that holds the files of a base: its own, or for a hub name that of the local copy."""
    directory = checkpoint_dir(base)
    if directory is None:
        from transformers.utils import cached_file

        directory = Path(cached_file(base, "config.json")).parent
    return directory


def link_files(source: Path, output: Path) -> None:
    """Complete `output` with the files of the checkpoint in `source`: weights linked where the disk can, others copied.

    Nothing happens if both are the same directory. Subdirectories, hidden files and what belongs to a head's run stay.
    """
    if source.resolve() == output.resolve():
        return
    for path in sorted(source.iterdir()):
        if not path.is_file() or path.name.startswith((".", "exit_head.")):
            continue
        temporary = output / f".{path.name}.tmp"
        temporary.unlink(missing_ok=True)
        # Other files are small, and may be edited in one place only.
        if path.suffix not in (".safetensors", ".bin") or not _linked(path.resolve(), temporary):
            shutil.copyfile(path, temporary)
        temporary.replace(output / path.name)


def _linked(source: Path, target: Path) -> bool:
    """Make a hard link; False where the disk cannot."""
    try:
        os.link(source, target)
    except OSError:
        return False
    return True


def write_facts(output: Path, facts: dict[str, Any], files: RunFiles) -> None:
    """Write the facts of a run, which mark it as finished, and remove its states."""
    write_json(output / files.facts, facts)
    shutil.rmtree(output / files.states, ignore_errors=True)


def _save_pretrained(model: Any, weights: dict[str, Any], directory: Path, dtype: torch.dtype) -> None:
    # An empty model of the right class and dtype does the saving: the trained one stays fp32, and may be sharded.
    with torch.device("meta"):
        shell = type(model)(model.config).to(dtype)
    shell.generation_config = model.generation_config
    cast: dict[int, torch.Tensor] = {}
    for weight in weights.values():
        cast.setdefault(weight.data_ptr(), weight.to("cpu", dtype))  # tied weights stay one tensor
    shell.save_pretrained(directory, state_dict={name: cast[w.data_ptr()] for name, w in weights.items()})


def _state_identity(state: Path) -> dict[str, Any]:
    about: dict[str, Any] = read_json(state / "about.json")
    return about
