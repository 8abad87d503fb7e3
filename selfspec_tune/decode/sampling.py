"""From logits to the distribution a token is drawn from, and from noise to the token.

The same `distribution` serves draft and target, so q is by construction what the draft token was drawn from.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from selfspec_kernels import draw, draw_with_gumbel
from torch import Tensor

from selfspec_tune.errors import UserError

__all__ = ["GREEDY", "Noise", "SamplingParams", "distribution", "draw", "draw_with_gumbel"]

NUCLEI = (64, 1024)
"""Numbers of most probable tokens among which top-p is looked for first."""


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen: greedy at temperature 0, else sampled after top-k and top-p."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    reproducible: bool = False

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise UserError("temperature must not be negative", got=self.temperature, allowed="0 (greedy) or above")
        if self.top_k < 0:
            raise UserError("top_k must not be negative", got=self.top_k, allowed="0 (all) or above")
        if not 0 < self.top_p <= 1:
            raise UserError("top_p is out of range", got=self.top_p, allowed="above 0, at most 1")

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is always taken."""
        return self.temperature == 0


GREEDY = SamplingParams()
"""The most probable token, always."""


def distribution(logits: Tensor, params: SamplingParams) -> Tensor:
    """Return fp32 probabilities [..., V] after temperature, top-k and top-p (in this order).

    Ties at the k-th place are all kept. top-p keeps the smallest set of most probable tokens that reaches p (the first
    in vocabulary order among equals), so at least one.
    """
    logits = logits.float()
    scaled = (logits - logits.amax(-1, keepdim=True)) / params.temperature
    if 0 < params.top_k < scaled.shape[-1]:
        threshold = scaled.topk(params.top_k, dim=-1).values[..., -1:]
        scaled = scaled.masked_fill(scaled < threshold, float("-inf"))
    probabilities = scaled.softmax(-1)
    return _nucleus(probabilities, params.top_p) if params.top_p < 1 else probabilities


def _nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """Keep the smallest set of most probable tokens that reaches `top_p`, and normalise.

    On a CPU sorting a whole vocabulary costs more than the head. There the `NUCLEI` most probable tokens of a row are
    sorted first, and more only in rows where they do not reach p; the result is the same to the bit.
    """
    flat = probabilities.reshape(-1, probabilities.shape[-1])
    kept, left = torch.zeros_like(flat), flat
    rows = torch.arange(len(flat), device=flat.device)
    for size in NUCLEI if flat.device.type == "cpu" else ():
        if not len(rows) or size >= flat.shape[-1]:
            break
        # In vocabulary order first, so that a stable sort puts the first of equals first.
        order = left.topk(size, dim=-1, sorted=False).indices.sort(dim=-1).values
        ordered, places = left.gather(-1, order).sort(dim=-1, descending=True, stable=True)
        # The set must end above the least of them: of those equal to it some may be missing here.
        ends = ordered.masked_fill(ordered <= ordered[:, -1:], 0).cumsum(-1)[:, -1] >= top_p
        kept[rows[ends]] = _cut(left[ends], ordered[ends], order.gather(-1, places)[ends], top_p)
        rows, left = rows[~ends], left[~ends]
    if len(rows):
        kept[rows] = _cut(left, *left.sort(dim=-1, descending=True, stable=True), top_p)
    return kept.view_as(probabilities)


def _cut(probabilities: Tensor, ordered: Tensor, order: Tensor, top_p: float) -> Tensor:
    before = ordered.cumsum(-1) - ordered
    ordered = ordered.masked_fill(before >= top_p, 0)
    # The total comes from a running sum: a reduction's order, and so its bits, would depend on the number of rows.
    ordered = ordered / ordered.cumsum(-1)[..., -1:]
    return torch.zeros_like(probabilities).scatter_(-1, order, ordered)


class Noise:
    """The random numbers of one request, a stream of its own.

    Gumbel noise depends on nothing else. How much of the uniform stream a round of the ratio test takes depends on k,
    and near the end of a batch k depends on the longest row.

    Args:
        params: the seed.
        request: the request's id; together with the seed it keys the noise.
    """

    def __init__(self, params: SamplingParams, request: str) -> None:
        self._key = f"{params.seed}:{request}"
        self._generator = torch.Generator().manual_seed(self._hash("stream"))

    def uniform(self, count: int) -> Tensor:
        """Return the next `count` uniform numbers, fp64 [count] on the CPU."""
        return torch.rand(count, generator=self._generator, dtype=torch.float64)

    def gumbel(self, position: int, size: int) -> Tensor:
        """Return the Gumbel noise [size] of one position: a function of seed, request and position only."""
        generator = torch.Generator().manual_seed(self._hash(str(position)))
        uniform = torch.rand(size, generator=generator, dtype=torch.float64).clamp_min_(1e-300)
        return -(-uniform.log()).log()

    def _hash(self, what: str) -> int:
        digest = hashlib.blake2b(f"{self._key}:{what}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 1
