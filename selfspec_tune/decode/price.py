"""What exact numerics cost on this machine: a plain step in exact and in fast numerics, side by side."""

from __future__ import annotations

import statistics
import time

import torch

from selfspec_tune.decode.verify import step_plain
from selfspec_tune.model.decoder import LayeredDecoder
from selfspec_tune.model.rows import ANY_ROWS, RowCounts
from selfspec_tune.progress import Progress, silent


def plain_step_seconds(
    decoder: LayeredDecoder,
    exact_rows: list[RowCounts],
    *,
    batch_size: int = 1,
    context_length: int = 256,
    repeats: int = 15,
    progress: Progress = silent,
) -> dict[str, float]:
    """Return median seconds of one plain step, {"exact": .., "fast": ..}; no "exact" when `exact_rows` is empty.

    The two are timed in turn, so that a busy machine slows both alike.
    """
    kinds = {"exact": exact_rows[0]} if exact_rows else {}
    kinds["fast"] = ANY_ROWS
    cache = decoder.new_cache(batch_size, context_length + 1)
    last = torch.zeros(batch_size, dtype=torch.long, device=decoder.device)
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    rows_before, exact_before = decoder.rows, decoder.exact
    try:
        for repeat in range(repeats + 2):
            for name, rows in kinds.items():
                decoder.rows, decoder.exact = rows, name == "exact"
                cache.committed.fill_(context_length)
                begin = time.perf_counter()
                step_plain(decoder, cache, last).argmax(-1).tolist()
                if repeat >= 2:
                    seconds[name].append(time.perf_counter() - begin)
            progress("timing plain steps", repeat + 1, repeats + 2)
    finally:
        decoder.rows, decoder.exact = rows_before, exact_before
    return {name: statistics.median(values) for name, values in seconds.items()}
