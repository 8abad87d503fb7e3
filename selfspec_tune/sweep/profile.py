"""Acceptance for every exit layer and every k from one pass over the target's own continuations. Knows no costs.

A continuation x is decoded plainly, then one teacher-forced pass gives the hidden states behind every layer. Given the
text, whether the draft token at position t would stand is an independent event of probability w_t:

- greedy: w_t = [argmax q_t = x_t]. The comparison is with the token x_t that decoding emitted, not with the argmax of
  this pass: its calls have other shapes, so in low precision its near-ties may fall otherwise, while the engine accepts
  a draft token exactly if it equals what plain decoding emits.
- sampling: w_t = min(1, q_t(x_t)/p_t(x_t)), because P(drafted and accepted | x_t) = q·min(1, p/q)/p.

From the w_t follows the expected number of rounds that emit the text, hence tokens_per_round, without the assumption
that acceptances are alike or independent of the position. Averaging over all positions instead would be biased: rounds
do not start everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from selfspec_tune.decode.engine import Engine, Request
from selfspec_tune.decode.sampling import SamplingParams, distribution
from selfspec_tune.errors import UserError
from selfspec_tune.model.cache import SharedKVCache
from selfspec_tune.model.decoder import PREFILL_CHUNK, LayeredDecoder
from selfspec_tune.model.layer import rms_norm
from selfspec_tune.progress import Progress, silent

Head = Callable[[Tensor], Tensor]

HEAD_CHUNK = 64
"""Positions whose logits are held at once, [HEAD_CHUNK, V] per distribution."""


@dataclass(frozen=True)
class Profile:
    """Acceptance on a set of prompts.

    Attributes:
        num_layers: L; exits are 1..L − 1.
        alpha: exit layer → mean acceptance probability of a draft token.
        tokens_per_round: (exit layer, k) → mean tokens emitted per round.
        num_prompts, num_tokens: prompts profiled and tokens emitted for them.
        plain_tokens_per_second: of plain decoding on the way, prefill not counted.
    """

    num_layers: int
    alpha: dict[int, float]
    tokens_per_round: dict[tuple[int, int], float]
    num_prompts: int
    num_tokens: int
    plain_tokens_per_second: float


@torch.inference_mode()
def profile_exits(
    engine: Engine,
    requests: Sequence[Request],
    params: SamplingParams,
    max_draft_tokens: int,
    progress: Progress = silent,
) -> Profile:
    """Decode each request plainly and measure acceptance at every exit, for k = 1..`max_draft_tokens`.

    Args:
        engine: batch size 1; its numerics are those of the continuations.
        requests: prompts; `max_new_tokens` of each bounds its continuation.

    Raises:
        UserError: every continuation ended with its first token, so there was nothing to draft.
    """
    num_exits, head = engine.decoder.num_layers - 1, profile_head(engine.decoder)
    accepted = torch.zeros(num_exits, dtype=torch.float64)
    rounds, emitted = (torch.zeros(max_draft_tokens, num_exits, dtype=torch.float64) for _ in range(2))
    positions, num_tokens, seconds = 0, 0, 0.0
    for number, request in enumerate(requests):
        progress("profile", number, len(requests))
        [completion], stats = engine.generate([request], params)
        length = len(completion.token_ids)
        num_tokens += length
        if length < 2:
            continue
        seconds += stats.total_seconds - stats.prefill_seconds
        # The prompt's keys and values are still there: rolling back to its end is setting an integer.
        cache = engine.cache_for(len(request.prompt_ids) + length)
        cache.committed.fill_(len(request.prompt_ids))
        weights, overlap = acceptance(engine.decoder, cache, completion.token_ids, params, head)
        positions += weights.shape[1]
        accepted += overlap.sum(1)
        for k in range(1, max_draft_tokens + 1):
            counts = replay(weights, k, request.max_new_tokens - 1)
            rounds[k - 1] += counts[0]
            emitted[k - 1] += counts[1]
    progress("profile", len(requests), len(requests))
    if positions == 0 or not bool((rounds > 0).all()):
        raise UserError(
            "the continuations are too short to profile: no prompt got a second token",
            got=f"{num_tokens} tokens for {len(requests)} prompts",
            command="other --prompts, or a larger --max-new-tokens",
        )
    return Profile(
        num_layers=num_exits + 1,
        alpha={index + 1: value / positions for index, value in enumerate(accepted.tolist())},
        tokens_per_round={
            (index + 1, k + 1): value
            for k, row in enumerate((emitted / rounds).tolist())
            for index, value in enumerate(row)
        },
        num_prompts=len(requests),
        num_tokens=num_tokens,
        plain_tokens_per_second=positions / seconds,
    )


@torch.inference_mode()
def acceptance(
    decoder: LayeredDecoder, cache: SharedKVCache, token_ids: list[int], params: SamplingParams, head: Head
) -> tuple[Tensor, Tensor]:
    """Return per exit 1..L − 1 and token 1..n − 1 of a continuation how likely a draft of that token stands.

    The first token comes from prefill and is never drafted.

    Args:
        cache: batch 1, with the prompt committed.
        token_ids: its continuation of n ≥ 2 tokens, decoded by the same model with `params`.
        head: from `profile_head`.

    Returns:
        weights [L − 1, n − 1]: w given the text (module docstring), and overlap [L − 1, n − 1]: what α averages,
        Σ min(p, q) where tokens are sampled, the weights themselves in greedy decoding. Both fp64, on the CPU.
    """
    states = exit_states(decoder, cache, token_ids[:-1])
    tokens = torch.tensor(token_ids[1:], device=decoder.device)
    weights, overlap = [], []
    for begin in range(0, len(tokens), HEAD_CHUNK):
        chunk = slice(begin, begin + HEAD_CHUNK)
        chosen = tokens[chunk, None]
        if params.greedy:
            drafts = [head(state[0, chunk]).argmax(-1) for state in states[:-1]]
            weights.append(torch.stack([draft == chosen[:, 0] for draft in drafts]).double())
            overlap.append(weights[-1])
            continue
        target = distribution(head(states[-1][0, chunk]), params)
        p = target.gather(1, chosen).double().clamp_min(1e-300)  # rounding may put x just outside top-k or top-p here
        ratios, minima = [], []
        for state in states[:-1]:
            draft = distribution(head(state[0, chunk]), params)
            ratios.append((draft.gather(1, chosen).double() / p).clamp_max(1)[:, 0])
            minima.append(torch.minimum(draft, target).sum(-1).double())
        weights.append(torch.stack(ratios))
        overlap.append(torch.stack(minima))
    return torch.cat(weights, 1).cpu(), torch.cat(overlap, 1).cpu()


def profile_head(decoder: LayeredDecoder) -> Head:
    """Return final norm and head as hidden states [C, d] → fp32 logits [C, V].

    On a CPU a low-precision head is computed in fp32 and rounded to that precision, which is what a product with fp32
    accumulation gives, and several times faster where the CPU has no such arithmetic: this is most of a profile's time.
    """
    weight, bias = decoder.head
    if decoder.device.type != "cpu" or weight.dtype == torch.float32:
        return lambda hidden: decoder.logits(hidden[None], pad=False)[0]
    norm = decoder.final_norm
    wide, wide_bias = weight.float(), bias.float() if bias is not None else None
    return lambda hidden: F.linear(rms_norm(hidden, norm).float(), wide, wide_bias).to(weight.dtype).float()


def exit_states(decoder: LayeredDecoder, cache: SharedKVCache, token_ids: list[int]) -> list[Tensor]:
    """Return the hidden states [1, n, d] behind each of the L layers at n tokens after what `cache` has committed."""
    states: list[list[Tensor]] = [[] for _ in range(decoder.num_layers)]
    for chunk in torch.tensor([token_ids], device=decoder.device).split(PREFILL_CHUNK, dim=1):
        hidden = decoder.embed(chunk)
        positions = cache.committed[:, None] + torch.arange(chunk.shape[1], device=decoder.device)
        for layer, found in enumerate(states):
            hidden = decoder.run_layers(hidden, positions, cache, layer, layer + 1, pad=False)
            found.append(hidden)
        cache.committed += chunk.shape[1]
    return [torch.cat(found, 1) for found in states]


def replay(weights: Tensor, k: int, budget: int) -> tuple[Tensor, Tensor]:
    """Return the expected number of rounds that emit a text, and of tokens they emit, per exit.

    Backward over the positions t at which a round may start: it drafts m = min(k, left − 1) tokens, where `left` counts
    to the budget even if the text ends earlier (as the engine does), and emits up to and including the first token not
    accepted, or m + 1, cut at the text's end. With m = 0 the engine takes a plain step, which is no round. Weights of 0
    and 1 make this the plain replay of greedy decoding, in whole numbers.

    Args:
        weights: [X, n] probability that the draft of each token stands, the first token after prefill's excluded.
        k: draft tokens per round.
        budget: tokens that may be emitted after prefill's, max_new_tokens − 1; n ≤ budget.

    Returns:
        rounds [X] and tokens [X], fp64.
    """
    num_exits, length = weights.shape
    rounds = weights.new_zeros(length + 1, num_exits)
    tokens = weights.new_zeros(length + 1, num_exits)
    for start in range(length - 1, -1, -1):
        drafted = min(k, budget - start - 1)
        if drafted == 0:
            rounds[start], tokens[start] = rounds[start + 1], tokens[start + 1]
            continue
        stands = torch.ones_like(weights[:, 0])
        rounds[start] = 1
        for position in range(start, min(start + drafted, length)):
            rejected = stands * (1 - weights[:, position])
            _end_round(rounds, tokens, start, position + 1, rejected)
            stands = stands * weights[:, position]
        _end_round(rounds, tokens, start, min(start + drafted + 1, length), stands)
    return rounds[0], tokens[0]


def _end_round(rounds: Tensor, tokens: Tensor, start: int, end: int, probability: Tensor) -> None:
    """Add to `start` what follows if its round emits the tokens up to `end`, which happens with `probability` [X]."""
    rounds[start] += probability * rounds[end]
    tokens[start] += probability * (end - start + tokens[end])
