"""Decode held-out prompts with the chosen cells and plainly, in turn, in one process: the measured speed-up.

A busy machine slows neighbouring runs alike, so only ratios of neighbours are kept, and of those the median.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from selfspec_tune.decode.drafters.layer_skip import LayerSkipDrafter
from selfspec_tune.decode.engine import Engine, Request
from selfspec_tune.decode.policy import DraftPolicy
from selfspec_tune.decode.sampling import SamplingParams
from selfspec_tune.decode.stats import Stats
from selfspec_tune.progress import Progress, silent
from selfspec_tune.sweep.timing import spread

CONFIRM_PROMPTS = 6
"""Prompts decoded to confirm a cell; the profile leaves them out where the file holds more than it uses."""
CONFIRM_TOKENS = 64
"""Tokens of each at most."""
CONFIRM_ROUNDS = 2
"""Times each prompt is decoded plainly and speculatively, in turn."""


@dataclass(frozen=True)
class Confirmed:
    """A cell decoded for real: median `speedup` over prompts and turns, `spread` its interquartile range over median.

    `identical` says whether all tokens equal plain decoding's; None where they are sampled and need not.
    """

    exit_layer: int
    num_draft_tokens: int
    speedup: float
    spread: float
    identical: bool | None
    tokens_per_round: float | None
    num_prompts: int
    num_tokens: int


def held_out(requests: Sequence[Request], num_profiled: int) -> list[Request]:
    """Return requests to confirm with: those behind the profiled ones, else the last profiled; of fewer tokens."""
    unseen = requests[num_profiled:][:CONFIRM_PROMPTS]
    taken = unseen or requests[-CONFIRM_PROMPTS:]
    return [replace(r, max_new_tokens=min(r.max_new_tokens, CONFIRM_TOKENS)) for r in taken]


def confirm(
    engine: Engine,
    requests: list[Request],
    params: SamplingParams,
    cells: Sequence[tuple[int, int]],
    progress: Progress = silent,
) -> list[Confirmed]:
    """Decode `requests` plainly and with each cell (exit layer, k) in turn, A B A B; compare times and tokens.

    A cell is left out where no request got a second token.
    """
    results, done, total = [], 0, len(cells) * CONFIRM_ROUNDS * len(requests)
    for exit_layer, k in cells:
        drafter = LayerSkipDrafter(engine.decoder, exit_layer)
        ratios, identical, tokens, rounds, accepted = [], True, 0, 0, 0
        for request in requests * CONFIRM_ROUNDS:
            progress("confirm", done, total)
            [plain], plain_stats = engine.generate([request], params)
            [fast], stats = engine.generate([request], params, drafter, DraftPolicy(k))
            done += 1
            identical &= plain.token_ids == fast.token_ids
            tokens, rounds, accepted = tokens + stats.emitted, rounds + stats.rounds, accepted + stats.accepted
            if plain_stats.emitted > 1 and stats.emitted > 1:
                ratios.append(seconds_per_token(plain_stats) / seconds_per_token(stats))
        if ratios:
            results.append(
                Confirmed(
                    exit_layer=exit_layer,
                    num_draft_tokens=k,
                    speedup=median(ratios),
                    spread=spread(ratios),
                    identical=identical if params.greedy else None,
                    tokens_per_round=(accepted + rounds) / rounds if rounds else None,
                    num_prompts=len(requests),
                    num_tokens=tokens // CONFIRM_ROUNDS,
                )
            )
    progress("confirm", total, total)
    return results


def seconds_per_token(stats: Stats) -> float:
    """Return decoding seconds per token; prefill and the token it gives are left out on both sides."""
    return (stats.total_seconds - stats.prefill_seconds) / (stats.emitted - 1)
