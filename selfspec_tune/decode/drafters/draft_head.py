"""The LM head as a draft reads it: all its rows or those of the most frequent tokens, in full precision or packed.

With fewer rows a draft reads fewer bytes (FR-Spec, arXiv 2502.14856), and q is zero outside of them. The output is the
target's all the same: acceptance is right for any q, and verification uses the whole head. A draft's logits are no
target arithmetic: nothing is padded.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from selfspec_kernels import PackedWeight
from torch import Tensor

from selfspec_tune.errors import UserError
from selfspec_tune.model.decoder import LayeredDecoder
from selfspec_tune.model.draft_vocab import load_draft_vocab
from selfspec_tune.model.layer import product
from selfspec_tune.model.load import checkpoint_dir


class DraftHead:
    """The head's product for a draft.

    Args:
        decoder: the model.
        vocab: [N] ids a draft may propose, rising: their rows of the head are copied. None for all, without a copy.
        pack: makes the rows smaller.

    Raises:
        ValueError: `vocab` is empty, unsorted, names a token twice, or one that the head does not have.
    """

    def __init__(
        self,
        decoder: LayeredDecoder,
        vocab: Tensor | None = None,
        *,
        pack: Callable[[Tensor], Tensor | PackedWeight] | None = None,
    ) -> None:
        rows, bias = decoder.head
        self.decoder, self.vocab, self.vocab_size = decoder, vocab, rows.shape[0]
        if vocab is not None:
            if len(vocab) == 0 or bool((vocab.diff() <= 0).any()) or vocab[0] < 0 or vocab[-1] >= self.vocab_size:
                raise ValueError(f"a draft's vocabulary must be rising ids of 0..{self.vocab_size - 1}")
            self.vocab = vocab = vocab.to(decoder.device)
            rows, bias = rows[vocab], None if bias is None else bias[vocab]
        self.weight: Tensor | PackedWeight = rows if pack is None else pack(rows)
        self.bias = bias

    @property
    def num_bytes(self) -> int:
        """Memory of the draft's own copy of weights; 0 where the model's are used in place."""
        if isinstance(self.weight, PackedWeight):
            return self.weight.num_bytes
        return 0 if self.vocab is None else self.weight.nbytes

    def __call__(self, hidden: Tensor, norm: tuple[Tensor, float]) -> Tensor:
        """Norm and product: [B, T, d] → fp32 logits [B, T, V], -inf at tokens that may not be drafted."""
        mode = self.decoder.mode(hidden.shape[1], many_rows=False)
        logits = product(hidden, self.weight, self.bias, mode, norm=norm, out_dtype=torch.float32)
        if self.vocab is None:
            return logits
        whole = logits.new_full((*logits.shape[:-1], self.vocab_size), float("-inf"))
        return whole.index_copy_(-1, self.vocab, logits)


def read_vocab(model: str, size: int | None) -> Tensor | None:
    """Return the [N] rising ids of the draft vocabulary beside a checkpoint; None for the whole one.

    Raises:
        UserError: as `load_draft_vocab`, or the model is a hub name.
    """
    if size is None:
        return None
    directory = checkpoint_dir(model)
    if directory is None:
        raise UserError("a draft vocabulary stands beside a checkpoint", got=model, allowed="a checkpoint directory")
    return torch.tensor(load_draft_vocab(directory, size))
