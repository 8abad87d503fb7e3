"""Layer skip (arXiv 2404.16710): the first E layers, the final norm and the head draft; their work is kept."""

from __future__ import annotations

import torch
from torch import Tensor

from selfspec_tune.decode.drafters import ChooseToken, Draft, Drafter, Enough, Source, never
from selfspec_tune.decode.drafters.draft_head import DraftHead
from selfspec_tune.errors import UserError
from selfspec_tune.model.cache import SharedKVCache
from selfspec_tune.model.decoder import LayeredDecoder


class LayerSkipDrafter(Drafter):
    """Draft with layers 0..E of the model itself.

    Args:
        decoder: the model.
        exit_layer: E, 1 ≤ E < number of layers.
        vocab: [N] ids the draft may propose, see `DraftHead`; None for all.
    """

    name = "layer-skip"
    reads_text = False

    def __init__(self, decoder: LayeredDecoder, exit_layer: int, vocab: Tensor | None = None) -> None:
        if not 1 <= exit_layer < decoder.num_layers:
            raise UserError(
                "exit_layer is out of range",
                got=exit_layer,
                allowed=f"1..{decoder.num_layers - 1} (the model has {decoder.num_layers} layers)",
                command=f"--exit-layer {max(1, decoder.num_layers // 3)}",
            )
        self.decoder = decoder
        self.exit_layer: int | None = exit_layer
        self.head = DraftHead(decoder, vocab)

    @property
    def num_bytes(self) -> int:
        """Memory the draft's copy of the head's rows takes."""
        return self.head.num_bytes

    def use_exit(self, exit_layer: int) -> None:
        """Draft with layers 0..`exit_layer`: committed keys and values are all layers', so any round may change it."""
        self.exit_layer = exit_layer

    def propose(
        self, last: Tensor, cache: SharedKVCache, k: int, choose: ChooseToken, source: Source, enough: Enough = never
    ) -> Draft:
        """Draft k tokens; the last one runs through the early layers too, as its keys and hidden state are needed."""
        decoder, exit_layer = self.decoder, self.exit_layer
        assert exit_layer is not None
        tokens, probabilities, states = [], [], []
        token = last
        drafting = True
        for offset in range(k + 1):
            positions = cache.committed[:, None] + offset
            hidden = decoder.run_layers(decoder.embed(token[:, None]), positions, cache, 0, exit_layer)
            states.append(hidden)
            adapted = self.adapt(hidden, positions, cache)
            if not drafting:
                break
            token, q = choose(self.logits(adapted)[:, 0], offset)
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

    def adapt(self, hidden: Tensor, positions: Tensor, cache: SharedKVCache) -> Tensor:
        """Return what the head reads, from [B, 1, d] hidden states at exit E; called for every token of a draft."""
        return hidden

    def logits(self, adapted: Tensor) -> Tensor:
        """Return fp32 logits [B, 1, V]; with the whole head they are those of the target's arithmetic."""
        if self.head.vocab is None:
            return self.decoder.logits(adapted)
        return self.head(adapted, self.decoder.final_norm)
