"""Perplexity of a trained model against its base on held-out text: the same tokens in the same windows, paired.

A document is tokenised as the tokenizer does by itself (nothing is added, not even a BOS token it would not add) and
cut into windows of `window_length` tokens that do not overlap; a shorter last window is kept if it has two tokens. The
first token of a window is read but not scored. Both models run transformers' own forward, so this measure does not
depend on our decoder. Knows nothing of drafts and of selfspec.json.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from selfspec_tune.errors import UserError
from selfspec_tune.files import read_jsonl, read_text
from selfspec_tune.progress import Progress

HEAD_CHUNK = 128
"""Positions whose logits exist at one time: 128 · V fp32 numbers."""

RESAMPLES, SEED, COVERAGE = 2000, 0, 0.95
"""Bootstrap of the interval: resamples, seed, and the share of them inside."""


@dataclass(frozen=True)
class Quality:
    """Perplexities (e to the nats per token) of base and trained, and trained ÷ base with its bootstrap interval."""

    base: float
    trained: float
    ratio: float
    interval: tuple[float, float]
    limit: float
    """Largest ratio that passes."""
    tokens: int
    """Tokens scored."""

    @property
    def passed(self) -> bool:
        """Whether the measured ratio is within the limit; a ratio that is no number is not."""
        return self.ratio <= self.limit

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON object; numbers that are not finite become null."""
        return {
            "base": _finite(self.base),
            "trained": _finite(self.trained),
            "ratio": _finite(self.ratio),
            "interval": [_finite(bound) for bound in self.interval],
            "limit": self.limit,
            "tokens": self.tokens,
        }


def parse_increase(text: str) -> float:
    """Turn "2%" or "0.02" into 0.02.

    Raises:
        UserError: not a number, negative, or 1 and above without a percent sign (2 is too likely meant as 2%).
    """
    number = text.strip()
    try:
        value = float(number.removesuffix("%")) / (100 if number.endswith("%") else 1)
    except ValueError:
        value = math.nan
    if not 0 <= value < (math.inf if number.endswith("%") else 1):
        raise UserError("max_perplexity_increase is not a share", got=text, allowed="such as 2% or 0.02, not negative")
    return value


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
    """Raise a UserError unless two transformers configs have the same vocabulary size."""
    if trained.vocab_size != base.vocab_size:
        raise UserError(
            "the vocabulary sizes of model and base differ, so their perplexities cannot be compared",
            got=f"{trained.vocab_size} in the model, {base.vocab_size} in the base",
            command="--base with the checkpoint the model was trained from",
        )


def read_windows(
    paths: Iterable[Path], tokenizer: Any, *, text_field: str, window_length: int, max_documents: int
) -> list[Tensor]:
    """Read held-out text and return token windows, int64 [2..window_length] each.

    Args:
        paths: .txt files (one document each) or .jsonl files (one document per record).
        tokenizer: used as it is, one call per document.
        text_field: field of the text in JSONL records.
        window_length: tokens per window, at least 2.
        max_documents: windows taken at most per file, spread evenly over it.

    Raises:
        UserError: a file or record without text, another kind of file, or a file without a single window.
    """
    windows = []
    for path in paths:
        in_file: list[Tensor] = []
        for document in _documents(path, text_field):
            ids = torch.tensor(tokenizer(document, verbose=False)["input_ids"], dtype=torch.long)
            in_file += [window for window in ids.split(window_length) if len(window) > 1]
        if not in_file:
            raise UserError(f"{path} has no text of two tokens", allowed="held-out text, the more the better")
        windows += spread(in_file, max_documents)
    return windows


def spread(items: Sequence[Any], count: int) -> list[Any]:
    """Return `count` items at even distances, all of them if there are no more."""
    if len(items) <= count:
        return list(items)
    return [items[(2 * index + 1) * len(items) // (2 * count)] for index in range(count)]


@torch.inference_mode()
def window_nll(model: Any, windows: Sequence[Tensor], progress: Progress, stage: str) -> Tensor:
    """Return the negative log-likelihood of each window, in nats summed over its tokens but the first: fp64 [N].

    Args:
        model: a transformers causal language model.
        windows: int64 token ids, [2..] each.
        progress, stage: told after every window.

    Raises:
        UserError: a token the model does not know.
    """
    largest = max(int(window.max()) for window in windows)
    if largest >= model.config.vocab_size:
        size = model.config.vocab_size
        raise UserError("the tokenizer has tokens that the model does not know", got=largest, allowed=f"below {size}")
    device, head, sums = model.device, model.get_output_embeddings(), []
    for done, window in enumerate(windows, start=1):
        tokens = window.to(device)
        hidden = model.base_model(input_ids=tokens[None, :-1], use_cache=False).last_hidden_state[0]
        pieces = zip(hidden.split(HEAD_CHUNK), tokens[1:].split(HEAD_CHUNK), strict=True)
        losses = [F.cross_entropy(head(rows).float(), targets, reduction="none") for rows, targets in pieces]
        sums.append(torch.cat(losses).double().sum().cpu())
        progress(stage, done, len(windows))
    return torch.stack(sums)


def compare(trained: Tensor, base: Tensor, counts: Tensor, *, max_increase: float) -> Quality:
    """Compare two models' negative log-likelihoods window by window.

    The ratio is exp(mean difference per token). Its interval is a paired bootstrap over windows: windows, not tokens,
    are drawn again, as tokens of one text are not independent.

    Args:
        trained, base: fp64 [N] nats per window.
        counts: [N] scored tokens per window.
        max_increase: share by which perplexity may rise.
    """
    difference, tokens = trained - base, counts.double()
    generator = torch.Generator().manual_seed(SEED)
    drawn = torch.randint(len(counts), (RESAMPLES, len(counts)), generator=generator)
    means = (difference[drawn].sum(1) / tokens[drawn].sum(1)).sort().values
    outside = int(RESAMPLES * (1 - COVERAGE) / 2)
    low, high = float(means[outside]), float(means[-1 - outside])
    total = float(tokens.sum())
    return Quality(
        base=_exp(float(base.sum()) / total),
        trained=_exp(float(trained.sum()) / total),
        ratio=_exp(float(difference.sum()) / total),
        interval=(_exp(low), _exp(high)),
        limit=1 + max_increase,
        tokens=int(total),
    )


def _documents(path: Path, text_field: str) -> list[str]:
    if path.suffix == ".jsonl":
        documents = []
        for number, record in enumerate(read_jsonl(path), start=1):
            text = record.get(text_field)
            if not isinstance(text, str):
                fields = ", ".join(record) or "an empty record"
                raise UserError(
                    f"{path}: record {number} has no text in {text_field!r}", got=fields, command="--text-field NAME"
                )
            documents.append(text)
        return documents
    if path.suffix == ".txt":
        return [read_text(path)]
    raise UserError("this held-out text cannot be read", got=path, allowed=".txt or .jsonl files")


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
