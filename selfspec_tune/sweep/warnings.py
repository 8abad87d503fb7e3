"""What a reader of a sweep should know before believing it. Each check returns lines of text, none if all is well."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

from selfspec_tune.sweep.candidates import Candidate
from selfspec_tune.sweep.confirm import Confirmed
from selfspec_tune.sweep.objective import Cell, Costs
from selfspec_tune.sweep.tally import Profile

ADVISED_PROMPTS = 200
"""Prompts from which intervals are narrow enough for most choices."""
NOISY = 0.15
"""Spread of the plain step, interquartile range over median, from which costs are called noisy."""
COMPOSED = (0.8, 1.25)
"""A plain step composed from its pieces over the one measured whole lies between these, or the clock is wrong."""
LEAST_OWN = 0.9
"""Share of the decoded tokens that the profile's head must choose behind the last layer."""
COLLAPSED = 0.1
"""Where even the deepest exit is accepted less often than this, no exit is worth much: or its norm is missing."""
FAR_BELOW = 0.5
"""Part of the profile's α from which the α of real decoding is called far below it."""
SURE = 3
"""Standard deviations below which it must lie besides: a policy soon leaves a drafter that fails, so few are tested."""


def of_profile(profile: Profile, *, approximate: bool) -> list[str]:
    """Check the number of prompts, and that the head here is the one decoding uses."""
    lines = []
    if profile.num_prompts < ADVISED_PROMPTS:
        lines.append(
            f"only {profile.num_prompts} prompts were profiled: {ADVISED_PROMPTS} to 500 are advised; see the intervals"
        )
    if approximate:
        lines.append(
            "approximate: reference answers were profiled, not the model's own text; --source generated is exact"
        )
    deepest = profile.num_layers - 1
    if profile.own < LEAST_OWN:
        lines.append(
            f"check the norm: behind the last layer the head chooses {profile.own:.0%} of the tokens that decoding "
            "chose instead of all, so every α here is wrong; the final norm, or the head, is not the one decoding uses"
        )
    elif profile.alpha[deepest] < COLLAPSED:
        lines.append(
            f"check the norm: even exit {deepest} of {profile.num_layers} has α = {profile.alpha[deepest]:.2f}; exits "
            "need the final norm before the head, and a model trained with exits must have been trained so"
        )
    return lines


def of_costs(costs: Sequence[Costs], best: Cell | None, parts: tuple[float, float]) -> list[str]:
    """Check that the clock and the machine can be believed, and that the best cell is decided.

    Args:
        best: the best cell of layer skip; None where it is not asked for.
        parts: widths of its interval from the costs alone, and from the prompts alone.
    """
    lines = []
    for each in costs:
        where = f"at {each.context_length} tokens, batch {each.batch_size}"
        if not COMPOSED[0] <= each.composed_over_measured <= COMPOSED[1]:
            lines.append(
                f"the pieces of a plain step add up to {each.composed_over_measured:.2f} of the step {where}: the "
                "clock did not wait for the device, or the machine is too noisy to measure costs on"
            )
        elif each.spread() > NOISY:
            lines.append(
                f"costs are noisy {where}: the plain step spreads by {each.spread():.0%}; a quiet machine or a larger "
                "--repeats helps"
            )
    low, high = best.interval if best else (0.0, 0.0)
    if best and low < 1 < high:
        noisier = parts[0] > parts[1]
        cure = "--repeats, or a quiet machine" if noisier else "--num-prompts"
        cause = "the spread of the costs" if noisier else "so few prompts"
        lines.append(
            f"{cause} cannot decide whether layer skip pays: exit {best.exit_layer}, k = {best.num_draft_tokens} is "
            f"predicted at ×{low:.2f} to ×{high:.2f}; more {cure} would"
        )
    return lines


def of_confirmed(candidates: Sequence[Candidate], confirmed: Sequence[Confirmed]) -> list[str]:
    """Check that real decoding accepts about as often as the profile said."""
    by_label = {candidate.label: candidate for candidate in candidates}
    lines = []
    for result in confirmed:
        candidate = by_label[result.label]
        expected, found = candidate.alpha, result.alpha
        if candidate.settings.drafter != "layer-skip" or expected is None or found is None:
            continue
        deviation = sqrt(expected * (1 - expected) / result.num_tested)
        if found < min(FAR_BELOW * expected, expected - SURE * deviation):
            lines.append(
                f"check the norm: {result.label} was accepted with α = {found:.2f} when decoding, and the profile says "
                f"{expected:.2f}; the draft's norm or head is not the profile's"
            )
    return lines
