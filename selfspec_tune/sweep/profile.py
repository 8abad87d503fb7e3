"""Acceptance for every exit layer and every k from one pass over the target's own continuations. Knows no costs.

A continuation x is decoded plainly, then one teacher-forced pass gives the hidden states behind every layer. Given the
text, whether the draft token at position t would stand is an independent event of probability w_t:

- greedy: w_t = [argmax q_t = x_t]. The comparison is with the token x_t that decoding emitted, not with the argmax of
  this pass, whose near-ties may fall otherwise where its calls have other shapes: the engine accepts a draft token
  exactly if it equals what plain decoding emits.
- sampling: w_t = min(1, q_t(x_t)/p_t(x_t)), because P(drafted and accepted | x_t) = q·min(1, p/q)/p. Its mean over
  texts is Σ min(p, q), so α is the mean of the w_t in either case.

From the w_t follows the expected number of rounds that emit the text, hence tokens_per_round, without the assumption
that acceptances are alike or independent of the position. Averaging over all positions instead would be biased: rounds
do not start everywhere.

A reference answer is not the target's own text, so its tokens say nothing of p: there w_t = Σ min(p_t, q_t) (greedy:
[argmax q_t = argmax p_t]) along the answer, and all figures are approximate.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from selfspec_tune.config import MAX_DRAFT_TOKENS, ProfileSource
from selfspec_tune.decode.engine import Engine
from selfspec_tune.decode.requests import Request
from selfspec_tune.decode.sampling import SamplingParams, distribution
from selfspec_tune.errors import UserError
from selfspec_tune.model.cache import SharedKVCache
from selfspec_tune.model.decoder import PREFILL_CHUNK, LayeredDecoder
from selfspec_tune.progress import Progress, silent
from selfspec_tune.sweep.head import ProfileHead
from selfspec_tune.sweep.tally import Profile, PromptTally

HEAD_CHUNK = 256
"""Positions whose logits are held at once, [HEAD_CHUNK, V] per distribution."""

LEAST_WEIGHT = 1e-3
"""Where text is sampled, a w_t certain to be smaller counts as 0: most of an early exit's, seen from few logits."""

TOGETHER = 4
"""Continuations generated in one batch where a row's bits do not depend on the others: the weights are read once."""


@dataclass(frozen=True)
class Prompt:
    """One prompt to profile.

    Attributes:
        domain: what kind of traffic it is; "" if it does not say.
        answer_ids: a reference answer, at most `request.max_new_tokens` tokens; None if it has none.
    """

    request: Request
    domain: str = ""
    answer_ids: tuple[int, ...] | None = None


class Profiler:
    """Profiles prompts with one model, a few at a time.

    Args:
        engine: batch size 1; its numerics are those of the continuations.
        max_draft_tokens: k runs from 1 to this.
    """

    def __init__(self, engine: Engine, params: SamplingParams, max_draft_tokens: int, source: ProfileSource) -> None:
        self.params, self.max_draft_tokens, self.source = params, max_draft_tokens, source
        decoder = engine.decoder
        self.head, self.num_layers = ProfileHead(decoder), decoder.num_layers
        self.together = TOGETHER if decoder.layers_compiled else 1
        self.engine = Engine(
            decoder,
            engine.tokenizer,
            end_tokens=tuple(engine.end_tokens),
            numerics=engine.numerics,
            batch_size=self.together,
        )

    def run(self, prompts: Sequence[Prompt], progress: Progress, *, done: int = 0) -> Iterator[PromptTally]:
        """Profile prompts, a few at a time; `done` others are already."""
        total = done + len(prompts)
        for start in range(0, len(prompts), self.together):
            progress("profile", done + start, total)
            yield from self.tallies(prompts[start : start + self.together])
        progress("profile", total, total)

    @torch.inference_mode()
    def tallies(self, prompts: Sequence[Prompt]) -> list[PromptTally]:
        """Profile up to `together` prompts."""
        begin = time.perf_counter()
        if self.source == "generated":
            completions, _ = self.engine.generate([prompt.request for prompt in prompts], self.params)
            texts = [completion.token_ids for completion in completions]
        else:
            self.engine.claim_decoder()
            texts = [list(prompt.answer_ids or ()) for prompt in prompts]
        generated = time.perf_counter() - begin
        # After generating, the prompts' keys and values are still there: rolling back to a prompt's end is setting an
        # integer. A reference's prompt has to be read here.
        longest = max(len(prompt.request.prompt_ids) + len(text) for prompt, text in zip(prompts, texts, strict=True))
        cache = self.engine.cache_for(longest)
        found = []
        for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
            begin = time.perf_counter()
            view, ids = cache.row(row), prompt.request.prompt_ids
            if self.source == "reference":
                self.engine.decoder.prefill(torch.tensor([ids], device=self.engine.decoder.device), view)
            view.committed.fill_(len(ids))
            tally = self._tally(prompt, text, view)
            seconds = time.perf_counter() - begin
            found.append(replace(tally, generate_seconds=generated / len(prompts), profile_seconds=seconds))
        return found

    def _tally(self, prompt: Prompt, text: list[int], cache: SharedKVCache) -> PromptTally:
        num_exits, positions = self.num_layers - 1, max(0, len(text) - 1)
        own, weights = 0.0, torch.zeros(num_exits, positions, dtype=torch.float64)
        if positions:
            weights, own = acceptance(self.engine.decoder, cache, text, self.params, self.head, self.source)
        counts = [replay(weights, k, prompt.request.max_new_tokens - 1) for k in range(1, self.max_draft_tokens + 1)]
        return PromptTally(
            prompt=prompt.request.id,
            domain=prompt.domain,
            num_tokens=len(text),
            context=len(prompt.request.prompt_ids) + (positions + 1) / 2,
            positions=positions,
            accepted=weights.sum(1).tolist(),
            rounds=[rounds.tolist() for rounds, _ in counts],
            tokens=[tokens.tolist() for _, tokens in counts],
            own=own,
        )


def profile_exits(
    engine: Engine,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    max_draft_tokens: int,
    source: ProfileSource = "generated",
    progress: Progress = silent,
) -> Profile:
    """Profile prompts at every exit, for k = 1..`max_draft_tokens`.

    Args:
        engine: batch size 1; its numerics are those of the continuations.
        prompts: `max_new_tokens` of each bounds its continuation; with `source` reference all have an answer.

    Raises:
        UserError: every continuation ended with its first token, so there was nothing to draft.
    """
    tallies = Profiler(engine, params, max_draft_tokens, source).run(prompts, progress)
    return checked(Profile(engine.decoder.num_layers, list(tallies)))


def checked(profile: Profile) -> Profile:
    """Return the profile without prompts that say nothing; a UserError if that leaves none."""
    kept = [tally for tally in profile.tallies if tally.positions]
    if not kept:
        raise UserError(
            "the continuations are too short to profile: no prompt got a second token",
            got=f"{profile.num_tokens} tokens for {profile.num_prompts} prompts",
            command="other --prompts, or a larger --max-new-tokens",
        )
    return Profile(profile.num_layers, kept)


@torch.inference_mode()
def acceptance(
    decoder: LayeredDecoder,
    cache: SharedKVCache,
    token_ids: list[int],
    params: SamplingParams,
    head: ProfileHead,
    source: ProfileSource = "generated",
) -> tuple[Tensor, float]:
    """Return per exit 1..L − 1 and token 1..n − 1 of a text how likely a draft of that token stands.

    The first token comes from prefill and is never drafted.

    Args:
        cache: batch 1, with the prompt committed.
        token_ids: its continuation of n ≥ 2 tokens, decoded by the same model with `params`, or a reference answer.

    Returns:
        w [L − 1, n − 1] (module docstring), fp64 on the CPU, and of the n − 1 tokens how many the head chooses (greedy)
        or may choose (sampling) behind the last layer: nearly all, unless the head here is not the one decoding used.
    """
    states = head.rows(torch.cat(exit_states(decoder, cache, token_ids[:-1])))
    drafts, final = states[:-1], states[-1]
    tokens = torch.tensor(token_ids[1:], device=decoder.device)
    if params.greedy:
        if source == "reference":
            tokens = torch.cat([head.logits(rows).argmax(-1) for rows in final.split(HEAD_CHUNK)])
        stands = head.choose(drafts.flatten(0, 1), tokens.repeat(len(drafts))).view(drafts.shape[:2])
        return stands.double().cpu(), float(head.choose(final, tokens).sum())
    if source == "reference":
        return _overlap(head, drafts, final, params).cpu(), float(len(tokens))
    # Rounding may put x just outside top-k or top-p here: then any draft of it stands.
    p = chosen_probability(head, final, tokens, params).clamp_min(1e-30)
    q = chosen_probability(head, drafts.flatten(0, 1), tokens.repeat(len(drafts)), params, p.repeat(len(drafts)))
    return (q.view(drafts.shape[:2]) / p).clamp_max(1).cpu(), float((p > 1e-30).sum())


def chosen_probability(
    head: ProfileHead, rows: Tensor, tokens: Tensor, params: SamplingParams, against: Tensor | None = None
) -> Tensor:
    """Return what `distribution` gives one token per row: rows [N, d], tokens [N] → fp64 [N].

    Args:
        against: [N], p of a ratio q/p that is cut at 1. With it a ratio certain to be below `LEAST_WEIGHT` counts as 0,
            one certain to be above 1 is not computed further, and under top-p one is taken from its bounds where these
            are within 1 %: a set that reaches p holds at most the probability of its least token more.
    """
    limit = torch.full_like(rows[:, 0], torch.inf, dtype=torch.float64) if against is None else against
    least = torch.zeros_like(limit)
    if against is not None and not params.top_k:
        least = LEAST_WEIGHT * params.top_p * limit
    chosen, above = head.masses(rows, tokens, params.temperature, least.float(), params.top_k or head.vocab_size)
    chosen = chosen.double()
    if not params.top_k and params.top_p == 1:
        return chosen
    found, open_ = torch.zeros_like(chosen), (chosen > 0) & (above < params.top_p + 1e-4)
    if not params.top_k:
        high, low = chosen / params.top_p, chosen / (params.top_p + chosen).clamp_max(1)
        known = (low >= limit) | (high <= 1.01 * low)
        known &= open_ & (above < params.top_p - 1e-4) & (limit < torch.inf)
        found = torch.where(known, (high + low) / 2, found)
        open_ &= ~known
    for part in open_.nonzero()[:, 0].split(HEAD_CHUNK):
        kept = distribution(head.logits(rows[part]), params)
        found[part] = kept.gather(1, tokens[part, None])[:, 0].double()
    return found


def _overlap(head: ProfileHead, drafts: Tensor, final: Tensor, params: SamplingParams) -> Tensor:
    """Return Σ min(p, q) at every exit and position, fp64 [X, n], from rows [X, n, d] and [n, d]."""
    found = []
    for rows, exits in zip(final.split(HEAD_CHUNK), drafts.split(HEAD_CHUNK, 1), strict=True):
        target = distribution(head.logits(rows), params)
        minima = [torch.minimum(distribution(head.logits(draft), params), target).sum(-1) for draft in exits]
        found.append(torch.stack(minima).double())
    return torch.cat(found, 1)


def exit_states(decoder: LayeredDecoder, cache: SharedKVCache, token_ids: list[int]) -> list[Tensor]:
    """Return the hidden states [1, n, d] behind each of the L layers at n tokens after what `cache` has committed.

    Where ops are compiled they are those of decoding, bit for bit, in calls of as few rows as a verification has: then
    near-ties fall as they do when decoding, in low precision too. Elsewhere it is a prefill.
    """
    states: list[list[Tensor]] = [[] for _ in range(decoder.num_layers)]
    as_decoded = decoder.layers_compiled
    rows = MAX_DRAFT_TOKENS if as_decoded else PREFILL_CHUNK
    for chunk in torch.tensor([token_ids], device=decoder.device).split(rows, dim=1):
        hidden = decoder.embed(chunk)
        positions = cache.committed[:, None] + torch.arange(chunk.shape[1], device=decoder.device)
        for layer, found in enumerate(states):
            hidden = decoder.run_layers(hidden, positions, cache, layer, layer + 1, pad=as_decoded)
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
    stands, length = weights.numpy(), weights.shape[1]
    rounds, tokens = np.zeros((2, length + 1, weights.shape[0]))

    def end_round(start: int, end: int, probability: np.ndarray) -> None:
        """Add to `start` what follows if its round emits the tokens up to `end`."""
        rounds[start] += probability * rounds[end]
        tokens[start] += probability * (end - start + tokens[end])

    for start in range(length - 1, -1, -1):
        drafted = min(k, budget - start - 1)
        if drafted == 0:
            rounds[start], tokens[start] = rounds[start + 1], tokens[start + 1]
            continue
        rounds[start] = 1
        reached = np.ones(weights.shape[0])
        for position in range(start, min(start + drafted, length)):
            end_round(start, position + 1, reached * (1 - stands[:, position]))
            reached = reached * stands[:, position]
        end_round(start, min(start + drafted + 1, length), reached)
    return torch.from_numpy(rounds[0]), torch.from_numpy(tokens[0])
