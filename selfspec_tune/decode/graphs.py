"""Rounds on a CUDA device: one graph per kind of round, and results that come back while the next round runs.

A recorded round costs one launch instead of some hundreds. What it reads and writes stays where it is: the cache, the
rows' state (`Round`), prepared random numbers, copied tokens. No GPU has run this file so far.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from selfspec_tune.decode.round import Outcome


class RecordedRounds:
    """CUDA graphs by kind of round: (source, exit, k), for one batch size and one cache.

    The first round of a kind runs as it is written, which compiles its kernels; the second is recorded, and from then
    on it is replayed. Graphs share one memory pool: an outcome holds until the next round is launched.
    """

    def __init__(self) -> None:
        self._seen: set[Hashable] = set()
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, Outcome]] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def run(self, kind: Hashable, body: Callable[[], Outcome]) -> Outcome:
        """Run a round of a kind; `body` must do the same for every round of it, and read nothing on the host."""
        if kind not in self._seen:
            self._seen.add(kind)
            return body()
        if kind not in self._graphs:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                outcome = body()
            self._graphs[kind] = graph, outcome
        graph, outcome = self._graphs[kind]
        graph.replay()
        return outcome


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
