"""Weights aside from the states: rounded for a while to what will be saved, and the best ones so far, on disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor

from selfspec_tune.files import temporary_beside
from selfspec_tune.train.checkpoint import round_weights
from selfspec_tune.train.lora import changed_by_merging
from selfspec_tune.train.sharding import reshard
from selfspec_tune.train.writing import write_together


@contextmanager
def rounded(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Within the block, adapters are merged and weights are what `dtype` can hold: what is judged is what is saved.

    Outside they have their own bits again. Copies of those that change wait in the CPU's memory.
    """
    reshard(module)
    changed = {id(parameter) for parameter in changed_by_merging(module)}
    kept = [
        (parameter, _local(parameter).to("cpu", copy=True))
        for parameter in module.parameters()
        if id(parameter) in changed or dtype.itemsize < parameter.dtype.itemsize
    ]
    try:
        round_weights(module, dtype)
        yield
    finally:
        reshard(module)
        for parameter, own in kept:
            _local(parameter).copy_(own)


def _local(parameter: nn.Parameter) -> torch.Tensor:
    """Return the numbers of a parameter that are on this rank."""
    values = parameter.detach()
    return values.to_local() if isinstance(values, DTensor) else values


class KeptWeights:
    """Trained weights of some steps, in their own precision, one file each: `best-00000050.pt`.

    A state names the best step so far, so the file of that step stays until a later state names another: a run that is
    resumed from the state finds it. All ranks call `write` and `read`; the main one touches the disk.

    Args:
        accelerator: of the run.
        directory: where the files go; that of the states, so that they go with them.
        always: steps whose file is never removed.
    """

    def __init__(self, accelerator: Any, directory: Path, *, always: tuple[int, ...] = ()) -> None:
        self.accelerator, self.directory = accelerator, directory
        self.always = frozenset(always)
        self.in_state: frozenset[int] = frozenset()

    def write(self, module: nn.Module, step: int) -> None:
        """Keep the trained weights of a step; earlier ones go, unless the latest state needs them."""
        weights = self.taken(module)

        def save() -> None:
            if self.accelerator.is_main_process:
                with temporary_beside(self._path(step)) as temporary:
                    torch.save(weights, temporary)

        write_together(self.accelerator, save, self.directory)
        self._prune({step} | self.in_state)

    def taken(self, module: nn.Module) -> dict[str, Any]:
        """Return the trained weights on the CPU; where they are shards, nothing on ranks but the main one."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
        weights: dict[str, Any] = get_model_state_dict(module, options=options)
        return weights

    def read(self, module: nn.Module, step: int) -> None:
        """Put the weights of a step back into the module."""
        self.put(module, self.load(step))

    def load(self, step: int) -> dict[str, Any]:
        """Return the weights kept of a step; nothing on ranks but the main one."""
        if not self.accelerator.is_main_process:
            return {}
        weights: dict[str, Any] = torch.load(self._path(step), map_location="cpu", weights_only=True)
        return weights

    def put(self, module: nn.Module, weights: dict[str, Any]) -> None:
        """Put weights of the main rank into the module."""
        several = self.accelerator.num_processes > 1
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=several, strict=False)
        set_model_state_dict(module, weights, options=options)
        self.accelerator.wait_for_everyone()

    def state_saved(self, best: int | None) -> None:
        """Note the best step that the latest state names; None for none. Files of other steps go."""
        self.in_state = frozenset() if best is None else frozenset([best])
        self._prune(set(self.in_state))

    def _prune(self, steps: set[int]) -> None:
        if self.accelerator.is_main_process:
            stay = {self._path(step) for step in steps | self.always}
            for path in self.directory.glob("best-*.pt"):
                if path not in stay:
                    path.unlink()

    def _path(self, step: int) -> Path:
        return self.directory / f"best-{step:08d}.pt"
