"""Exit head: the first E layers, a trained layer and norm after them, and the model's LM head draft.

The model is as it was. The early layers are target arithmetic and their work is kept, as in layer skip. The trained
layer has keys and values of its own, in the shared cache behind the model's. They must be there for every position
before a draft: those of drafted tokens the draft writes itself, those of all others (the prompt, plain steps, another
drafter's tokens) a tap writes, while the target's own pass goes through layer E.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from selfspec_tune.decode.drafters import ChooseToken, Draft, Drafter, Enough, Source, never
from selfspec_tune.model.cache import SharedKVCache
from selfspec_tune.model.decoder import LayeredDecoder, Tap
from selfspec_tune.model.exit_head import ExitHead, load_exit_head
from selfspec_tune.model.layer import rms_norm_of


class ExitHeadDrafter(Drafter):
    """Draft with layers 0..E and a trained head.

    Args:
        decoder: the model. The head's layer is added to it, so caches must be made afterwards.
        head: a head of this model, in its dtype and on its device.
    """

    name = "exit-head"

    def __init__(self, decoder: LayeredDecoder, head: ExitHead) -> None:
        self.decoder = decoder
        self.exit_layer: int | None = head.exit_layer
        self.layer = decoder.add_layer(head.block, like=head.exit_layer)
        self.norm = rms_norm_of(head.norm)
        self.tap = Tap(head.exit_layer, self._run_head)

    @classmethod
    def beside(cls, checkpoint: Path, decoder: LayeredDecoder) -> ExitHeadDrafter:
        """Make a drafter of the head beside a checkpoint; UserError where there is none for these weights."""
        return cls(decoder, load_exit_head(checkpoint, decoder.model))

    def start(self, texts: list[list[int]]) -> None:
        """Begin new requests: from here on, passes of the target leave the head's keys and values too."""
        self.decoder.tap = self.tap

    def propose(
        self, last: Tensor, cache: SharedKVCache, k: int, choose: ChooseToken, source: Source, enough: Enough = never
    ) -> Draft:
        """Draft k tokens; the last one goes through the early layers and the head's layer too, for keys and values."""
        decoder, exit_layer = self.decoder, self.exit_layer
        assert exit_layer is not None
        tokens, probabilities, states = [], [], []
        token = last
        drafting = True
        for offset in range(k + 1):
            positions = cache.committed[:, None] + offset
            hidden = decoder.run_layers(decoder.embed(token[:, None]), positions, cache, 0, exit_layer)
            states.append(hidden)
            adapted = self._run_head(hidden, positions, cache)
            if not drafting:
                break
            token, q = choose(decoder.logits(adapted, pad=False, norm=self.norm)[:, 0], offset)
            tokens.append(token)
            if q is not None:
                probabilities.append(q)
            drafting = len(tokens) < k and not enough()
        return Draft(
            tokens=torch.stack(tokens, 1),
            probabilities=torch.stack(probabilities, 1) if probabilities else None,
            hidden=torch.cat(states, 1),
            resume_layer=exit_layer,
        )

    def _run_head(self, hidden: Tensor, positions: Tensor, cache: SharedKVCache) -> Tensor:
        """Run the head's layer on [B, T, d] hidden states at exit E; it is no target arithmetic: nothing is padded."""
        return self.decoder.run_layers(hidden, positions, cache, self.layer, self.layer + 1, pad=False)
