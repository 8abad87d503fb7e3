"""Score documents with the trained model, then with its base beside what was kept of the trained one.

Only one model is loaded at a time, yet the divergence needs the logits of both at every token. So the trained model's
final hidden states and its LM head are kept, and its logits are computed again, chunk by chunk, while the base runs.
Both models run transformers' own forward, so this measure does not depend on our decoder.

Memory beside one model: in host memory tokens · d numbers and the head, V · (d + 1) numbers, in the dtype scored in;
on the device a copy of that head, and HEAD_CHUNK · V fp32 numbers a few times over.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from selfspec_tune.errors import UserError
from selfspec_tune.progress import Progress
from selfspec_tune.regress.documents import Document

HEAD_CHUNK = 128
"""Positions whose logits exist at one time."""


@dataclass(frozen=True)
class Trained:
    """What is kept of the trained model: enough to compute its logits again without it.

    Attributes:
        nll: nats summed over each document's scored tokens, fp64 [N].
        hidden: per window, in order, the hidden states after the final norm [T − 1, d], in host memory.
        weight, bias: the LM head's [V, d], and [V] or None, in host memory.
    """

    nll: Tensor
    hidden: list[Tensor]
    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class Scores:
    """Sums over each document's scored tokens, fp64 [N] each: both models on the same tokens.

    Attributes:
        trained, base: negative log-likelihoods, nats.
        kl: KL(base‖trained) over the whole vocabulary, nats.
        agreeing: tokens where both models' most probable token is the same.
        counts: scored tokens.
    """

    trained: Tensor
    base: Tensor
    kl: Tensor
    agreeing: Tensor
    counts: Tensor

    def part(self, start: int, stop: int) -> Scores:
        """Return the documents from `start` up to `stop`."""
        fields = (self.trained, self.base, self.kl, self.agreeing, self.counts)
        return Scores(*(field[start:stop] for field in fields))


@torch.inference_mode()
def score_trained(model: Any, documents: Sequence[Document], progress: Progress) -> Trained:
    """Score `documents` with a transformers causal language model and keep what the comparison needs.

    Raises:
        UserError: a token the model does not know.
    """
    head, hidden = model.get_output_embeddings(), []
    nll = torch.zeros(len(documents), dtype=torch.float64, device=model.device)
    for index, states, targets in _forward(model, documents, progress, "perplexity of the model"):
        for rows, ids in zip(states.split(HEAD_CHUNK), targets.split(HEAD_CHUNK), strict=True):
            nll[index] += _nll(head(rows).float().log_softmax(-1), ids)
        hidden.append(states.cpu())
    bias = head.bias.cpu() if getattr(head, "bias", None) is not None else None
    return Trained(nll.cpu(), hidden, head.weight.detach().cpu(), bias)


@torch.inference_mode()
def score_base(model: Any, documents: Sequence[Document], trained: Trained, progress: Progress) -> Scores:
    """Score the same documents with the base, and compare the two models' distributions token by token.

    Args:
        model: the base; its vocabulary must have the size of the trained model's.
        trained: what `score_trained` kept.

    Raises:
        UserError: a token the model does not know.
    """
    head, device = model.get_output_embeddings(), model.device
    weight = trained.weight.to(device)
    bias = trained.bias.to(device) if trained.bias is not None else None
    sums = torch.zeros(len(documents), 3, dtype=torch.float64, device=device)
    forward = _forward(model, documents, progress, "perplexity of the base")
    for (index, states, targets), kept in zip(forward, trained.hidden, strict=True):
        for rows, others, ids in zip(*(t.split(HEAD_CHUNK) for t in (states, kept.to(device), targets)), strict=True):
            p = head(rows).float().log_softmax(-1)
            q = F.linear(others, weight, bias).float().log_softmax(-1)
            divergence = (p.exp() * (p - q)).sum(-1).double().sum()
            agreeing = (p.argmax(-1) == q.argmax(-1)).sum().double()
            sums[index] += torch.stack([_nll(p, ids), divergence, agreeing])
    base, kl, agreeing = sums.cpu().unbind(1)
    counts = torch.tensor([document.scored for document in documents], dtype=torch.float64)
    return Scores(trained.nll, base, kl, agreeing, counts)


def _forward(
    model: Any, documents: Sequence[Document], progress: Progress, stage: str
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield per window: its document's number, hidden states [T − 1, d], and the tokens they predict [T − 1]."""
    largest = max(int(window.max()) for document in documents for window in document.windows)
    if largest >= model.config.vocab_size:
        size = model.config.vocab_size
        raise UserError("the tokenizer has tokens that the model does not know", got=largest, allowed=f"below {size}")
    total, done = sum(len(document.windows) for document in documents), 0
    for index, document in enumerate(documents):
        for window in document.windows:
            tokens = window.to(model.device)
            hidden = model.base_model(input_ids=tokens[None, :-1], use_cache=False).last_hidden_state[0]
            yield index, hidden, tokens[1:]
            done += 1
            progress(stage, done, total)


def _nll(log_probabilities: Tensor, targets: Tensor) -> Tensor:
    return -log_probabilities.gather(1, targets[:, None]).double().sum()
