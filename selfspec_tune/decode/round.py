"""One round on the device: draft, verify, accept, commit. Tensors of fixed shapes in place of the host's decisions.

Nothing here reads a tensor on the host, so a round can be recorded as a CUDA graph and launched before the one before
it was read. What a round needs to know of the host (which rows are unfinished, random numbers, copied tokens) is
written into tensors before it is launched; what the host wants to know is in its `Outcome`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from selfspec_tune.decode.accept import accept_greedy, accept_ratio, accept_shared
from selfspec_tune.decode.drafters import Draft, Drafter, Enough, Source
from selfspec_tune.decode.noises import Noises
from selfspec_tune.decode.sampling import SamplingParams, distribution, draw, draw_with_gumbel
from selfspec_tune.decode.verify import step_plain, verify
from selfspec_tune.model.cache import SharedKVCache
from selfspec_tune.model.decoder import LayeredDecoder


class Outcome(NamedTuple):
    """What a round of k draft tokens did.

    Attributes:
        numbers: [B, k + 3]: drafted tokens, how many of them were accepted, the token after those, and `committed`.
        logits: fp32 [B, k + 1, V], the target's, from which tokens were chosen.
    """

    numbers: Tensor
    logits: Tensor


class Round:
    """The state of a batch on the device, and what a round does to it.

    Args:
        decoder: the model.
        cache: its `committed` [B] moves on with every round.
        params: how tokens are chosen.
        noises: random numbers.

    Attributes:
        last: [B], the newest token of each row, which is not in the cache yet.
        active: [B], rows that are not finished; the others compute too, and nothing of theirs is kept.
        confidence: [B], how sure the draft is of all it drafted in this round.
        uniform: where uniform numbers come from, see `Noises`.
    """

    def __init__(self, decoder: LayeredDecoder, cache: SharedKVCache, params: SamplingParams, noises: Noises) -> None:
        self.decoder, self.cache, self.params, self.noises = decoder, cache, params, noises
        batch, device = cache.batch_size, decoder.device
        self.last = torch.zeros(batch, dtype=torch.long, device=device)
        self.active = torch.zeros(batch, dtype=torch.bool, device=device)
        self.confidence = torch.ones(batch, device=device)
        self.uniform: Callable[[int], Tensor] = noises.uniform

    def draft(self, drafter: Drafter, source: Source, k: int, enough: Enough, *, confident: bool) -> Draft:
        """Let a drafter propose k tokens; with `confident`, follow how sure it is of them."""
        self.confidence.fill_(1.0)

        def choose(logits: Tensor, offset: int) -> tuple[Tensor, Tensor | None]:
            return self._choose(logits, offset, confident=confident)

        return drafter.propose(self.last, self.cache, k, choose, source, enough)

    def finish(self, draft: Draft | None) -> Outcome:
        """Verify a draft, or take a plain step without one; accept and commit."""
        if draft is None:
            logits = step_plain(self.decoder, self.cache, self.last)
            drafted, q = self.last[:, None][:, :0], None
        else:
            logits = verify(self.decoder, self.cache, self.last, draft)
            drafted, q = draft.tokens, draft.probabilities
        accepted, following = self._accept(drafted, q, logits)
        self.cache.committed += torch.where(self.active, accepted + 1, 0)
        self.last.copy_(torch.where(self.active, following, self.last))
        numbers = torch.cat((drafted, torch.stack((accepted, following, self.cache.committed), 1)), 1)
        return Outcome(numbers, logits)

    def choose_first(self, logits: Tensor, row: int) -> Tensor:
        """Choose the first token of a row, [1], from its prefill logits [1, V], and make it the row's newest."""
        if self.params.greedy:
            token = logits.argmax(-1)
        else:
            target = distribution(logits, self.params)
            token = self.noises.first(row, target, shared=self.params.reproducible)
        self.last[row : row + 1] = token
        return token

    def _choose(self, logits: Tensor, offset: int, *, confident: bool) -> tuple[Tensor, Tensor | None]:
        """Choose draft tokens [B] from the draft's logits [B, V]; returns q with them where they are drawn from it."""
        if self.params.greedy:
            if confident:
                self.confidence *= (logits.amax(-1) - logits.logsumexp(-1)).exp()
            return logits.argmax(-1), None
        q = distribution(logits, self.params)
        if confident:
            self.confidence *= q.amax(-1)
        if self.params.reproducible:
            return draw_with_gumbel(q, self.noises.gumbel(offset, q.shape[-1])), None
        return draw(q, self.uniform(1)[:, 0]), q

    def _accept(self, drafted: Tensor, q: Tensor | None, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Test [B, k] draft tokens against the target's logits [B, k + 1, V]; k may be 0."""
        k = drafted.shape[1]
        if self.params.greedy:
            return accept_greedy(drafted, logits)
        target = distribution(logits, self.params)
        if self.params.reproducible:
            noise = [self.noises.gumbel(offset, target.shape[-1]) for offset in range(k + 1)]
            return accept_shared(drafted, target, torch.stack(noise, 1))
        uniform = self.uniform(k + 1)
        return accept_ratio(drafted, q, target, uniform[:, :k], uniform[:, k])
