"""Rounds on a CUDA device: one graph per kind of round, and results that come back while the next round runs.

A recorded round costs one launch instead of some hundreds. What it reads and writes stays where it is: the cache, the
rows' state (`Round`), prepared random numbers, copied tokens. No GPU has run this file so far.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

from selfspec_tune.model.decoder import LayeredDecoder

Result = TypeVar("Result")


class Recordings:
    """CUDA graphs by kind of call, for calls that take nothing and leave their tensors where they are.

    The first call of a kind runs as it is written, which compiles its kernels; the second is recorded, and from then on
    it is replayed. Graphs share one memory pool: a result holds until the next call of any kind.

    Args:
        active: False runs every call as it is written.
    """

    def __init__(self, *, active: bool) -> None:
        self.active = active
        self._seen: set[Hashable] = set()
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, Any]] = {}
        self._pool = torch.cuda.graph_pool_handle() if active else None

    def run(self, kind: Hashable, body: Callable[[], Result]) -> Result:
        """Make a call of a kind; `body` does the same at every call of it, and reads nothing on the host."""
        if not self.active or kind not in self._seen:
            self._seen.add(kind)
            return body()
        if kind not in self._graphs:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                result = body()
            self._graphs[kind] = graph, result
        graph, result = self._graphs[kind]
        graph.replay()
        return result


def recordings(decoder: LayeredDecoder) -> Recordings:
    """Return an empty collection, active where a decoder's passes read nothing on the host of a GPU."""
    return Recordings(active=decoder.device.type == "cuda" and decoder.compiled)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the current one: graphs, events and streams are those of the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def synchronise(device: torch.device) -> None:
    """Wait until a GPU has done what it was given; nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def upload(values: Tensor, target: Tensor) -> None:
    """Write the host's values into a tensor of a device, in the order of its work and without waiting for it."""
    target.copy_(values.pin_memory() if target.device.type == "cuda" else values, non_blocking=True)


class HostCopy:
    """A tensor on its way to the host. Reading it waits for this copy and for nothing launched after it."""

    def __init__(self, tensor: Tensor) -> None:
        self._host, self._arrived = tensor, None
        if tensor.device.type == "cuda":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def read(self) -> Tensor:
        """Return it once it is there."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host
