"""Decode held-out prompts with the best drafters and plainly, in turn, in one process: the measured speed-up.

A busy machine slows neighbouring runs alike, so only ratios of neighbours are kept, and of those the median.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median, quantiles

from selfspec_tune.decode.requests import Request
from selfspec_tune.decode.sampling import SamplingParams
from selfspec_tune.decode.stats import Stats
from selfspec_tune.sweep.candidates import Candidate, Trials
from selfspec_tune.sweep.objective import spread
from selfspec_tune.sweep.profile import Prompt

CONFIRM_PROMPTS = 6
"""Prompts decoded to confirm a drafter; the profile leaves them out where the file holds more than it uses."""
CONFIRM_TOKENS = 64
"""Tokens of each at most."""
CONFIRM_ROUNDS = 2
"""Times each prompt is decoded plainly and speculatively, in turn."""
WARM_UPS = 2
"""Decodings of the longest prompt before those timed, on a GPU."""


@dataclass(frozen=True)
class Confirmed:
    """A drafter decoded for real, with the policy that decides round by round how many tokens to draft.

    Attributes:
        label: the candidate's.
        speedup: over plain decoding, median over prompts and turns; `spread` its interquartile range over median.
        low: the lower quartile; it must be above 1, as a drafter that is never used measures 1 and noise.
        identical: whether all tokens equal plain decoding's; None where they are sampled and need not.
        alpha: of the `num_tested` draft tokens tested how many stood; None where none was tested.
        drafted_share: of the decoded tokens how many came from rounds that drafted; the others from plain steps.
    """

    label: str
    speedup: float
    low: float
    spread: float
    identical: bool | None
    tokens_per_round: float | None
    drafted_share: float
    num_prompts: int
    num_tokens: int
    alpha: float | None = None
    num_tested: int = 0


def split(prompts: Sequence[Prompt], num_prompts: int) -> tuple[list[Prompt], list[Request]]:
    """Return the prompts to profile, at most `num_prompts`, and others to confirm with, of fewer tokens.

    Of few prompts up to half confirm. A single one has to do for both.
    """
    count = min(num_prompts, max(len(prompts) - CONFIRM_PROMPTS, (len(prompts) + 1) // 2))
    others = [prompt.request for prompt in prompts[count:][:CONFIRM_PROMPTS] or prompts]
    return list(prompts[:count]), [replace(r, max_new_tokens=min(r.max_new_tokens, CONFIRM_TOKENS)) for r in others]


def confirm(
    trials: Trials, requests: list[Request], params: SamplingParams, candidates: Sequence[Candidate]
) -> list[Confirmed]:
    """Decode `requests` plainly and with each candidate in turn, A B A B; compare times and tokens.

    A candidate is left out where no request got a second token.
    """
    results, done, total = [], 0, len(candidates) * CONFIRM_ROUNDS * len(requests)
    engine = trials.engine
    for candidate in candidates:
        drafter, policy = trials.drafter(candidate.settings), candidate.policy(trials.config.max_draft_tokens)
        ratios, identical, counted = [], True, Stats()
        if engine.decoder.device.type == "cuda":
            # Kernels are compiled and rounds recorded at their first calls, which are no decoding.
            longest = max(requests, key=lambda request: len(request.prompt_ids) + request.max_new_tokens)
            for _ in range(WARM_UPS):
                engine.generate([longest], params)
                engine.generate([longest], params, drafter, candidate.policy(trials.config.max_draft_tokens))
        for number, request in enumerate(requests * CONFIRM_ROUNDS):
            trials.progress("confirm", done, total)
            if number == len(requests):
                # The policy shall not know these prompts from the turn before.
                policy = candidate.policy(trials.config.max_draft_tokens)
            # Whoever comes first finds colder caches: they change places.
            order = [(None, None), (drafter, policy)][:: 1 - 2 * (number % 2)]
            runs = [engine.generate([request], params, *how) for how in order][:: 1 - 2 * (number % 2)]
            ([plain], plain_stats), ([fast], stats) = runs
            done += 1
            identical &= plain.token_ids == fast.token_ids
            counted.add(stats)
            if plain_stats.emitted > 1 and stats.emitted > 1:
                ratios.append(seconds_per_token(plain_stats) / seconds_per_token(stats))
        if ratios:
            rounds, decoded = counted.rounds, counted.emitted - counted.from_prefill
            results.append(
                Confirmed(
                    label=candidate.label,
                    speedup=median(ratios),
                    low=quantiles(ratios, n=4, method="inclusive")[0] if len(ratios) > 1 else ratios[0],
                    spread=spread(ratios),
                    identical=identical if params.greedy else None,
                    tokens_per_round=(counted.accepted + rounds) / rounds if rounds else None,
                    drafted_share=1 - counted.plain_steps / decoded,
                    num_prompts=len(requests),
                    num_tokens=counted.emitted // CONFIRM_ROUNDS,
                    alpha=counted.alpha,
                    num_tested=counted.tested,
                )
            )
    trials.progress("confirm", total, total)
    return results


def seconds_per_token(stats: Stats) -> float:
    """Return decoding seconds per token; prefill and the token it gives are left out on both sides."""
    return (stats.total_seconds - stats.prefill_seconds) / (stats.emitted - 1)
