"""What a draft step, a verification and a round's overhead cost, in plain decoding steps. Knows no acceptance.

All layers of a model have the same shape, so the time of a pass over m of them grows linearly with m. Per row count two
passes are timed, over one layer and over all L, besides the embedding and the head; every c(E) and v(E, k) is composed
from these, and the same composition of a plain step is held against the plain step measured as a whole. Pieces are
timed in turn, repeat by repeat, so that a busy machine slows all of them alike; figures are medians.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from selfspec_tune.decode.drafters.layer_skip import LayerSkipDrafter
from selfspec_tune.decode.engine import Engine, certified_rows
from selfspec_tune.decode.graphs import on_device, recordings
from selfspec_tune.decode.policy import DraftPolicy
from selfspec_tune.decode.price import accept_any, plain_step_seconds
from selfspec_tune.decode.requests import Request
from selfspec_tune.decode.sampling import SamplingParams, distribution, draw
from selfspec_tune.decode.stats import Stats
from selfspec_tune.decode.verify import step_plain
from selfspec_tune.errors import UserError
from selfspec_tune.model.decoder import LayeredDecoder
from selfspec_tune.progress import Progress, silent
from selfspec_tune.sweep.objective import Costs

WARM_UP = 2
"""Repeats thrown away."""


@torch.inference_mode()
def measure_costs(
    engine: Engine,
    params: SamplingParams,
    *,
    max_draft_tokens: int,
    context_length: int,
    repeats: int,
    overheads: tuple[float, float] = (0.0, 0.0),
    progress: Progress = silent,
) -> Costs:
    """Time the pieces in the engine's numerics and batch size at `context_length` live cache slots.

    Args:
        params: how tokens are chosen; sampling makes the heads dearer.
        context_length: the model's context must hold `max_draft_tokens` + 1 more.
        overheads: the engine's seconds per round and per plain step besides, from `bookkeeping_seconds`.
    """
    decoder, rows = engine.decoder, engine.rows
    before = decoder.rows, decoder.exact
    decoder.rows, decoder.exact = rows, engine.numerics == "exact"
    where = f"{context_length} tokens" + (f", batch {engine.batch_size}" if engine.batch_size > 1 else "")
    try:
        bench = Bench(decoder, params, context_length, max_draft_tokens, engine.batch_size)
        with on_device(decoder.device):
            samples = sample_in_turn(bench.pieces(), repeats, progress, f"measure costs at {where}")
        price = exact_price(engine, context_length=context_length, repeats=repeats, progress=progress)
    finally:
        decoder.rows, decoder.exact = before
    return Costs.of_samples(
        samples,
        {
            r: (f"one layer, {rows.padded(r)} rows", f"all layers, {rows.padded(r)} rows", f"verify head, {r} rows")
            for r in range(1, max_draft_tokens + 2)
        },
        num_layers=decoder.num_layers,
        overhead=overheads[0],
        plain_overhead=overheads[1],
        exact_over_fast=price,
        context_length=context_length,
        batch_size=engine.batch_size,
    )


class Bench:
    """The pieces of decoding as functions without arguments, on a cache of `context_length` live slots."""

    def __init__(
        self,
        decoder: LayeredDecoder,
        params: SamplingParams,
        context_length: int,
        max_draft_tokens: int,
        batch_size: int = 1,
    ) -> None:
        self.decoder, self.params = decoder, params
        self.counts = range(1, max_draft_tokens + 2)
        self.cache = decoder.new_cache(batch_size, context_length + max_draft_tokens + 1)
        self.cache.committed += context_length
        self.cache.expected = self.cache.capacity
        self._recorded = recordings(decoder)
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(decoder.family.vocab_size, (batch_size, max_draft_tokens + 1), generator=generator)
        self.tokens = tokens.to(decoder.device)
        positions = context_length + torch.arange(max_draft_tokens + 1, device=decoder.device)
        self.positions = positions.repeat(batch_size, 1)
        self.hidden = decoder.embed(self.tokens)
        self.uniform = torch.rand(batch_size, max_draft_tokens + 1, generator=generator).to(decoder.device)
        # Any draft will do: acceptance costs the same whatever it accepts.
        self.draft = torch.ones(1, 1, 1, device=decoder.device).expand(
            batch_size, max_draft_tokens, decoder.family.vocab_size
        )

    def pieces(self) -> dict[str, Callable[[], object]]:
        """Return name → piece. Passes of the same padded row count are one piece.

        A plain step and a verification end with reading their result, so they wait for the device even if the clock
        does not. In this order such a clock gives a plain step's layers to later pieces, and the sum of its own shows
        it; were they timed just before the verification of one row, that would be given them, and the sum look right.
        """
        pieces: dict[str, Callable[[], Any]] = {"plain": self.plain_step}
        read = {"plain", *(f"verify head, {rows} rows" for rows in self.counts)}
        for rows in self.counts:
            padded = self.decoder.rows.padded(rows)
            pieces[f"verify head, {rows} rows"] = partial(self.verify_head, rows)
            pieces.setdefault(f"one layer, {padded} rows", partial(self.run_layers, rows, 1))
            pieces.setdefault(f"all layers, {padded} rows", partial(self.run_layers, rows, self.decoder.num_layers))
        pieces["embed"] = partial(self.decoder.embed, self.tokens[:, :1])
        pieces["draft head"] = self.draft_head
        # On a GPU as decoding runs them: recorded.
        recorded = {name: partial(self._recorded.run, name, piece) for name, piece in pieces.items()}
        return {name: partial(_read, piece) if name in read else piece for name, piece in recorded.items()}

    def plain_step(self) -> tuple[Tensor, Tensor]:
        """One step of plain decoding."""
        return self._accept(step_plain(self.decoder, self.cache, self.tokens[:, 0]))

    def run_layers(self, rows: int, count: int) -> Tensor:
        """One pass of `rows` rows over the first `count` layers."""
        return self.decoder.run_layers(self.hidden[:, :rows], self.positions[:, :rows], self.cache, 0, count)

    def draft_head(self) -> Tensor:
        """Norm, head and choice of one draft token."""
        logits = self.decoder.logits(self.hidden[:, :1])[:, 0]
        if self.params.greedy:
            return logits.argmax(-1)
        return draw(distribution(logits, self.params), self.uniform[:, 0])

    def verify_head(self, rows: int) -> tuple[Tensor, Tensor]:
        """Norm, head and acceptance of `rows` − 1 draft tokens."""
        return self._accept(self.decoder.logits(self.hidden[:, :rows]))

    def _accept(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Accept any draft of as many tokens as fit [1, k + 1, V] logits."""
        k = logits.shape[1] - 1
        return accept_any(logits, self.tokens[:, :k], self.draft[:, :k], self.params)


def _read(piece: Callable[[], tuple[Tensor, Tensor]]) -> None:
    """Run a piece up to its result on the host."""
    for result in piece():
        result.tolist()


def sample_in_turn(
    pieces: Mapping[str, Callable[[], object]], repeats: int, progress: Progress = silent, stage: str = "measure costs"
) -> dict[str, list[float]]:
    """Run all pieces in turn, `repeats` times after a warm-up; return their seconds, the device waited for."""
    samples: dict[str, list[float]] = {name: [] for name in pieces}
    total = WARM_UP + repeats
    for repeat in range(total):
        progress(stage, repeat, total)
        for name, piece in pieces.items():
            synchronise()
            begin = time.perf_counter()
            piece()
            synchronise()
            samples[name].append(time.perf_counter() - begin)
    progress(stage, total, total)
    return {name: values[WARM_UP:] for name, values in samples.items()}


def bookkeeping_seconds(engine: Engine, params: SamplingParams, request: Request, k: int) -> tuple[float, float]:
    """Return the engine's seconds per round, and per plain step, outside prefill, draft, verification and plain passes.

    Measured by decoding one request (in a batch, as many like it) with rounds, and plainly.
    """
    requests = [replace(request, id=f"{request.id}-{row}") for row in range(engine.batch_size)]
    drafter = LayerSkipDrafter(engine.decoder, max(1, engine.decoder.num_layers // 3))
    _, rounds = engine.generate(requests, params, drafter, DraftPolicy(k))
    _, plain = engine.generate(requests, params)
    return _rest(rounds), _rest(plain)


def _rest(stats: Stats) -> float:
    inside = stats.prefill_seconds + stats.draft_seconds + stats.verify_seconds + stats.plain_seconds
    return max(0.0, stats.total_seconds - inside) / max(1, stats.passes)


def exact_price(engine: Engine, *, context_length: int, repeats: int, progress: Progress = silent) -> float | None:
    """Return the time of a plain step in exact numerics over one in fast; None where exact cannot be certified."""
    decoder, rows = engine.decoder, engine.rows
    if engine.numerics == "fast":
        decoder.exact = True
        try:
            rows = certified_rows(decoder, engine.batch_size)
        except UserError:
            return None
        finally:
            decoder.exact = False
    seconds = plain_step_seconds(
        decoder,
        [rows],
        batch_size=engine.batch_size,
        context_length=context_length,
        repeats=repeats,
        progress=progress,
    )
    return seconds["exact"] / seconds["fast"]


def synchronise() -> None:
    """Wait until the device has done what it was given: a clock read before that measures how fast work is queued."""
    for index in range(torch.cuda.device_count()):
        torch.cuda.synchronize(index)
