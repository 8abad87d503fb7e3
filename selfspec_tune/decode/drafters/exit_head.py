"""Exit head: the first E layers, a trained layer and norm after them, and the model's LM head draft.

The model is as it was. The early layers are target arithmetic and their work is kept, as in layer skip. The trained
layer has keys and values of its own, in the shared cache behind the model's. They must be there for every position
before a draft: those of drafted tokens the draft writes itself, those of all others (the prompt, plain steps, another
drafter's tokens) a tap writes, while the target's own pass goes through layer E.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from selfspec_tune.decode.drafters.layer_skip import LayerSkipDrafter
from selfspec_tune.model.cache import SharedKVCache
from selfspec_tune.model.decoder import LayeredDecoder, Tap
from selfspec_tune.model.exit_head import ExitHead, load_exit_head
from selfspec_tune.model.layer import rms_norm_of


class ExitHeadDrafter(LayerSkipDrafter):
    """Draft with layers 0..E and a trained head.

    Args:
        decoder: the model. The head's layer is added to it, so caches must be made afterwards.
        head: a head of this model, in its dtype and on its device.
        vocab: [N] ids the draft may propose, see `DraftHead`; None for all.
    """

    name = "exit-head"

    def __init__(self, decoder: LayeredDecoder, head: ExitHead, vocab: Tensor | None = None) -> None:
        super().__init__(decoder, head.exit_layer, vocab)
        self.layer = decoder.add_layer(head.block, like=head.exit_layer)
        self.norm = rms_norm_of(head.norm)
        self.tap = Tap(head.exit_layer, self.adapt)

    @classmethod
    def beside(cls, checkpoint: Path, decoder: LayeredDecoder, vocab: Tensor | None = None) -> ExitHeadDrafter:
        """Make a drafter of the head beside a checkpoint; UserError where there is none for these weights."""
        return cls(decoder, load_exit_head(checkpoint, decoder.model), vocab)

    def start(self, texts: list[list[int]]) -> None:
        """Begin new requests: from here on, passes of the target leave the head's keys and values too."""
        self.decoder.tap = self.tap

    def use_exit(self, exit_layer: int) -> None:
        """Change nothing: the head was trained for its exit."""

    def adapt(self, hidden: Tensor, positions: Tensor, cache: SharedKVCache) -> Tensor:
        """Run the head's layer on [B, T, d] hidden states at exit E; it is no target arithmetic: nothing is padded."""
        return self.decoder.run_layers(hidden, positions, cache, self.layer, self.layer + 1, pad=False)

    def logits(self, adapted: Tensor) -> Tensor:
        """Return fp32 logits [B, 1, V] after the head's own norm."""
        return self.head(adapted, self.norm)
