"""Which drafter to use, whether to speculate with it, and why: from predictions and what the clock confirmed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from selfspec_tune.sweep.candidates import Candidate
from selfspec_tune.sweep.confirm import Confirmed


@dataclass(frozen=True)
class Decision:
    """The best drafter, its measured speed-up where it was tried, whether to speculate with it, and why."""

    candidate: Candidate
    confirmed: Confirmed | None
    enabled: bool
    reason: str


def ranked_candidates(candidates: list[Candidate]) -> list[Candidate]:
    """Return candidates by predicted speed-up, the best first; the first of each kind of drafter before any second."""
    order = sorted(candidates, key=lambda candidate: (-candidate.speedup_predicted, candidate.label))
    firsts = {candidate.settings.drafter: candidate for candidate in reversed(order)}
    return sorted(order, key=lambda candidate: candidate is not firsts[candidate.settings.drafter])


def decide(
    candidates: list[Candidate], confirmed: list[Confirmed], why: str, *, exact: bool, must_confirm: bool
) -> Decision:
    """Choose a drafter and say whether to speculate with it, and why, and what the runner-up lacks.

    Args:
        candidates: those that may be chosen, ranked; not empty.
        confirmed: measurements of some of them; may be empty.
        why: what keeps the best cell of layer skip from paying.
        exact: tokens other than plain decoding's are an error.
        must_confirm: a prediction alone does not enable speculation.
    """
    by_label = {candidate.label: candidate for candidate in candidates}
    passing = [
        r for r in confirmed if r.low > 1.0 and r.drafted_share > 0 and by_label[r.label].speedup_predicted > 1.0
    ]
    best, result = candidates[0], max(passing or confirmed, key=lambda result: result.speedup, default=None)
    if result is not None:
        best = by_label[result.label]
    predicted = f"{best.label} with k = {best.num_draft_tokens} is predicted at ×{best.speedup_predicted:.2f}"
    predicted += " of plain decoding"
    if result is None:
        measured = "not confirmed by decoding"
    else:
        measured = f"decoding {result.num_prompts} prompts measured ×{result.speedup:.2f} (spread {result.spread:.0%})"
        if result.speedup > 1.0 >= result.low:
            measured += f", which may be noise: a quarter of the runs stayed below ×{result.low:.2f}"
    if exact and any(tried.identical is False for tried in confirmed):
        return Decision(best, result, False, f"{predicted}, but speculation changed tokens; see selfspec check MODEL")
    if best.speedup_predicted <= 1.0:
        of_grid = best.settings.drafter == "layer-skip" and best.settings.draft_vocab is None
        cause = why if of_grid else _why_not(best)
        return Decision(best, result, False, f"{cause}, so {predicted}; {measured}")
    if not passing if result else must_confirm:
        return Decision(best, result, False, f"{predicted}, but {measured}")
    others = [candidate for candidate in candidates if candidate is not best]
    return Decision(best, result, True, f"{predicted}; {measured}{_runner_up(best, others, confirmed)}")


def _why_not(candidate: Candidate) -> str:
    alpha = "nothing was drafted" if candidate.alpha is None else f"α = {candidate.alpha:.2f}"
    return (
        f"{candidate.label}: a step emits {candidate.tokens_per_step:.2f} tokens and costs "
        f"{candidate.cost_per_step:.2f} plain steps ({alpha}, c = {candidate.cost_ratio:.2f}, "
        f"v = {candidate.verify_ratio:.2f})"
    )


def _runner_up(best: Candidate, others: list[Candidate], confirmed: list[Confirmed]) -> str:
    """Say which drafter comes second, and whether it lacks tokens or costs too much."""
    speeds = {result.label: result.speedup for result in confirmed}
    tried = [other for other in others if other.label in speeds]
    second = max(tried or others, key=lambda o: speeds.get(o.label, o.speedup_predicted), default=None)
    if second is None:
        return ""
    lacks = []
    if second.tokens_per_step < best.tokens_per_step:
        lacks.append(f"its steps emit fewer tokens ({second.tokens_per_step:.2f} against {best.tokens_per_step:.2f})")
    if second.cost_per_step > best.cost_per_step:
        lacks.append(f"its steps cost more ({second.cost_per_step:.2f} against {best.cost_per_step:.2f} plain steps)")
    how = "measured" if tried else "not tried, predicted"
    speed = speeds.get(second.label, second.speedup_predicted)
    return f". Runner-up: {second.label}, {how} ×{speed:.2f}" + (f": {' and '.join(lacks)}" if lacks else "")


def off_everywhere(choice: Decision, by_context: Sequence[dict[str, Any]]) -> Decision:
    """Switch a choice off that no context length would use, see `breakdown`."""
    if not choice.enabled or any(entry["num_draft_tokens"] for entry in by_context):
        return choice
    why = f"{choice.candidate.label} pays at none of the context lengths measured"
    if choice.candidate.settings.drafter == "layer-skip" and choice.candidate.num_draft_tokens == 1:
        why += " with more than one draft token, and what one gains is lost to any change of traffic"
    return replace(choice, enabled=False, reason=f"{why}: {choice.reason}")
