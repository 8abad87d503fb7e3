"""Parts: which row counts give equal bits on this device, and whether speculation changes a bit of any text."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from synthetic_weights import scale_late  # type: ignore[import-not-found]  # beside gpu_check.py, which runs this

from selfspec_tune.config import MAX_DRAFT_TOKENS
from selfspec_tune.decode.drafters import Drafter
from selfspec_tune.decode.drafters.layer_skip import LayerSkipDrafter
from selfspec_tune.decode.engine import Engine
from selfspec_tune.decode.policy import DraftPolicy
from selfspec_tune.decode.requests import Request
from selfspec_tune.decode.sampling import GREEDY
from selfspec_tune.model.rows import certify
from selfspec_tune.regress.lossless import Lossless, find_difference
from selfspec_tune.regress.oracle import OracleDrafter, in_turn

from .part import Bench, Result

LATE_SCALE = 0.05
"""s of the texts compared: about 0.85 of the layer-skip draft stands, so long and short rounds mix."""
STAGGER = 13
"""Tokens by which the prompts of a batch differ in length."""


@torch.inference_mode()
def check_rows(bench: Bench, result: Result) -> None:
    """Certify row counts at every batch size that other parts use."""
    classes: dict[str, list[list[int]]] = {}
    result.values["classes"] = classes
    for batch_size in sorted({*bench.sizes.batch_sizes, *bench.sizes.exact_batch_sizes}):
        if result.fits(f"row counts at batch size {batch_size}", 3):
            bench.decoder.exact = True
            found = certify(bench.decoder, batch_size=batch_size, max_rows=MAX_DRAFT_TOKENS + 1)
            classes[str(batch_size)] = [list(rows.counts) for rows in found]
    missing = [size for size in bench.sizes.exact_batch_sizes if not classes.get(str(size))]
    result.aim("batch sizes without a certified class", float(len(missing)))


def check_exactness(bench: Bench, result: Result) -> None:
    """Decode texts plainly, with layer skip, and with an oracle that lets 0..k draft tokens stand in turn."""
    sizes = bench.sizes
    scale_late(bench.decoder.model, sizes.exits[0], LATE_SCALE)
    # Large batches first: they are sooner done, and should time run short, they are not what is missing.
    for batch_size in sorted(sizes.exact_batch_sizes, reverse=True):
        engine = Engine(bench.decoder, batch_size=batch_size, keep_logits=True)
        found = Lossless("exact", sizes.dtype, 0, ["layer-skip", "oracle"], [MAX_DRAFT_TOKENS])
        compared, slowest = 0, 0.0
        while compared < sizes.exact_tokens and result.fits(f"the rest at batch size {batch_size}", slowest):
            before = result.left()
            tokens = min(sizes.text_tokens, -(-(sizes.exact_tokens - compared) // batch_size))
            requests = [
                Request(str(row), bench.random_tokens(20 + STAGGER * row, seed=compared + row), tokens)
                for row in range(batch_size)
            ]
            compare(engine, requests, sizes.exits[0], found)
            found.prompts += batch_size
            compared += tokens * batch_size
            slowest = max(slowest, before - result.left())
            result.values[f"batch size {batch_size}"] = {**found.to_dict(), "compared_tokens": compared}
        whole = compared >= sizes.exact_tokens
        wrong = float(found.differing_tokens + (not found.bitwise_logits))
        result.aim(f"differences in {compared} tokens, batch size {batch_size}", wrong if whole or wrong else None)


def compare(engine: Engine, requests: Sequence[Request], exit_layer: int, found: Lossless) -> None:
    """Count how the texts of one batch differ from plain decoding, by drafter."""
    plain, _ = engine.generate(list(requests), GREEDY)
    truth = [request.prompt_ids + text.token_ids for request, text in zip(requests, plain, strict=True)]
    decoder = engine.decoder
    drafters: dict[str, Drafter] = {
        "layer-skip": LayerSkipDrafter(decoder, exit_layer),
        "oracle": OracleDrafter(decoder, truth, in_turn, exit_layer),
    }
    for label, drafter in drafters.items():
        policy = DraftPolicy(MAX_DRAFT_TOKENS)
        speculative, stats = engine.generate(list(requests), GREEDY, drafter, policy)
        found.drafted += stats.drafted
        found.accepted += stats.accepted
        for ours, theirs in zip(plain, speculative, strict=True):
            found.count(ours, theirs, find_difference(engine, ours, theirs, label, MAX_DRAFT_TOKENS))
