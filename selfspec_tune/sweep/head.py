"""Final norm and LM head over many hidden states at once, as a profile needs them. Knows no drafts and no text.

A profile asks of every exit and every position what the head makes of it: more products than decoding itself. Greedy
acceptance asks less than the logits, namely whether one token is the argmax. The vocabulary is walked in chunks, and a
row that a chunk has beaten is not multiplied again; early exits are beaten by the first.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from selfspec_tune.model.decoder import LayeredDecoder
from selfspec_tune.model.layer import rms_norm

VOCAB_CHUNK, ROW_CHUNK = 4096, 512
"""Tokens, and rows, of one product while argmaxes are compared: at most 8 MB of logits."""


class ProfileHead:
    """The decoder's head in the arithmetic its decoding steps use, as far as the order of sums goes.

    On a CPU the weight is widened to fp32, which is several times faster for many rows where the CPU has no
    low-precision arithmetic. Compiled ops keep norm and logits in fp32; elsewhere logits are rounded as a product in
    the model's dtype rounds them.
    """

    def __init__(self, decoder: LayeredDecoder) -> None:
        weight, bias = decoder.head
        self._compiled = decoder.layers_compiled
        norm, eps = decoder.final_norm
        self._norm = (norm.float() if self._compiled else norm), eps
        wide = decoder.device.type == "cpu"
        self._rounded = weight.dtype if wide and not self._compiled else None
        self._weight = weight.float() if wide else weight
        self._bias = bias.to(self._weight.dtype) if bias is not None else None

    @property
    def vocab_size(self) -> int:
        """V."""
        return len(self._weight)

    def rows(self, hidden: Tensor) -> Tensor:
        """Hidden states [..., d] behind any layer → what the head multiplies, [..., d]."""
        rows = rms_norm(hidden.float() if self._compiled else hidden, self._norm)
        return rows.to(self._weight.dtype)

    def logits(self, rows: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows [N, d] → fp32 logits [N, stop − start] of the tokens start..stop."""
        bias = self._bias[start:stop] if self._bias is not None else None
        logits = F.linear(rows, self._weight[start:stop], bias)
        return (logits.to(self._rounded) if self._rounded else logits).float()

    def choose(self, rows: Tensor, tokens: Tensor) -> Tensor:
        """Return for rows [N, d] whether token [N] is the argmax (of equals the first): bool [N]."""
        return torch.cat(
            [self._choose(*pair) for pair in zip(rows.split(ROW_CHUNK), tokens.split(ROW_CHUNK), strict=True)]
        )

    def _choose(self, rows: Tensor, tokens: Tensor) -> Tensor:
        won = torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
        left = torch.arange(len(rows), device=rows.device)
        own = self._own_logits(rows, tokens)
        for start in range(0, len(self._weight), VOCAB_CHUNK):
            logits = self.logits(rows, start, start + VOCAB_CHUNK)
            index = tokens - start
            inside = (index >= 0) & (index < logits.shape[1])
            # A token does not compete with itself, whose logit in another product may differ in the last bit.
            logits[inside.nonzero()[:, 0], index[inside]] = -torch.inf
            best = logits.max(-1)
            earlier = best.indices < index
            keep = torch.where(earlier, best.values < own, best.values <= own)
            rows, tokens, own, left = rows[keep], tokens[keep], own[keep], left[keep]
            if not len(left):
                break
        won[left] = True
        return won

    def masses(
        self, rows: Tensor, tokens: Tensor, temperature: float, least: Tensor, most_above: int
    ) -> tuple[Tensor, Tensor]:
        """Return for rows [N, d] and one token each [N], of softmax(logits/temperature): q(token) and the probability
        of all tokens above it, fp32 [N] each.

        Logits of a chunk of tokens exist at one time. A row is given up, and both are 0, as soon as its q(token) is
        certain to be below `least` [N], or `most_above` tokens to be above it.
        """
        parts = zip(rows.split(ROW_CHUNK), tokens.split(ROW_CHUNK), least.split(ROW_CHUNK), strict=True)
        found = [self._masses(*part, temperature, most_above) for part in parts]
        chosen, above = (torch.cat(values) for values in zip(*found, strict=True))
        return chosen, above

    def _masses(
        self, rows: Tensor, tokens: Tensor, least: Tensor, temperature: float, most_above: int
    ) -> tuple[Tensor, Tensor]:
        results = rows.new_zeros(2, len(rows), dtype=torch.float32)
        left = torch.arange(len(rows), device=rows.device)
        own = self._own_logits(rows, tokens)
        largest, total = own.clone(), torch.ones_like(own)
        above, count = torch.zeros_like(own), torch.zeros_like(tokens)
        for start in range(0, len(self._weight), VOCAB_CHUNK):
            logits = self.logits(rows, start, start + VOCAB_CHUNK)
            index = tokens - start
            inside = (index >= 0) & (index < logits.shape[1])
            logits[inside.nonzero()[:, 0], index[inside]] = -torch.inf
            higher = logits > own[:, None]
            grown = torch.maximum(largest, logits.amax(-1))
            shrink = ((largest - grown) / temperature).exp()
            mass = logits.sub_(grown[:, None]).div_(temperature).exp_()
            total, largest = total * shrink + mass.sum(-1), grown
            above, count = above * shrink + mass.mul_(higher).sum(-1), count + higher.sum(-1)
            chosen = ((own - largest) / temperature).exp() / total
            keep = (chosen >= least) & (count < most_above)
            if not bool(keep.all()):
                rows, tokens, least, left = rows[keep], tokens[keep], least[keep], left[keep]
                own, largest, total, above, count = (v[keep] for v in (own, largest, total, above, count))
            if not len(left):
                return results[0], results[1]
        results[0, left], results[1, left] = ((own - largest) / temperature).exp() / total, above / total
        return results[0], results[1]

    def _own_logits(self, rows: Tensor, tokens: Tensor) -> Tensor:
        products = (rows.float() * self._weight[tokens].float()).sum(-1)
        if self._bias is not None:
            products = products + self._bias[tokens].float()
        rounded = self._rounded or (self._weight.dtype if self._weight.dtype != torch.float32 else None)
        return products.to(rounded).float() if rounded else products
