"""What a run leaves on disk: resumable states while it lasts, a transformers checkpoint and the run's facts at its end.

    output/metrics.jsonl            one line per step and evaluation
    output/state/step-000050/       the latest state; gone when the run is finished
    output/model.safetensors ...    the checkpoint, complete with tokenizer, generation config, chat template
    output/trained_on.npy           hashes of the texts it was trained on, see `trained_on.py`
    output/training.json            the facts of the run; its presence says that the run is finished

A head's run leaves exit_head.metrics.jsonl, exit_head.state/, exit_head.safetensors, exit_head.json and trained_on.npy
instead, so that its output may be the model's own directory; another one is completed with the model's files.
Everything is written under another name and then renamed, and what it replaces goes last: a process that dies at any
point leaves what the same command goes on from.
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
from selfspec_tune.config import TrainConfig, field_defaults
from selfspec_tune.errors import UserError
from selfspec_tune.files import read_json, write_json
from selfspec_tune.model.load import checkpoint_dir
from selfspec_tune.train.lora import merge_adapters, merged_weights
from selfspec_tune.train.sharding import reshard
from selfspec_tune.train.writing import write_together


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
# These change neither a step nor how weights are measured; a run may be resumed with other values.
FREE_FIELDS = ("output", "json", "tracker", "save_every", "max_minutes", "device", "cache_targets")


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
    for name in ("train_data", "eval_data", "general_data", "anchor_data"):
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
        shutil.rmtree(output / files.states, ignore_errors=True)  # left where the process died just before its end
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
    then = json.loads(json.dumps(field_defaults(TrainConfig), default=str))  # options that a recorded run did not know
    there, here = {**then, **there}, {**then, **here}
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


def where_it_stopped(config: TrainConfig) -> str:
    """Return a sentence on what a run that was told to stop goes on from."""
    state = latest_state(Path(str(config.output)) / FILES[config.method].states)
    if state is None:
        return "stopped before a state was saved"
    return f"stopped after step {_step_of(state)}: the same command goes on from there"


def save_state(accelerator: Any, states: Path, step: int, about: dict[str, Any]) -> None:
    """Write the state of everything accelerate knows of, then rename it and remove older ones. All ranks call this.

    Args:
        accelerator: holds the model, the optimizer, the random states and the registered objects.
        states: the directory of the run's states, the same one for all ranks.
        step: optimiser steps done.
        about: {"config": identity, "data": digest of the tokens, "processes": number of ranks}.

    Raises:
        UserError: it could not be written; the state before is as it was.
    """
    temporary, before = states / "incomplete", latest_state(states)
    kept = f"{before.name} is kept" if before else ""

    def begin() -> None:
        if accelerator.is_main_process:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)

    def write() -> None:
        accelerator.save_state(str(temporary), safe_serialization=False)  # safetensors would warn of the tied head

    def end() -> None:
        if accelerator.is_main_process:
            write_json(temporary / "about.json", {**about, "distribution": _distribution(accelerator)})
            _flush(temporary)
            final = states / f"step-{step:08d}"
            while final.exists():  # a state of this step stays until the new one is in place
                final = final.with_name(f"{final.name}+")
            temporary.rename(final)
            for old in states.glob("step-*"):
                if old != final:
                    shutil.rmtree(old)

    for part in (begin, write, end):
        write_together(accelerator, part, states, kept=kept)


def load_state(accelerator: Any, states: Path, about: dict[str, Any]) -> bool:
    """Load the latest state into everything accelerate knows of; False where there is none.

    Raises:
        UserError: the state belongs to other options, other data, or another number or kind of processes.
    """
    state = latest_state(states)
    _check_shared(accelerator, state, states)
    if state is None:
        return False
    there, place = _state_identity(state), str(states)
    refuse_other_run(place, there["config"], about["config"], what="the state of a run")
    here = {**about, "distribution": _distribution(accelerator)}
    there = {"distribution": here["distribution"], **there}  # states of before it was recorded
    facts = ("data", "processes", "distribution")
    refuse_other_run(place, {k: there[k] for k in facts}, {k: here[k] for k in facts}, what="the state of a run")
    accelerator.load_state(str(state))
    return True


def _step_of(state: Path) -> int:
    return int(state.name.removeprefix("step-").rstrip("+"))


def _distribution(accelerator: Any) -> str:
    """Return how a run is spread over processes, which says what its states are made of: NO, MULTI_GPU, FSDP, ..."""
    return str(accelerator.distributed_type.value)


def _check_shared(accelerator: Any, state: Path | None, states: Path) -> None:
    """Raise a UserError where ranks see different states: they are on machines that do not share the output."""
    if accelerator.num_processes == 1:
        return
    step = _step_of(state) if state else -1
    seen = accelerator.gather(torch.tensor([step], device=accelerator.device)).tolist()
    if len(set(seen)) > 1:
        raise UserError(
            f"the processes see different states in {states}",
            got=", ".join("none" if each < 0 else f"step {each}" for each in seen),
            allowed="an output that all machines share",
        )


def _flush(directory: Path) -> None:
    """Bring the files of a directory to the disk itself."""
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as handle:
                os.fsync(handle.fileno())


def round_weights(module: torch.nn.Module, dtype: torch.dtype) -> None:
    """Merge adapters and round weights to what `dtype` can hold, in place: what is measured last is what is saved."""
    reshard(module)
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

    Raises:
        UserError: it could not be written.
    """
    weights = accelerator.get_state_dict(module)

    def write() -> None:
        if not accelerator.is_main_process:
            return
        model = accelerator.unwrap_model(module).model
        temporary = output / "checkpoint.incomplete"
        shutil.rmtree(temporary, ignore_errors=True)
        # On the CPU, as a card may have no room for merged copies; tied weights stay one tensor.
        moved: dict[int, torch.Tensor] = {}
        for weight in weights.values():
            if weight.data_ptr() not in moved:
                moved[weight.data_ptr()] = weight.to("cpu")
        plain = merged_weights(model, {n.removeprefix("model."): moved[w.data_ptr()] for n, w in weights.items()})
        _save_pretrained(model, plain, temporary, dtype)
        tokenizer.save_pretrained(temporary)
        for path in sorted(temporary.iterdir()):
            path.replace(output / path.name)
        temporary.rmdir()

    write_together(accelerator, write, output)


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
    # Tied weights are one parameter of the shell, and become one tensor again where they were gathered as several.
    owners = {name: id(parameter) for name, parameter in shell.named_parameters(remove_duplicate=False)}
    cast: dict[object, torch.Tensor] = {}
    for name, weight in weights.items():
        cast.setdefault(owners.get(name, name), weight.to("cpu", dtype))
    shell.save_pretrained(directory, state_dict={name: cast[owners.get(name, name)] for name in weights})


def _state_identity(state: Path) -> dict[str, Any]:
    about: dict[str, Any] = read_json(state / "about.json")
    return about
