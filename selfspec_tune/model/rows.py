"""Which row counts of a call give the same bits: the self-test behind `numerics: exact`.

Whether a row of a matrix product depends on the number of rows, on the row's index or on its neighbours is a property
of device, dtype, shape, thread count and library. So it is measured, on the model's own weights: every product of a
layer, its attention before rounding, the whole layer and the head run as in plain decoding (one real row, padded) and
as in verification (several real rows). Row counts that agree bit for bit form a class; calls are padded to its members.
Comparing only a low-precision layer's output would miss differences in fp32 that surface once in some hundred tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from selfspec_kernels import BLOCK, few_row_linear
from torch import Tensor

from selfspec_tune.errors import UserError
from selfspec_tune.progress import Progress, silent

if TYPE_CHECKING:
    from selfspec_tune.model.decoder import LayeredDecoder


@dataclass(frozen=True)
class RowCounts:
    """Rows per sequence that a call may have, ascending; empty for any."""

    counts: tuple[int, ...]

    def padded(self, num_rows: int) -> int:
        """Return the smallest allowed count that holds `num_rows` rows.

        Raises:
            UserError: more rows than were certified.
        """
        if not self.counts:
            return num_rows
        for count in self.counts:
            if count >= num_rows:
                return count
        raise UserError(
            "more rows in one call than were certified for exact numerics",
            got=num_rows,
            allowed=f"at most {self.counts[-1]}",
            command="--numerics fast, or a smaller --num-draft-tokens",
        )


ANY_ROWS = RowCounts(())


def certify(
    decoder: LayeredDecoder,
    *,
    batch_size: int,
    max_rows: int,
    layers: Iterable[int] | None = None,
    begins: Iterable[int] = (BLOCK - 6, 4 * BLOCK - 6),
    thorough: bool = False,
) -> list[RowCounts]:
    """Return the classes of row counts that give equal bits, the cheapest first.

    Args:
        decoder: the model; its `rows` are as before when this returns.
        batch_size: sequences B per call. Classes hold for this B only.
        max_rows: rows per sequence of the largest call, k_max + 1.
        layers: layers tried; default: the first of each kind (with and without a sliding window).
        begins: live lengths at which the text starts; the defaults cross a block's edge.
        thorough: try every alignment of the text in the calls instead of two.

    Returns:
        Classes that reach `max_rows`, by their smallest member. A class of one count means that every call needs
        that count. Empty if not even a constant count gives equal bits at every row index.
    """
    if layers is None:
        windows = decoder.family.windows
        layers = sorted({windows.index(window) for window in windows})
    last_begin = max(0, decoder.family.max_context - max_rows)
    begins = sorted({min(begin, last_begin) for begin in begins})
    probes: list[ProductProbe | TextProbe] = []
    for layer in layers:
        probes += [ProductProbe(decoder, batch_size, max_rows, *product) for product in decoder.products(layer)]
        for begin in begins:
            probes += [kind(decoder, batch_size, max_rows, layer, begin) for kind in (AttentionProbe, LayerProbe)]
    probes.append(ProductProbe(decoder, batch_size, max_rows, *decoder.head))
    rows_before = decoder.rows
    classes: list[tuple[list[Tensor], list[int]]] = []
    try:
        for count in tried_counts(max_rows):
            if count > max_rows and any(members[-1] >= max_rows for _, members in classes):
                break
            decoder.rows = RowCounts((count,))
            results = [probe.run(count, thorough=thorough) for probe in probes]
            signature = [result for result in results if result is not None]
            if len(signature) < len(probes):
                continue
            for known, members in classes:
                if all(torch.equal(a, b) for a, b in zip(signature, known, strict=True)):
                    members.append(count)
                    break
            else:
                classes.append((signature, [count]))
    finally:
        decoder.rows = rows_before
    return [RowCounts(tuple(members)) for _, members in classes if members[-1] >= max_rows]


def certify_at_length(
    decoder: LayeredDecoder, *, batch_size: int, max_rows: int, live_length: int, progress: Progress = silent
) -> list[RowCounts]:
    """`certify` at length: first, middle and last layer, every alignment, every block edge up to `live_length`.

    Returns:
        The classes that hold everywhere: intersections of what each place certified, the cheapest first.
    """
    middle = decoder.num_layers // 2
    places = [
        (layer, begin)
        for layer in sorted({0, middle, decoder.num_layers - 1})
        for begin in range(BLOCK - 6, max(live_length, BLOCK), BLOCK)
    ]
    agreed: list[set[int]] | None = None
    for done, (layer, begin) in enumerate(places):
        progress("certifying row counts", done, len(places))
        found = certify(
            decoder, batch_size=batch_size, max_rows=max_rows, layers=[layer], begins=[begin], thorough=True
        )
        sets = [set(rows.counts) for rows in found]
        agreed = sets if agreed is None else [a & b for a in agreed for b in sets]
    progress("certifying row counts", len(places), len(places))
    kept = [RowCounts(tuple(sorted(counts))) for counts in agreed or [] if counts and max(counts) >= max_rows]
    return sorted(kept, key=lambda rows: rows.counts)


def tried_counts(max_rows: int) -> list[int]:
    """Return 1..max_rows, then (needed where no class reaches so far) multiples of 4 to the next multiple of 8."""
    largest = -(-max_rows // 8) * 8
    return [count for count in range(1, largest + 1) if count <= max_rows or count % 4 == 0]


ROW_STAGGER = 40
"""Slots by which the rows of a probe's batch differ in length."""


class TextProbe:
    """A fixed text of `max_rows` positions from about `begin` on, after fixed random keys and values of one layer."""

    def __init__(self, decoder: LayeredDecoder, batch_size: int, max_rows: int, layer: int, begin: int) -> None:
        self.decoder, self.layer = decoder, layer
        # Rows of a batch have lengths of their own.
        self.begins = (begin - ROW_STAGGER * torch.arange(batch_size, device=decoder.device)).clamp_min(0)
        family = decoder.family
        generator = torch.Generator().manual_seed(begin * 1009 + layer)
        tokens = torch.randint(family.vocab_size, (batch_size, max_rows), generator=generator)
        self.hidden = decoder.embed(tokens.to(decoder.device))
        query = torch.randn(batch_size, max_rows, family.num_heads, family.head_size, generator=generator)
        self.query = query.to(decoder.device)
        self.cache = decoder.new_cache(batch_size, begin + max_rows)
        shape = (batch_size, begin, family.num_kv_heads, family.head_size)
        keys, values = (torch.randn(shape, generator=generator).to(decoder.device) for _ in range(2))
        slots = torch.arange(batch_size)[:, None] * self.cache.capacity + torch.arange(begin)
        self.cache.write(layer, slots.flatten().to(decoder.device), keys, values)

    def run(self, count: int, *, thorough: bool) -> Tensor | None:
        """Return outputs [B, max_rows, ...] if calls of `count` rows agree at every row index, else None.

        One real row a call is plain decoding; `count` real rows is verification, at several alignments of the text.
        """
        expected = self._pass(first=1, width=1)
        for first in range(1, count + 1) if thorough else sorted({1, count}):
            if not torch.equal(self._pass(first=first, width=count), expected):
                return None
        return expected

    def _pass(self, *, first: int, width: int) -> Tensor:
        """Run the text in calls of `width` real rows, `first` in the first call."""
        results, start, stop = [], 0, first
        while start < self.hidden.shape[1]:
            stop = min(stop, self.hidden.shape[1])
            offsets = torch.arange(start, stop, device=self.hidden.device)
            results.append(self._call(self.begins[:, None] + offsets, start, stop))
            start, stop = stop, stop + width
        return torch.cat(results, 1)

    def _call(self, positions: Tensor, start: int, stop: int) -> Tensor:
        raise NotImplementedError


class LayerProbe(TextProbe):
    """The whole layer. In low precision its rounding can hide a difference, so it is not the only probe."""

    def _call(self, positions: Tensor, start: int, stop: int) -> Tensor:
        hidden = self.hidden[:, start:stop]
        return self.decoder.run_layers(hidden, positions, self.cache, self.layer, self.layer + 1)


class AttentionProbe(TextProbe):
    """Attention alone, in fp32: before the rounding that hides most differences and lets a few through."""

    def _call(self, positions: Tensor, start: int, stop: int) -> Tensor:
        query, num_rows = self.query[:, start:stop], stop - start
        padded = self.decoder.rows.padded(num_rows)
        step = self.decoder.step(repeat_last(positions, padded), num_rows, self.cache, self.layer, self.layer + 1)
        window = self.decoder.family.windows[self.layer]
        return step.attend(self.layer, repeat_last(query, padded), 1.0, window, torch.float32)[:, :num_rows]


class ProductProbe:
    """One linear product on `max_rows` fixed rows per sequence."""

    def __init__(
        self, decoder: LayeredDecoder, batch_size: int, max_rows: int, weight: Tensor, bias: Tensor | None
    ) -> None:
        self.weight, self.bias, self.mode = weight, bias, decoder.mode(1, many_rows=False)
        generator = torch.Generator().manual_seed(weight.shape[0])
        inputs = torch.randn(batch_size, max_rows, weight.shape[1], generator=generator)
        self.inputs = inputs.to(decoder.device, decoder.dtype)

    def run(self, count: int, *, thorough: bool) -> Tensor | None:
        """Return outputs [B, max_rows, N] if calls of `count` rows agree at every row index, else None."""
        num_rows = self.inputs.shape[1]
        results: list[Tensor | None] = [None] * num_rows
        # Calls that start one position apart compare every row index with its neighbour; the others fill the result.
        firsts = range(num_rows) if thorough else sorted({0, 1, *range(0, num_rows, count)})
        for first in firsts:
            order = [(first + index) % num_rows for index in range(count)]
            outputs = few_row_linear(self.inputs[:, order], self.weight, self.bias, mode=self.mode)
            for index, position in enumerate(order):
                known = results[position]
                if known is None:
                    results[position] = outputs[:, index]
                elif not torch.equal(known, outputs[:, index]):
                    return None
        return torch.stack([row for row in results if row is not None], 1)


def repeat_last(tensor: Tensor, rows: int) -> Tensor:
    """Pad [B, T, ...] to `rows` rows by repeating the last one."""
    if tensor.shape[1] == rows:
        return tensor
    last = tensor[:, -1:].expand(-1, rows - tensor.shape[1], *tensor.shape[2:])
    return torch.cat((tensor, last), 1)
