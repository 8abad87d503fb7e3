"""A drafter that knows the true continuation and forces how many of its tokens stand.

With a poor draft nearly every round emits the first row of its verification only, and an engine whose later rows have
other bits still looks exact. Forcing 0..k acceptances in turn makes every row index be emitted.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from selfspec_tune.decode.drafters import ChooseToken, Draft, Drafter, Enough, Source, never
from selfspec_tune.decode.drafters.layer_skip import LayerSkipDrafter
from selfspec_tune.model.cache import SharedKVCache
from selfspec_tune.model.decoder import LayeredDecoder


def in_turn(round_index: int, k: int) -> int:
    """Force 0..k acceptances in turn, in an order that mixes long and short rounds."""
    return (round_index * 5 + round_index // (k + 1)) % (k + 1)


class OracleDrafter(Drafter):
    """Propose the true tokens up to a forced number of acceptances, then a wrong one.

    Args:
        truth: per batch row the prompt followed by the true continuation.
        accept: `accept(round, k)` says how many drafted tokens shall stand in this round.
        exit_layer: run the early layers as layer skip does, or None to leave all layers to verification.
    """

    name = "oracle"

    def __init__(
        self,
        decoder: LayeredDecoder,
        truth: list[list[int]],
        accept: Callable[[int, int], int],
        exit_layer: int | None,
    ) -> None:
        self.truth, self.accept, self.exit_layer = truth, accept, exit_layer
        self.vocab_size = decoder.family.vocab_size
        self.layer_skip = LayerSkipDrafter(decoder, exit_layer) if exit_layer else None
        self.rounds = 0

    def propose(
        self, last: Tensor, cache: SharedKVCache, k: int, choose: ChooseToken, source: Source, enough: Enough = never
    ) -> Draft:
        """Return the true next k tokens of every row, the one after the forced acceptances made wrong."""
        standing = self.accept(self.rounds, k)
        self.rounds += 1
        rows = []
        for row, committed in enumerate(cache.committed.tolist()):
            known = self.truth[row] if row < len(self.truth) else []
            # `last` is the token at position `committed`; the draft follows it.
            drafted = (known[committed + 1 :] + [0] * k)[:k]
            if standing < k:
                drafted[standing] = (drafted[standing] + 1) % self.vocab_size
            rows.append(drafted)
        tokens = torch.tensor(rows, device=last.device)
        if self.layer_skip is None:
            return Draft(tokens, None, None, 0)
        return self.layer_skip.propose(last, cache, k, lambda logits, offset: (tokens[:, offset], None), source)
