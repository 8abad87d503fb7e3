"""One pass of the target over a draft: k + 1 rows per sequence, from the layer the draft's hidden states allow."""

from __future__ import annotations

import torch
from torch import Tensor

from selfspec_tune.decode.drafters import Draft
from selfspec_tune.model.cache import SharedKVCache
from selfspec_tune.model.decoder import LayeredDecoder


def verify(decoder: LayeredDecoder, cache: SharedKVCache, last: Tensor, draft: Draft) -> Tensor:
    """Return the target's fp32 logits [B, k + 1, V] at the last committed token and each drafted one.

    Layers below `draft.resume_layer` are not run again; without hidden states all layers run and overwrite whatever
    keys and values the draft left.
    """
    if draft.hidden is None:
        hidden, start = decoder.embed(torch.cat((last[:, None], draft.tokens), 1)), 0
    else:
        hidden, start = draft.hidden, draft.resume_layer
    offsets = torch.arange(hidden.shape[1], device=hidden.device)
    positions = cache.committed[:, None] + offsets
    return decoder.logits(decoder.run_layers(hidden, positions, cache, start, decoder.num_layers))


def step_plain(decoder: LayeredDecoder, cache: SharedKVCache, last: Tensor) -> Tensor:
    """Return the target's fp32 logits [B, 1, V] after `last` [B]: one step of plain decoding."""
    hidden = decoder.embed(last[:, None])
    return decoder.logits(decoder.run_layers(hidden, cache.committed[:, None], cache, 0, decoder.num_layers))
