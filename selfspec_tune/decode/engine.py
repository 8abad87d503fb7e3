"""The engine: one model, one cache, one arithmetic; requests in, completions out. How they are decoded: `run`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from selfspec_tune.config import MAX_DRAFT_TOKENS
from selfspec_tune.decode.drafters import Drafter
from selfspec_tune.decode.graphs import on_device
from selfspec_tune.decode.policy import DraftPolicy, Policy
from selfspec_tune.decode.requests import Completion, Request
from selfspec_tune.decode.rounds import Rounds
from selfspec_tune.decode.run import Run
from selfspec_tune.decode.sampling import SamplingParams
from selfspec_tune.decode.stats import Stats
from selfspec_tune.errors import UserError
from selfspec_tune.model.cache import SharedKVCache
from selfspec_tune.model.decoder import LayeredDecoder
from selfspec_tune.model.rows import ANY_ROWS, RowCounts, certify


class Engine:
    """Decode requests with one model, speculatively when given a drafter.

    Args:
        decoder: the model. Its row counts and attention are set for `numerics`.
        tokenizer: for text and stop strings; None works on token ids alone (no stop strings).
        end_tokens: token ids that end a completion; the token is part of `token_ids`, not of the text.
        numerics: exact or fast.
        batch_size: rows B; fewer requests than rows leave rows idle.
        keep_logits: keep the target's logits of every emitted token (memory: V floats each).
        after_commit: called with the cache after every commit (tests poison stale slots here).
        ahead: launch a round before the one before it is read, where the drafter does not need to know the text;
            None: on CUDA. What is launched beyond a completion's end is dropped, so the text is the same.
        record: record rounds as CUDA graphs, where there is a GPU.

    Raises:
        UserError: no row count can be certified for exact numerics.
    """

    def __init__(
        self,
        decoder: LayeredDecoder,
        tokenizer: Any = None,
        *,
        end_tokens: tuple[int, ...] = (),
        numerics: str = "exact",
        batch_size: int = 1,
        keep_logits: bool = False,
        after_commit: Callable[[SharedKVCache], None] | None = None,
        ahead: bool | None = None,
        record: bool = True,
    ) -> None:
        self.decoder, self.tokenizer, self.end_tokens = decoder, tokenizer, frozenset(end_tokens)
        self.numerics, self.batch_size = numerics, batch_size
        self.keep_logits, self.after_commit = keep_logits, after_commit
        self.rows = certified_rows(decoder, batch_size) if numerics == "exact" else ANY_ROWS
        self.record = record
        self.ahead = decoder.device.type == "cuda" if ahead is None else ahead
        self._cache: SharedKVCache | None = None
        self._rounds: Rounds | None = None

    def generate(
        self,
        requests: list[Request],
        params: SamplingParams,
        drafter: Drafter | None = None,
        policy: Policy | None = None,
        *,
        on_text: Callable[[int, str], None] | None = None,
    ) -> tuple[list[Completion], Stats]:
        """Complete up to `batch_size` requests together.

        Args:
            requests: at most `batch_size`.
            params: greedy or sampling; the same for all rows.
            drafter: None decodes plainly.
            policy: how many tokens to draft; default: no drafting.
            on_text: called with (row, new text) after every round.
        """
        if not 1 <= len(requests) <= self.batch_size:
            raise UserError("wrong number of requests for this batch size", got=len(requests), allowed=self.batch_size)
        for request in requests:
            self.check(request)
        with torch.inference_mode(), on_device(self.decoder.device):
            self.claim_decoder()
            run = Run(self, requests, params, drafter, policy or DraftPolicy(0), on_text)
            return run.completions, run.decode()

    def cache_for(self, slots: int) -> SharedKVCache:
        """Return the engine's one cache, emptied, with room for `slots` slots per row."""
        if self._cache is None or self._cache.num_layers < self.decoder.stored_layers:
            self._cache = self.decoder.new_cache(self.batch_size, slots)
        self._cache.committed.zero_()
        self._cache.reserve(slots)
        self._cache.expected = None
        return self._cache

    def rounds_for(self, slots: int, params: SamplingParams) -> Rounds:
        """Return rounds on the engine's cache, emptied, with room for `slots` slots per row.

        They are those of the call before, with what was recorded, while parameters and the cache's memory are the same.
        """
        cache, known = self.cache_for(slots), self._rounds
        if known is None or not known.serve(cache, params):
            self._rounds = known = Rounds(self.decoder, cache, params, record=self.record)
        return known

    def ready(self, texts: list[list[int]], drafter: Drafter) -> tuple[SharedKVCache, Tensor]:
        """Return the cache and last tokens [B] as if `texts` were decoded, and the drafter started, to time it.

        The cache's contents are whatever they are.
        """
        self.claim_decoder()
        drafter.start(texts)
        cache = self.cache_for(len(texts[0]) + 2 * MAX_DRAFT_TOKENS)
        return cache, torch.tensor([text[-1] for text in texts], device=self.decoder.device)

    def claim_decoder(self) -> None:
        """Set the decoder to this engine's numerics; a drafter that has a tap sets it when it starts."""
        self.decoder.rows, self.decoder.exact, self.decoder.tap = self.rows, self.numerics == "exact", None

    def check(self, request: Request) -> None:
        """Raise a UserError if a request cannot be decoded: an empty prompt, or one longer than the context."""
        length, limit = len(request.prompt_ids), self.decoder.family.max_context
        if length == 0:
            raise UserError("the prompt is empty", got=f"request {request.id}", allowed="at least one token")
        if length >= limit:
            raise UserError(
                "the prompt is longer than the model's context",
                got=f"{length} tokens (request {request.id})",
                allowed=f"at most {limit - 1}, so that one token can follow",
                command="a shorter prompt",
            )
        if request.max_new_tokens < 0:
            raise UserError("max_new_tokens must not be negative", got=request.max_new_tokens, allowed="0 or more")
        if request.stop and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer")


def certified_rows(decoder: LayeredDecoder, batch_size: int) -> RowCounts:
    """Return the cheapest class of row counts certified for every call there can be, whatever k is in use.

    Raises:
        UserError: nothing can be certified on this machine.
    """
    decoder.exact = True
    with torch.inference_mode():
        classes = certify(decoder, batch_size=batch_size, max_rows=MAX_DRAFT_TOKENS + 1)
    if not classes:
        raise UserError(
            "exact numerics cannot be certified for this model, dtype, device and batch size",
            got=f"{decoder.dtype}, {decoder.device}, batch size {batch_size}",
            command="selfspec check MODEL, or --numerics fast",
        )
    return classes[0]
