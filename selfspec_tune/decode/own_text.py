"""Token ids of texts, and of what the model itself writes: what a draft will be asked to guess."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from selfspec_tune.decode.engine import Engine
from selfspec_tune.decode.requests import Request
from selfspec_tune.decode.sampling import SamplingParams
from selfspec_tune.progress import Progress, silent


def own_tokens(engine: Engine, requests: Sequence[Request], progress: Progress = silent) -> Iterator[list[int]]:
    """Decode each request plainly and greedily, and yield the tokens it emitted; the prompt's are not among them.

    Args:
        engine: batch size 1.
        requests: prompts; `max_new_tokens` of each bounds what is decoded.

    Raises:
        UserError: a request the engine refuses; all are looked at before the first is decoded.
    """
    for request in requests:
        engine.check(request)
    for done, request in enumerate(requests, start=1):
        [completion], _ = engine.generate([request], SamplingParams())
        yield completion.token_ids
        progress("decoding prompts", done, len(requests))


def text_tokens(tokenizer: Any, texts: Sequence[str], progress: Progress = silent) -> Iterator[list[int]]:
    """Yield the token ids of each text as it is: no special token is added, those written out in it are kept."""
    for done, text in enumerate(texts, start=1):
        yield tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        progress("counting", done, len(texts))
