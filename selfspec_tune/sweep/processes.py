"""Processes, one per GPU, that share the prompts of a sweep: as `accelerate launch` starts them, else just this one."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class Processes:
    """This process among `count`; number 0 is the main one, which measures, decides and prints."""

    def __init__(self) -> None:
        self.rank, self.count, self._local = 0, 1, 0
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            from accelerate import PartialState

            state = PartialState(cpu=not torch.cuda.is_available())
            self.rank, self.count, self._local = state.process_index, state.num_processes, state.local_process_index

    @property
    def main(self) -> bool:
        """Whether this is the process that measures, decides and prints."""
        return self.rank == 0

    def device(self, asked: str) -> str:
        """Return the device of this process: with several, each has a GPU of its own."""
        if self.count > 1 and torch.cuda.is_available() and asked in ("auto", "cuda"):
            return f"cuda:{self._local}"
        return asked

    def share(self, items: Sequence[T]) -> list[T]:
        """Return this process's part of `items`, every `count`-th."""
        return list(items[self.rank :: self.count])

    def gather(self, values: Sequence[T]) -> list[T]:
        """Return all processes' results, one per item of which each had its `share`, in the items' order."""
        if self.count == 1:
            return list(values)
        from accelerate.utils import gather_object

        parts = gather_object([list(values)])
        return [parts[index % self.count][index // self.count] for index in range(sum(map(len, parts)))]

    def from_main(self, make: Callable[[], T]) -> T:
        """Let the main process make a value and return it in all; an exception is raised in all."""
        if self.count == 1:
            return make()
        from accelerate.utils import broadcast_object_list

        made: list[Any] = [None, None]
        if self.main:
            try:
                made[0] = make()
            except Exception as error:  # the others would wait for ever
                made[1] = error
        broadcast_object_list(made)
        if made[1] is not None:
            raise made[1]
        return made[0]

    def leave(self) -> None:
        """Take leave of the other processes."""
        if self.count > 1 and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
