"""What a draft step, a verification and a round's overhead cost, in plain decoding steps. Knows no acceptance.

All layers of a model have the same shape, so the time of a pass over m of them grows linearly with m. Per row count two
passes are timed, over one layer and over all L, besides the embedding and the head; every c(E) and v(E, k) is composed
from these, and the same composition of a plain step is held against the plain step measured as a whole. Pieces are
timed in turn, repeat by repeat, so that a busy machine slows all of them alike; figures are medians.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median, quantiles

import torch
from torch import Tensor

from selfspec_tune.decode.accept import accept_matching, accept_ratio
from selfspec_tune.decode.drafters.layer_skip import LayerSkipDrafter
from selfspec_tune.decode.engine import Engine, Request, certified_rows
from selfspec_tune.decode.policy import DraftPolicy
from selfspec_tune.decode.price import plain_step_seconds
from selfspec_tune.decode.sampling import SamplingParams, distribution, draw
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
    overhead_request: Request | None = None,
    progress: Progress = silent,
) -> Costs:
    """Time the pieces in the engine's numerics at `context_length` live cache slots.

    Args:
        engine: batch size 1.
        params: how tokens are chosen; sampling makes the heads dearer.
        context_length: the model's context must hold `max_draft_tokens` + 1 more.
        overhead_request: a prompt decoded to time the engine's bookkeeping; None takes it as 0.
    """
    decoder, rows = engine.decoder, engine.rows
    before = decoder.rows, decoder.exact
    decoder.rows, decoder.exact = rows, engine.numerics == "exact"
    try:
        bench = Bench(decoder, params, context_length, max_draft_tokens)
        seconds, spread = repeat_in_turn(bench.pieces(), repeats, progress)
        price = exact_price(engine, context_length=context_length, repeats=repeats, progress=progress)
    finally:
        decoder.rows, decoder.exact = before
    counts = range(1, max_draft_tokens + 2)
    plain, overhead = seconds["plain"], 0.0
    if overhead_request is not None:
        overhead = bookkeeping_seconds(engine, params, overhead_request, max_draft_tokens, plain)
    return Costs(
        num_layers=decoder.num_layers,
        plain=plain,
        one_layer={r: seconds[f"one layer, {rows.padded(r)} rows"] for r in counts},
        all_layers={r: seconds[f"all layers, {rows.padded(r)} rows"] for r in counts},
        embed=seconds["embed"],
        draft_head=seconds["draft head"],
        verify_heads={r: seconds[f"verify head, {r} rows"] for r in counts},
        overhead=overhead,
        exact_over_fast=price,
        spread=spread,
    )


class Bench:
    """The pieces of decoding as functions without arguments, on a cache of `context_length` live slots."""

    def __init__(
        self, decoder: LayeredDecoder, params: SamplingParams, context_length: int, max_draft_tokens: int
    ) -> None:
        self.decoder, self.params = decoder, params
        self.counts = range(1, max_draft_tokens + 2)
        self.cache = decoder.new_cache(1, context_length + max_draft_tokens + 1)
        self.cache.committed += context_length
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(decoder.family.vocab_size, (1, max_draft_tokens + 1), generator=generator)
        self.tokens = tokens.to(decoder.device)
        self.positions = context_length + torch.arange(max_draft_tokens + 1, device=decoder.device)[None]
        self.hidden = decoder.embed(self.tokens)
        self.uniform = torch.rand(1, max_draft_tokens + 1, generator=generator).to(decoder.device)
        # Any draft will do: acceptance costs the same whatever it accepts.
        self.draft = torch.full((1, max_draft_tokens, decoder.family.vocab_size), 1.0, device=decoder.device)

    def pieces(self) -> dict[str, Callable[[], object]]:
        """Return name → piece. Passes of the same padded row count are one piece."""
        pieces: dict[str, Callable[[], object]] = {
            "plain": self.plain_step,
            "embed": partial(self.decoder.embed, self.tokens[:, :1]),
            "draft head": self.draft_head,
        }
        for rows in self.counts:
            padded = self.decoder.rows.padded(rows)
            pieces.setdefault(f"one layer, {padded} rows", partial(self.run_layers, rows, 1))
            pieces.setdefault(f"all layers, {padded} rows", partial(self.run_layers, rows, self.decoder.num_layers))
            pieces[f"verify head, {rows} rows"] = partial(self.verify_head, rows)
        return pieces

    def plain_step(self) -> None:
        """One step of plain decoding up to the token on the host."""
        self._accept(step_plain(self.decoder, self.cache, self.tokens[:, 0]))

    def run_layers(self, rows: int, count: int) -> Tensor:
        """One pass of `rows` rows over the first `count` layers."""
        return self.decoder.run_layers(self.hidden[:, :rows], self.positions[:, :rows], self.cache, 0, count)

    def draft_head(self) -> Tensor:
        """Norm, head and choice of one draft token."""
        logits = self.decoder.logits(self.hidden[:, :1])[:, 0]
        if self.params.greedy:
            return logits.argmax(-1)
        return draw(distribution(logits, self.params), self.uniform[:, 0])

    def verify_head(self, rows: int) -> None:
        """Norm, head and acceptance of `rows` − 1 draft tokens."""
        self._accept(self.decoder.logits(self.hidden[:, :rows]))

    def _accept(self, logits: Tensor) -> None:
        """Accept any draft of as many tokens as fit [1, k + 1, V] logits, up to the result on the host."""
        k = logits.shape[1] - 1
        drafted = self.tokens[:, :k]
        if self.params.greedy:
            results = accept_matching(drafted, logits.argmax(-1))
        else:
            target = distribution(logits, self.params)
            results = accept_ratio(drafted, self.draft[:, :k], target, self.uniform[:, :k], self.uniform[:, k])
        for result in results:
            result.tolist()


def repeat_in_turn(
    pieces: Mapping[str, Callable[[], object]], repeats: int, progress: Progress = silent
) -> tuple[dict[str, float], dict[str, float]]:
    """Run all pieces in turn, `repeats` times after a warm-up; return their median seconds and relative spread."""
    kept = sample_in_turn(pieces, repeats, progress)
    return {name: median(values) for name, values in kept.items()}, {name: spread(v) for name, v in kept.items()}


def sample_in_turn(
    pieces: Mapping[str, Callable[[], object]], repeats: int, progress: Progress = silent
) -> dict[str, list[float]]:
    """Run all pieces in turn, `repeats` times after a warm-up; return their seconds."""
    samples: dict[str, list[float]] = {name: [] for name in pieces}
    total = WARM_UP + repeats
    for repeat in range(total):
        progress("measure costs", repeat, total)
        for name, piece in pieces.items():
            _synchronise()
            begin = time.perf_counter()
            piece()
            _synchronise()
            samples[name].append(time.perf_counter() - begin)
    progress("measure costs", total, total)
    return {name: values[WARM_UP:] for name, values in samples.items()}


def spread(values: list[float]) -> float:
    """Return the interquartile range over the median; 0 for fewer than two values."""
    if len(values) < 2:
        return 0.0
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return (high - low) / middle


def bookkeeping_seconds(
    engine: Engine, params: SamplingParams, request: Request, k: int, plain_seconds: float
) -> float:
    """Return the engine's seconds per round outside prefill, draft and verification, from decoding one request."""
    exit_layer = max(1, engine.decoder.num_layers // 3)
    _, stats = engine.generate([request], params, LayerSkipDrafter(engine.decoder, exit_layer), DraftPolicy(k))
    # At most the last token is emitted by a plain step, which the statistics do not time apart.
    plain_steps = max(0, stats.emitted - 1 - stats.accepted - stats.rounds)
    rest = stats.total_seconds - stats.prefill_seconds - stats.draft_seconds - stats.verify_seconds
    return max(0.0, rest - plain_steps * plain_seconds) / max(1, stats.rounds)


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
    seconds = plain_step_seconds(decoder, [rows], context_length=context_length, repeats=repeats, progress=progress)
    return seconds["exact"] / seconds["fast"]


def _synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
