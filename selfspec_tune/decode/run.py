"""The decoding loop: prefill, then rounds of draft, verify, accept, commit until every row is finished.

Plain decoding is the round with k = 0, so speculation on and off run the same code. Rows of a batch have their own
lengths; a finished row keeps computing (so that shapes never change) but nothing of it is kept. The device commits; the
host plans, and reads what was committed, one round later where rounds are launched ahead.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from selfspec_tune.config import MAX_DRAFT_TOKENS
from selfspec_tune.decode.drafters import Drafter, Source
from selfspec_tune.decode.graphs import synchronise
from selfspec_tune.decode.policy import Policy
from selfspec_tune.decode.requests import Completion, Request
from selfspec_tune.decode.rounds import Launched, Rounds
from selfspec_tune.decode.sampling import Noise, SamplingParams
from selfspec_tune.decode.stats import Stats
from selfspec_tune.decode.stream import TextStream

if TYPE_CHECKING:
    from selfspec_tune.decode.engine import Engine


class Run:
    """One call of `Engine.generate`: the state of its rows as the host knows it."""

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
        self.streams = [
            TextStream(engine.tokenizer, request.prompt_ids, request.stop) if engine.tokenizer else None
            for request in requests
        ]
        # Ahead, the host knows neither the text so far nor, for shared noise, how long it is.
        knows_nothing = (drafter is None or not drafter.reads_text) and not params.reproducible
        self._lag = 1 if engine.ahead and knows_nothing and self.decoder.compiled else 0
        self._waiting: deque[Launched] = deque()
        self._committed = [0] * engine.batch_size
        self._clock = 0.0
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
        rounds = self._rounds()
        for completion, limit in zip(self.completions, self.limits, strict=True):
            if limit == 0:
                completion.finish_reason = "length"
        if self._active():
            self._prefill(rounds)
            synchronise(self.decoder.device)
            self.stats.prefill_seconds = time.perf_counter() - begin
        try:
            while self._active():
                # Every round that is waiting will emit a token at least.
                if self._remaining() > 0 and len(self._waiting) <= self._lag:
                    self._waiting.append(self._launch(rounds))
                if len(self._waiting) > self._lag or self._remaining() <= 0:
                    self._collect(self._waiting.popleft(), rounds)
        finally:
            self.policy.forget()
            rounds.cache.expected = None
        for row, stream in enumerate(self.streams):
            if stream is not None:
                self._show(row, stream.finish())
                self.completions[row].text = stream.text
        synchronise(self.decoder.device)
        self.stats.total_seconds = time.perf_counter() - begin
        if self.policy.stopped:
            self.stats.enabled = False
            self.stats.reason = "drafting stopped: it emitted fewer tokens than plain decoding would have"
        return self.stats

    def _rounds(self) -> Rounds:
        slots = max(len(request.prompt_ids) for request in self.requests)
        if self._lag or self.decoder.device.type == "cuda":
            # All that can be needed, so that memory that graphs know never moves.
            # A row may end beyond its limit by its last round and those launched ahead, and goes on drafting there.
            spare = 2 * (self._lag + 1) * (MAX_DRAFT_TOKENS + 1)
            slots = spare + max(
                len(request.prompt_ids) + limit for request, limit in zip(self.requests, self.limits, strict=True)
            )
        rounds = self.engine.rounds_for(slots, self.params)
        rounds.start(self.drafter)
        noises = [Noise(self.params, request.id) for request in self.requests]
        rounds.noises.start(noises, lambda row: len(self.completions[row].token_ids))
        return rounds

    def _active(self) -> list[int]:
        return [row for row, completion in enumerate(self.completions) if completion.finish_reason is None]

    def _remaining(self) -> int:
        """Tokens that the row with most to come still wants, if every waiting round emits one."""
        wanted = (self.limits[row] - len(self.completions[row].token_ids) for row in self._active())
        return max(wanted) - len(self._waiting)

    def _prefill(self, rounds: Rounds) -> None:
        if self.drafter is not None:
            self.drafter.start([request.prompt_ids for request in self.requests])
        for row, request in enumerate(self.requests):
            tokens = torch.tensor([request.prompt_ids], device=self.decoder.device)
            logits = self.decoder.logits(self.decoder.prefill(tokens, rounds.cache.row(row)), pad=False)
            self._committed[row] = len(request.prompt_ids)
            if self.completions[row].finish_reason is None:
                chosen = int(rounds.round.choose_first(logits[0], row))
                self.stats.from_prefill += 1
                self._emit(row, [chosen], logits[0])

    def _launch(self, rounds: Rounds) -> Launched:
        if not self._waiting:
            self._clock = time.perf_counter()
        rounds.activate(self._active())
        planned = self._plan()
        reach = sum(launched.most for launched in self._waiting) + 1 + (planned[1] if planned else 0)
        rounds.cache.expected = max(self._committed) + reach
        assert not (self._lag or rounds.recorded.active) or rounds.cache.expected <= rounds.cache.capacity
        if planned is None:
            launched = rounds.plain()
        else:
            assert self.drafter is not None
            source, k = planned
            if self._lag or rounds.recorded.active:
                launched = rounds.speculative(self.drafter, source, k)
            else:
                enough = partial(self._enough, rounds, source) if self.policy.wants_confidence else None
                draft = rounds.draft(self.drafter, source, k, enough)
                synchronise(self.decoder.device)
                self._charge("draft_seconds")
                launched = rounds.verify(source, draft)
        if self.engine.keep_logits and self._lag:
            launched.logits = launched.logits.clone()
        return launched

    def _plan(self) -> tuple[Source, int] | None:
        """Return from which source to draft how many tokens in the coming round; None for a plain step."""
        sources = self.drafter.sources() if self.drafter else []
        lengths = [len(self.requests[row].prompt_ids) + len(self.completions[row].token_ids) for row in self._active()]
        exit_layer = self.policy.at(max(lengths) + len(self._waiting))
        if self.drafter is not None and exit_layer is not None:
            self.drafter.use_exit(exit_layer)
        return self.policy.next(self._remaining(), sources)

    def _enough(self, rounds: Rounds, source: Source) -> bool:
        return self.policy.enough(source, float(rounds.round.confidence[self._active()].mean()))

    def _collect(self, launched: Launched, rounds: Rounds) -> None:
        """Read what a round did, and take its tokens over."""
        drafts, accepted, following, self._committed = launched.read()
        source = launched.source
        self._charge("plain_seconds" if source is None else "verify_seconds")
        self.stats.passes += 1
        for row in self._active():
            count = accepted[row]
            if source is None:
                self.stats.plain_steps += 1
            else:
                self.stats.count_round(source.drafter, len(drafts[row]), count)
                self.policy.observe(source, len(drafts[row]), count)
            self._emit(row, [*drafts[row][:count], following[row]], launched.logits[row])
            request, completion = self.requests[row], self.completions[row]
            if completion.finish_reason is None:
                # All but the newest token are in the cache.
                assert self._committed[row] == len(request.prompt_ids) + len(completion.token_ids) - 1
        self.policy.settle()
        if self.engine.after_commit is not None:
            self.engine.after_commit(rounds.cache)

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

    def _charge(self, name: str) -> None:
        """Count the time since this was last called, or since a launch with nothing waiting, under a name."""
        now = time.perf_counter()
        setattr(self.stats, name, getattr(self.stats, name) + now - self._clock)
        self._clock = now
