"""The random numbers of a batch as a round takes them, drawn on the host request by request."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from selfspec_tune.config import MAX_DRAFT_TOKENS
from selfspec_tune.decode.graphs import upload
from selfspec_tune.decode.sampling import Noise, draw, draw_with_gumbel

MOST = 2 * MAX_DRAFT_TOKENS + 1
"""Uniform numbers of a row that a round takes at most: one per drafted token, per test, and for the last token."""


class Noises:
    """Random numbers of all rows, on the device. Rows without a request get zeros.

    Args:
        batch_size: rows B.
        device: where rounds run.
    """

    def __init__(self, batch_size: int, device: torch.device) -> None:
        self.batch_size, self.device = batch_size, device
        self._rows: Sequence[Noise] = ()
        self._position: Callable[[int], int] = int
        self._ready: Tensor | None = None
        self._taken = 0

    def start(self, rows: Sequence[Noise], position: Callable[[int], int]) -> None:
        """Begin new requests: the noise of each row, and what tells the position of a row's next token."""
        self._rows, self._position = rows, position

    def prepare(self, count: int) -> None:
        """Draw the coming round's `count` uniform numbers of every row now, into memory that stays where it is.

        A recorded round reads them there. The numbers are those it would have drawn itself.
        """
        if self._ready is None:
            self._ready = torch.empty(self.batch_size, MOST, dtype=torch.float64, device=self.device)
        upload(self._draw(count), self._ready[:, :count])
        self._taken = 0

    def uniform(self, count: int) -> Tensor:
        """Return the next `count` uniform numbers of every row, fp64 [B, count]."""
        return self._draw(count).to(self.device)

    def prepared(self, count: int) -> Tensor:
        """Return the next `count` of the prepared numbers, fp64 [B, count]."""
        assert self._ready is not None
        self._taken += count
        return self._ready[:, self._taken - count : self._taken]

    def gumbel(self, offset: int, size: int) -> Tensor:
        """Return the Gumbel noise [B, size] of each row's next position plus `offset`."""
        noise = [each.gumbel(self._position(row) + offset, size) for row, each in enumerate(self._rows)]
        noise += [torch.zeros(size, dtype=torch.float64)] * (self.batch_size - len(noise))
        return torch.stack(noise).to(self.device)

    def first(self, row: int, target: Tensor, *, shared: bool) -> Tensor:
        """Draw the first token of one row, [1], from its distribution [1, V]; `shared` by its Gumbel noise."""
        noise = self._rows[row]
        if shared:
            return draw_with_gumbel(target, noise.gumbel(0, target.shape[-1]).to(target.device))
        return draw(target, noise.uniform(1).to(target.device))

    def _draw(self, count: int) -> Tensor:
        rows = [noise.uniform(count) for noise in self._rows]
        rows += [torch.zeros(count, dtype=torch.float64)] * (self.batch_size - len(rows))
        return torch.stack(rows)
