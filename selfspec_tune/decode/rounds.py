"""How rounds are launched: one after another as they are written, or recorded; from which the host reads numbers."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from selfspec_tune.config import MAX_DRAFT_TOKENS
from selfspec_tune.decode.drafters import Draft, Drafter, Enough, Source, never
from selfspec_tune.decode.graphs import HostCopy, Recordings, recordings, upload
from selfspec_tune.decode.noises import Noises
from selfspec_tune.decode.round import Outcome, Round
from selfspec_tune.decode.sampling import SamplingParams
from selfspec_tune.model.cache import SharedKVCache
from selfspec_tune.model.decoder import LayeredDecoder


class Launched:
    """A round that was launched.

    Attributes:
        source: what drafted, None for a plain step.
        most: tokens it can emit at most, k + 1.
        logits: fp32 [B, k + 1, V]; they hold until the next round is launched.
    """

    def __init__(self, source: Source | None, outcome: Outcome) -> None:
        self.source, self.logits = source, outcome.logits
        self.most = outcome.logits.shape[1]
        self._numbers = HostCopy(outcome.numbers)

    def read(self) -> tuple[list[list[int]], list[int], list[int], list[int]]:
        """Return of every row its drafted tokens, how many were accepted, the token after them, and `committed`."""
        *drafted, accepted, following, committed = self._numbers.read().T.tolist()
        drafts = [list(tokens) for tokens in zip(*drafted, strict=True)] if drafted else [[] for _ in accepted]
        return drafts, accepted, following, committed


class Rounds:
    """Launches rounds on one cache with one way to choose tokens.

    Args:
        decoder, cache, params: see `Round`.
        record: record rounds as CUDA graphs where that can be done.
    """

    def __init__(
        self, decoder: LayeredDecoder, cache: SharedKVCache, params: SamplingParams, *, record: bool = True
    ) -> None:
        self._records = record
        self.cache, self.params, self.decoder = cache, params, decoder
        self.noises = Noises(cache.batch_size, decoder.device)
        self.round = Round(decoder, cache, params, self.noises)
        self._memory = cache.keys.data_ptr(), cache.capacity
        self._active: list[int] = []
        self.recorded = self._record()
        if self.recorded.active:
            self.round.uniform = self.noises.prepared
        # Of the drafter last in use; plain steps and the verification of copied tokens are every drafter's.
        self._drafting = self._record()
        self._drafter: Drafter | None = None
        shape = (cache.batch_size, MAX_DRAFT_TOKENS)
        self._given = torch.zeros(shape, dtype=torch.long, device=decoder.device)

    def serve(self, cache: SharedKVCache, params: SamplingParams) -> bool:
        """Whether these rounds are on this cache, where its memory is now, and choose tokens so."""
        return self.cache is cache and self.params == params and self._memory == (cache.keys.data_ptr(), cache.capacity)

    def start(self, drafter: Drafter | None) -> None:
        """Begin new requests: no row is active. Rounds recorded with another drafter are dropped."""
        self.activate([])
        self.round.last.zero_()
        if drafter is not None and drafter is not self._drafter:
            self._drafting, self._drafter = self._record(), drafter

    def activate(self, rows: list[int]) -> None:
        """Say which rows are unfinished."""
        if rows != self._active:
            self._active = list(rows)
            upload(torch.tensor([row in rows for row in range(self.cache.batch_size)]), self.round.active)

    def plain(self) -> Launched:
        """Launch a plain step."""
        return Launched(
            None, self._replay(self.recorded, ("plain", self.decoder.tap), 1, lambda: self.round.finish(None))
        )

    def speculative(self, drafter: Drafter, source: Source, k: int) -> Launched:
        """Launch a round of k tokens, which are drafted without asking how sure the draft is."""
        part = drafter.part(source)
        if not self.recorded.active or (part.reads_text and not part.copies):
            self._prepare(2 * k + 1)
            return self.verify(source, self.draft(drafter, source, k, None))
        if part.copies:
            # The host copies; only verification can be recorded, with the tokens in memory that stays where it is.
            given = Draft(self._given[:, :k], None, None, 0)
            given.tokens.copy_(part.propose(self.round.last, self.cache, k, _refuse, source).tokens)
            given_kind = ("given", self.decoder.tap, k)
            return Launched(source, self._replay(self.recorded, given_kind, k + 1, lambda: self.round.finish(given)))

        def body() -> Outcome:
            return self.round.finish(self.round.draft(drafter, source, k, never, confident=False))

        kind = (source, drafter.exit_layer, k)
        return Launched(source, self._replay(self._drafting, kind, 2 * k + 1, body))

    def draft(self, drafter: Drafter, source: Source, k: int, enough: Enough | None) -> Draft:
        """Draft k tokens, or fewer if `enough`."""
        return self.round.draft(drafter, source, k, enough or never, confident=enough is not None)

    def verify(self, source: Source, draft: Draft) -> Launched:
        """Verify a draft, accept and commit."""
        return Launched(source, self.round.finish(draft))

    def _record(self) -> Recordings:
        # Shared noise is made on the host, for positions that it must know.
        can = self._records and not self.params.reproducible
        return recordings(self.decoder) if can else Recordings(active=False)

    def _replay(self, recorded: Recordings, kind: Hashable, uniforms: int, body: Callable[[], Outcome]) -> Outcome:
        self._prepare(uniforms)
        return recorded.run(kind, body)

    def _prepare(self, uniforms: int) -> None:
        """Draw so many numbers of every row for the coming round, where rounds take prepared ones."""
        if self.recorded.active and not self.params.greedy:
            self.noises.prepare(uniforms)


def _refuse(logits: Tensor, offset: int) -> tuple[Tensor, Tensor | None]:
    raise AssertionError("a drafter that copies text chooses no token from logits")
