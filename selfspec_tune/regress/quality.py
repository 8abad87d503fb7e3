"""Did perplexity rise more than allowed? Decided on an interval, so that a small text cannot decide by chance.

What two models' scores of the same documents say: the ratio of perplexities with its paired bootstrap interval over
documents (documents, not tokens, are drawn again, as the tokens of one text are not independent), KL(base‖trained) and
how often both prefer the same token. Knows nothing of models, drafts and selfspec.json.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from selfspec_tune.bootstrap import Z, widening
from selfspec_tune.errors import UserError
from selfspec_tune.regress.score import Scores

RESAMPLES, SEED, COVERAGE = 2000, 0, 0.95
"""Bootstrap of the interval: resamples, seed, and the share of them inside."""

FEWEST_DOCUMENTS = 8
"""With fewer, a bootstrap interval is too often too narrow to decide anything."""

MOST_DOCUMENTS = 10_000
"""The largest number of documents ever advised; beyond it the ratio is said to lie at the limit."""

ALL = "all together"
"""Name of what all text sets say together."""

POWER_Z = 1.644854
"""Normal quantile of 0.95: so surely would the advised number decide if ratio and spread were known exactly."""


@dataclass(frozen=True)
class Quality:
    """What one text set (or all of them) says.

    Attributes:
        base, trained: perplexities, e to the nats per token.
        ratio, interval: trained ÷ base, and its 95 % interval.
        limit: largest ratio allowed.
        kl, kl_interval: KL(base‖trained), nats per token.
        top1_agreement: share of tokens where both models' most probable token is the same.
        status: passed (the interval's upper bound is within the limit), failed (its lower bound is beyond), undecided.
        needed: undecided: documents that would probably decide; None where it is more than MOST_DOCUMENTS.
        documents, available, tokens: used, in the files, and scored.
    """

    name: str
    documents: int
    available: int
    tokens: int
    base: float
    trained: float
    ratio: float
    interval: tuple[float, float]
    limit: float
    kl: float
    kl_interval: tuple[float, float]
    top1_agreement: float
    status: str
    needed: int | None

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON object; numbers that are not finite become null."""
        return {name: _finite(value) for name, value in vars(self).items()}


def compare(name: str, scores: Scores, *, max_increase: float, available: int, same_weights: bool = False) -> Quality:
    """Compare two models' scores of the same documents.

    Args:
        max_increase: share by which perplexity may rise.
        available: documents there are, for the advice.
        same_weights: both checkpoints have one fingerprint. What would be undecided passes then; what is measured to
            fail still fails, as a fingerprint reads samples of the weights.
    """
    tokens, documents = float(scores.counts.sum()), len(scores.counts)
    difference = scores.trained - scores.base
    per_token = float(difference.sum()) / tokens
    bounds, kl_bounds = intervals(torch.stack([difference, scores.kl], 1), scores.counts)
    status, needed = decide(per_token, bounds, math.log1p(max_increase), documents)
    if same_weights and status == "undecided":
        status, needed = "passed", None
    return Quality(
        name=name,
        documents=documents,
        available=available,
        tokens=int(tokens),
        base=_exp(float(scores.base.sum()) / tokens),
        trained=_exp(float(scores.trained.sum()) / tokens),
        ratio=_exp(per_token),
        interval=(_exp(bounds[0]), _exp(bounds[1])),
        limit=1 + max_increase,
        kl=float(scores.kl.sum()) / tokens,
        kl_interval=(max(kl_bounds[0], 0.0), max(kl_bounds[1], 0.0)),
        top1_agreement=float(scores.agreeing.sum()) / tokens,
        status=status,
        needed=needed,
    )


def intervals(sums: Tensor, counts: Tensor) -> list[tuple[float, float]]:
    """Return a 95 % interval for each column's mean per token, by a bootstrap over documents.

    The percentile interval of few documents is too narrow. It is widened about the mean by √(n / (n − 1)) and by the
    ratio of Student's quantile to the normal one (after the expanded percentile of Hesterberg 2015, arXiv 1411.5279).

    Args:
        sums: fp64 [N, M], summed over each document's tokens.
        counts: fp64 [N] tokens.
    """
    number = len(counts)
    generator = torch.Generator().manual_seed(SEED)
    drawn = torch.randint(number, (RESAMPLES, number), generator=generator)
    # In blocks, as [RESAMPLES, N, M] numbers may be too many.
    blocks = drawn.split(max(1, 1_000_000 // number))
    means = torch.cat([sums[block].sum(1) / counts[block].sum(1, keepdim=True) for block in blocks])
    outside = int(RESAMPLES * (1 - COVERAGE) / 2)
    ordered, centre = means.sort(0).values, sums.sum(0) / counts.sum()
    low, high = (centre + widening(number) * (ordered[at] - centre) for at in (outside, -1 - outside))
    return list(zip(low.tolist(), high.tolist(), strict=True))


def decide(
    value: float, interval: tuple[float, float], limit: float, documents: int, fewest: int = FEWEST_DOCUMENTS
) -> tuple[str, int | None]:
    """Return passed, failed or undecided, and where undecided the documents that would probably decide.

    The whole interval must lie on one side of the limit. Its width shrinks as 1/√n, so the advised n is where it would,
    with some room (POWER_Z) as another sample's mean lies elsewhere.

    Args:
        value, interval, limit: on one scale (for perplexities nats per token); above the limit is bad.
        documents: the interval's; fewer than `fewest` decide only where no document shows any difference.
    """
    low, high = interval
    if not math.isfinite(value):
        return "failed", None
    if low == high == value == 0 <= limit:
        return "passed", None
    if documents >= fewest and high <= limit:
        return "passed", None
    if documents >= fewest and low > limit:
        return "failed", None
    half, distance = (high - value if value <= limit else value - low), abs(limit - value)
    if half == 0 or documents < 2:
        return "undecided", fewest
    needed = documents * ((1 + POWER_Z / Z) * half / distance) ** 2 if distance else math.inf
    return "undecided", max(math.ceil(needed), documents + 1, fewest) if needed <= MOST_DOCUMENTS else None


def advice(found: dict[str, Any]) -> str:
    """Return what would decide an undecided result (a `Quality.to_dict`), in a few words."""
    needed, available = found["needed"], found["available"]
    if needed is None:
        return f"the ratio lies at the limit, more than {MOST_DOCUMENTS:,} documents would be needed"
    if found["name"] == ALL:
        return f"use >= {needed:,} documents in all"
    return f"use >= {needed:,} documents: " + (
        f"--max-documents {needed}" if needed <= available else f"the file has {available:,}"
    )


def check_same_vocabulary(trained: Any, base: Any) -> None:
    """Raise a UserError unless two tokenizers map the same tokens to the same ids: else perplexities do not compare."""
    ours, theirs = trained.get_vocab(), base.get_vocab()
    if ours == theirs:
        return
    token = min(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
    raise UserError(
        "the tokenizers of model and base differ, so their perplexities cannot be compared",
        got=f"{token!r} is {ours.get(token, 'no token')} in the model and {theirs.get(token, 'no token')} in the base",
        command="--base with the checkpoint the model was trained from",
    )


def check_same_size(trained: Any, base: Any) -> None:
    """Raise a UserError unless two transformers configs, of one tokenizer, have the same vocabulary size."""
    if trained.vocab_size != base.vocab_size:
        raise UserError(
            "the vocabulary of model and base is padded to different sizes, so their distributions cannot be compared",
            got=f"{trained.vocab_size} in the model, {base.vocab_size} in the base, with the same tokenizer",
            allowed="one vocab_size in both configs",
            command=f"model.resize_token_embeddings({base.vocab_size}), or --base with the checkpoint trained from",
        )


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


def _finite(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
