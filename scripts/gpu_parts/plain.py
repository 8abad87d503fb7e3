"""Parts: the device's copy bandwidth, and plain decoding against the roofline it gives and against transformers.

The roofline of a plain step is the time to read every weight and the live keys and values once, at the bandwidth of a
copy measured here (bytes read and written), not at the one on a data sheet.
"""

from __future__ import annotations

import inspect
import time
from typing import Any

import torch
from bench_plain import (  # type: ignore[import-not-found]  # beside gpu_check.py, which runs this
    OURS,
    THEIRS,
    Measure,
    alternate,
    measure_engine,
    measure_generate,
    summarise,
)

from selfspec_tune.decode.engine import Engine
from selfspec_tune.decode.graphs import synchronise
from selfspec_tune.decode.requests import Request

from .part import Bench, Result

COMPILED = "compiled static cache"
LEAST_OF_ROOFLINE = 0.85
TURNS = 3
"""Times each contender decodes the text."""


def check_copy(bench: Bench, result: Result) -> None:
    """Measure the bandwidth of a copy on the device."""
    result.values |= {"bytes": bench.sizes.copy_bytes, "gigabytes_per_second": bench.bandwidth / 1e9}


def check_plain(bench: Bench, result: Result) -> None:
    """Time plain decoding at batch size 1 in turn with transformers' `generate`, then a compiled loop of its model."""
    sizes, decoder = bench.sizes, bench.decoder
    request = Request("0", bench.random_tokens(sizes.context), sizes.timed_tokens)
    measures = {name: measure_engine(Engine(decoder, numerics=name)) for name in OURS}
    times = alternate({**measures, THEIRS: measure_generate(decoder.model)}, [request], TURNS)
    found = summarise(times)
    seconds = {name: value / 1000 for name, value in found["milliseconds_per_token"].items()}
    roofline = bench.bandwidth / bench.step_bytes(sizes.context + sizes.timed_tokens / 2)
    result.values |= {
        "context_length": sizes.context,
        "step_bytes": bench.step_bytes(sizes.context + sizes.timed_tokens / 2),
        "roofline_tokens_per_second": roofline,
        "tokens_per_second": {name: 1 / value for name, value in seconds.items()},
        "of_roofline": {name: 1 / value / roofline for name, value in seconds.items()},
        "generate_over_ours": found["generate_over_ours"],
    }
    result.aim(
        "exact plain decoding, share of the roofline", 1 / seconds["exact"] / roofline, at_least=LEAST_OF_ROOFLINE
    )
    if not result.fits(COMPILED, 5):
        return
    slots = sizes.context + sizes.timed_tokens
    try:
        [measured] = alternate({COMPILED: measure_compiled(decoder.model, slots)}, [request], 1)[COMPILED]
    except Exception as error:  # a compiler that is missing or refuses the model takes nothing from the figures above
        result.skip(COMPILED, f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
        return
    finally:
        torch.compiler.reset()  # what was recorded holds memory
    result.values["tokens_per_second"][COMPILED] = 1 / measured
    result.values["of_roofline"][COMPILED] = 1 / measured / roofline


def measure_compiled(model: Any, slots: int) -> Measure:
    """Time a loop over transformers' own model, compiled, with a static cache of so many slots; prefill is left out.

    On a CPU nothing but the tracer runs ("eager"): the loop is what is tried there.
    """
    from transformers import StaticCache

    kind: dict[str, Any] = {"mode": "reduce-overhead"} if model.device.type == "cuda" else {"backend": "eager"}
    compiled = torch.compile(model, fullgraph=True, **kind)
    cache_name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    # One cache for all texts: what was compiled and recorded holds its addresses.
    cache = StaticCache(config=model.config, max_cache_len=slots)

    @torch.no_grad()
    def measure(request: Request) -> float:
        length, count = len(request.prompt_ids), request.max_new_tokens
        cache.reset()
        prompt = torch.tensor([request.prompt_ids], device=model.device)
        token = model(prompt, use_cache=True, **{cache_name: cache}).logits[:, -1:].argmax(-1)
        position = torch.full_like(token, length)
        synchronise(model.device)
        begin = time.perf_counter()
        for _ in range(count):
            torch.compiler.cudagraph_mark_step_begin()
            logits = compiled(token, position_ids=position, use_cache=True, **{cache_name: cache}).logits
            token, position = logits.argmax(-1), position + 1
        synchronise(model.device)
        return (time.perf_counter() - begin) / count

    return measure
