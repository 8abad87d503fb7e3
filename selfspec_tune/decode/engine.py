"""The decoding loop: prefill, then rounds of draft, verify, accept, commit until every row is finished.

Plain decoding is the round with k = 0, so speculation on and off run the same code. Rows of a batch have their own
lengths; a finished row keeps computing (so that shapes never change) but nothing of it is kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from selfspec_tune.config import MAX_DRAFT_TOKENS
from selfspec_tune.decode.accept import accept_matching, accept_ratio
from selfspec_tune.decode.drafters import Drafter, Source, never
from selfspec_tune.decode.policy import DraftPolicy, Policy
from selfspec_tune.decode.sampling import Noise, SamplingParams, distribution, draw, draw_with_gumbel
from selfspec_tune.decode.stats import Stats
from selfspec_tune.decode.stream import TextStream
from selfspec_tune.decode.verify import step_plain, verify
from selfspec_tune.errors import UserError
from selfspec_tune.model.cache import SharedKVCache
from selfspec_tune.model.decoder import LayeredDecoder
from selfspec_tune.model.rows import ANY_ROWS, RowCounts, certify


@dataclass(frozen=True)
class Request:
    """One prompt to complete."""

    id: str
    prompt_ids: list[int]
    max_new_tokens: int
    stop: tuple[str, ...] = ()


@dataclass
class Completion:
    """What became of a request. `finish_reason`: eos, stop (a stop string) or length."""

    id: str
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    logits: list[Tensor] = field(default_factory=list)
    """With `Engine(keep_logits=True)`: the target's logits [V] each token was chosen from."""


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
    ) -> None:
        self.decoder, self.tokenizer, self.end_tokens = decoder, tokenizer, frozenset(end_tokens)
        self.numerics, self.batch_size = numerics, batch_size
        self.keep_logits, self.after_commit = keep_logits, after_commit
        self.rows = certified_rows(decoder, batch_size) if numerics == "exact" else ANY_ROWS
        self._cache: SharedKVCache | None = None

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
        with torch.inference_mode():
            self.claim_decoder()
            run = _Run(self, requests, params, drafter, policy or DraftPolicy(0), on_text)
            return run.completions, run.decode()

    def cache_for(self, slots: int) -> SharedKVCache:
        """Return the engine's one cache, emptied, with room for `slots` slots per row."""
        if self._cache is None or self._cache.num_layers < self.decoder.stored_layers:
            self._cache = self.decoder.new_cache(self.batch_size, slots)
        self._cache.committed.zero_()
        self._cache.reserve(slots)
        return self._cache

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


class _Run:
    """One call of `Engine.generate`: the state of its rows."""

    def __init__(
        self,
        engine: Engine,
        requests: list[Request],
        params: SamplingParams,
        drafter: Drafter | None,
        policy: Policy,
        on_text: Callable[[int, str], None] | None,
    ) -> None:
        self.engine, self.decoder = engine, engine.decoder
        self.requests, self.params = requests, params
        context = self.decoder.family.max_context
        # The context ends a completion too (finish_reason length).
        self.limits = [min(request.max_new_tokens, context - len(request.prompt_ids)) for request in requests]
        self.drafter, self.policy, self.on_text = drafter, policy, on_text
        self.completions = [Completion(request.id) for request in requests]
        self.noises = [Noise(params, request.id) for request in requests]
        self.streams = [
            TextStream(engine.tokenizer, request.prompt_ids, request.stop) if engine.tokenizer else None
            for request in requests
        ]
        self.last = torch.zeros(engine.batch_size, dtype=torch.long, device=self.decoder.device)
        # Per row, how sure the draft is of all it drafted in this round.
        self.confidence = torch.ones(engine.batch_size, device=self.decoder.device)
        self.stats = Stats(
            drafter=drafter.name if drafter else None,
            exit_layer=drafter.exit_layer if drafter else None,
            num_draft_tokens=policy.k if drafter else 0,
            numerics=engine.numerics,
            enabled=drafter is not None and policy.k > 0,
        )

    def decode(self) -> Stats:
        """Run to the end and return the statistics; `completions` is filled on the way."""
        begin = time.perf_counter()
        cache = self.engine.cache_for(max(len(request.prompt_ids) for request in self.requests))
        for completion, limit in zip(self.completions, self.limits, strict=True):
            if limit == 0:
                completion.finish_reason = "length"
        if self._active():
            self._prefill(cache)
            self._synchronise()
            self.stats.prefill_seconds = time.perf_counter() - begin
        while self._active():
            self._round(cache)
        for row, stream in enumerate(self.streams):
            if stream is not None:
                self._show(row, stream.finish())
                self.completions[row].text = stream.text
        self._synchronise()
        self.stats.total_seconds = time.perf_counter() - begin
        if self.policy.stopped:
            self.stats.enabled = False
            self.stats.reason = "drafting stopped: it emitted fewer tokens than plain decoding would have"
        return self.stats

    def _active(self) -> list[int]:
        return [row for row, completion in enumerate(self.completions) if completion.finish_reason is None]

    def _prefill(self, cache: SharedKVCache) -> None:
        if self.drafter is not None:
            self.drafter.start([request.prompt_ids for request in self.requests])
        for row, request in enumerate(self.requests):
            tokens = torch.tensor([request.prompt_ids], device=self.decoder.device)
            logits = self.decoder.logits(self.decoder.prefill(tokens, cache.row(row)), pad=False)
            if self.completions[row].finish_reason is None:
                chosen = self._choose_one(logits[0, 0], row)
                self.stats.from_prefill += 1
                self._emit(row, [chosen], logits[0])
                self.last[row] = chosen

    def _round(self, cache: SharedKVCache) -> None:
        active = self._active()
        remaining = max(self.limits[row] - len(self.completions[row].token_ids) for row in active)
        sources = self.drafter.sources() if self.drafter else []
        lengths = [len(self.requests[row].prompt_ids) + len(self.completions[row].token_ids) for row in active]
        exit_layer = self.policy.at(max(lengths))
        if self.drafter is not None and exit_layer is not None:
            self.drafter.use_exit(exit_layer)
        planned = self.policy.next(remaining, sources)
        source = planned[0] if planned else None
        self.stats.passes += 1
        begin = time.perf_counter()
        if planned is None:
            logits = step_plain(self.decoder, cache, self.last)
            drafted = self.last.new_zeros(self.engine.batch_size, 0)
            accepted, following = self._accept(drafted, None, logits)
            self._synchronise()
            self.stats.plain_seconds += time.perf_counter() - begin
        else:
            assert self.drafter is not None
            self.confidence.fill_(1.0)
            source, k = planned
            enough = partial(self._enough, source) if self.policy.wants_confidence else never
            draft = self.drafter.propose(self.last, cache, k, self._choose_draft, source, enough)
            self._synchronise()
            middle = time.perf_counter()
            logits = verify(self.decoder, cache, self.last, draft)
            drafted = draft.tokens
            accepted, following = self._accept(drafted, draft.probabilities, logits)
            self._synchronise()
            self.stats.draft_seconds += middle - begin
            self.stats.verify_seconds += time.perf_counter() - middle
        self._commit(cache, active, source, drafted, accepted, following, logits)

    def _commit(
        self,
        cache: SharedKVCache,
        active: list[int],
        source: Source | None,
        drafted: Tensor,
        accepted: Tensor,
        following: Tensor,
        logits: Tensor,
    ) -> None:
        counts, drafts, nexts = accepted.tolist(), drafted.tolist(), following.tolist()
        for row in active:
            count, k = counts[row], drafted.shape[1]
            if source is None:
                self.stats.plain_steps += 1
            else:
                self.stats.count_round(source.drafter, k, count)
                self.policy.observe(source, k, count)
            cache.committed[row] += count + 1
            self.last[row] = nexts[row]
            self._emit(row, [*drafts[row][:count], nexts[row]], logits[row])
            request, completion = self.requests[row], self.completions[row]
            if completion.finish_reason is None:
                # All but the newest token are in the cache.
                assert int(cache.committed[row]) == len(request.prompt_ids) + len(completion.token_ids) - 1
        if self.engine.after_commit is not None:
            self.engine.after_commit(cache)

    def _accept(self, drafted: Tensor, q: Tensor | None, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Test [B, k] draft tokens against the target's logits [B, k + 1, V]; k may be 0."""
        k = drafted.shape[1]
        if self.params.greedy:
            return accept_matching(drafted, logits.argmax(-1))
        target = distribution(logits, self.params)
        if self.params.reproducible:
            chosen = torch.stack([self._draw_shared(target[:, offset], offset) for offset in range(k + 1)], 1)
            return accept_matching(drafted, chosen)
        uniform = self._uniforms(k + 1)
        draft = q if q is not None else torch.nn.functional.one_hot(drafted, target.shape[-1]).float()
        return accept_ratio(drafted, draft, target, uniform[:, :k], uniform[:, k])

    def _enough(self, source: Source) -> bool:
        active = self._active()
        return self.policy.enough(source, float(self.confidence[active].mean()))

    def _choose_draft(self, logits: Tensor, offset: int) -> tuple[Tensor, Tensor | None]:
        if self.params.greedy:
            if self.policy.wants_confidence:
                self.confidence *= (logits.amax(-1) - logits.logsumexp(-1)).exp()
            return logits.argmax(-1), None
        q = distribution(logits, self.params)
        if self.policy.wants_confidence:
            self.confidence *= q.amax(-1)
        if self.params.reproducible:
            return self._draw_shared(q, offset), None
        return draw(q, self._uniforms(1)[:, 0]), q

    def _choose_one(self, logits: Tensor, row: int) -> int:
        """Choose the first token of a row from its prefill logits [V]."""
        if self.params.greedy:
            return int(logits.argmax())
        target = distribution(logits, self.params)
        if self.params.reproducible:
            noise = self.noises[row].gumbel(0, target.shape[-1]).to(target.device)
            return int(draw_with_gumbel(target, noise))
        return int(draw(target, self.noises[row].uniform(1)[0].to(target.device)))

    def _uniforms(self, count: int) -> Tensor:
        rows = [noise.uniform(count) for noise in self.noises]
        rows += [torch.zeros(count, dtype=torch.float64)] * (self.engine.batch_size - len(rows))
        return torch.stack(rows).to(self.decoder.device)

    def _draw_shared(self, probabilities: Tensor, offset: int) -> Tensor:
        """Draw [B] tokens with the noise of each row's next position plus `offset`."""
        size = probabilities.shape[-1]
        noise = [
            self.noises[row].gumbel(len(completion.token_ids) + offset, size)
            for row, completion in enumerate(self.completions)
        ]
        noise += [torch.zeros(size, dtype=torch.float64)] * (self.engine.batch_size - len(noise))
        return draw_with_gumbel(probabilities, torch.stack(noise).to(probabilities.device))

    def _emit(self, row: int, tokens: list[int], logits: Tensor) -> None:
        """Append tokens to a row's completion, cutting where plain decoding would stop."""
        completion, stream = self.completions[row], self.streams[row]
        if self.drafter is not None:
            self.drafter.extend(row, tokens)
        for index, token in enumerate(tokens):
            completion.token_ids.append(token)
            self.stats.emitted += 1
            if self.engine.keep_logits:
                completion.logits.append(logits[index].clone())
            if token in self.engine.end_tokens:
                completion.finish_reason = "eos"
            elif stream is not None:
                stream.push(token)
                if stream.stopped:
                    completion.finish_reason = "stop"
            if completion.finish_reason is None and len(completion.token_ids) >= self.limits[row]:
                completion.finish_reason = "length"
            if completion.finish_reason is not None:
                break
        if stream is not None:
            self._show(row, stream.new_text())

    def _show(self, row: int, text: str) -> None:
        if text and self.on_text is not None:
            self.on_text(row, text)

    def _synchronise(self) -> None:
        if self.decoder.device.type == "cuda":
            torch.cuda.synchronize(self.decoder.device)


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
