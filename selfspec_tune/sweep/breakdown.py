"""What a choice means elsewhere: at other context lengths, in each domain, and which acceptance would make it pay."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from selfspec_tune.decode.drafters.make import DraftSettings
from selfspec_tune.decode.price import write_costs
from selfspec_tune.speedup import speedup_model
from selfspec_tune.sweep.candidates import Candidate, Trials, layer_skip_costs, of_rounds
from selfspec_tune.sweep.costs import CostBook
from selfspec_tune.sweep.objective import WISH, Cell, Costs, alpha_needed, speedup_predicted
from selfspec_tune.sweep.tally import RESAMPLES, Profile, clipped, interval

LEAST_K = 2
"""Fewer draft tokens are not chosen for a context length: what one gains is lost to any change of traffic."""

Intervals = Mapping[tuple[int, int], tuple[float, float]]


def score(profile: Profile, costs: Costs, intervals: Intervals | None = None) -> list[Cell]:
    """Return a cell for every exit layer and k profiled, with both scores."""
    cells = []
    for (exit_layer, k), tokens in profile.tokens_per_round.items():
        alpha, c, v = profile.alpha[exit_layer], costs.cost_ratio(exit_layer), costs.verify_ratio(exit_layer, k)
        predicted = speedup_predicted(tokens, c, v, k, costs.overhead_ratio)
        cells.append(
            Cell(
                exit_layer=exit_layer,
                num_draft_tokens=k,
                alpha=alpha,
                cost_ratio=c,
                verify_ratio=v,
                tokens_per_round=tokens,
                speedup_model=speedup_model(alpha, c, k),
                speedup_predicted=predicted,
                interval=intervals[exit_layer, k] if intervals else (predicted, predicted),
            )
        )
    return sorted(cells, key=lambda cell: (cell.exit_layer, cell.num_draft_tokens))


def with_intervals(
    cells: Sequence[Cell], profile: Profile, book: CostBook
) -> tuple[list[Cell], dict[tuple[int, int], tuple[float, float]]]:
    """Return the cells with 95 % intervals of the predicted speed-up: prompts and repeats of the costs drawn again.

    Besides, by cell, the widths of the intervals from the costs alone and from the prompts alone.
    """
    samples, costs = profile.tokens_samples(), book.resamples(profile.context, RESAMPLES)
    fixed, found, parts = book.at(profile.context), [], {}
    for cell in cells:
        exit_layer, k = cell.exit_layer, cell.num_draft_tokens

        def predicted(tokens: float, each: Costs, exit_layer: int = exit_layer, k: int = k) -> float:
            ratios = each.cost_ratio(exit_layer), each.verify_ratio(exit_layer, k)
            return speedup_predicted(tokens, *ratios, k, each.overhead_ratio)

        samples_of = (
            [predicted(*pair) for pair in zip(samples[exit_layer, k], costs, strict=True)],
            [predicted(cell.tokens_per_round, each) for each in costs],
            [predicted(tokens, fixed) for tokens in samples[exit_layer, k]],
        )
        middle, most = cell.speedup_predicted, predicted(k + 1, fixed)
        units = (profile.num_prompts, book.config.repeats, profile.num_prompts)
        both, of_costs, of_prompts = (
            clipped(interval(values, middle, count), 0.0, most) for values, count in zip(samples_of, units, strict=True)
        )
        found.append(replace(cell, interval=both))
        parts[exit_layer, k] = of_costs[1] - of_costs[0], of_prompts[1] - of_prompts[0]
    return found, parts


def ranked(cells: Iterable[Cell]) -> list[Cell]:
    """Return cells by predicted speed-up, the best first; of equals the smaller exit and k."""
    return sorted(cells, key=lambda cell: (-cell.speedup_predicted, cell.exit_layer, cell.num_draft_tokens))


def needed_for(cells: Sequence[Cell], overhead_ratio: float, exits: Iterable[int]) -> list[dict[str, Any]]:
    """Return for each exit the smallest α that gives a speed-up of `WISH`, over k, beside the α there is."""
    rows = []
    for exit_layer in exits:
        own = [cell for cell in cells if cell.exit_layer == exit_layer]
        costs = [(cell.cost_ratio, cell.verify_ratio + overhead_ratio, cell.num_draft_tokens) for cell in own]
        found = [(alpha, cost[2]) for cost in costs if (alpha := alpha_needed(WISH, *cost)) is not None]
        needed, k = min(found, default=(None, None))
        alpha = own[0].alpha
        rows.append({"exit_layer": exit_layer, "num_draft_tokens": k, "alpha": alpha, "needed": needed})
    return rows


def layer_skip_by_context(profile: Profile, book: CostBook, exits: Sequence[int]) -> list[dict[str, Any]]:
    """Return the best exit and k at every context length measured, and at that of the prompts; k = 0 where none pays.

    Acceptance is that of the whole profile: costs are what a longer text changes for certain.
    """
    rows, most = [], max(k for _, k in profile.tokens_per_round)
    lengths = {**dict(zip(book.contexts, book.contexts, strict=True)), profile.longest: profile.context}
    for length, costs_at in sorted(lengths.items()):
        cells = [cell for cell in score(profile, book.at(costs_at)) if cell.exit_layer in exits]
        best = ranked(cell for cell in cells if cell.num_draft_tokens >= min(LEAST_K, most))[0]
        pays = best.speedup_predicted > 1
        rows.append(
            {
                "max_context": length,
                "context_length": costs_at,
                "exit_layer": best.exit_layer,
                "num_draft_tokens": best.num_draft_tokens if pays else 0,
                "speedup_predicted": best.speedup_predicted,
            }
        )
    return rows


def choice_by_context(
    choice: Candidate, profile: Profile, trials: Trials, by_context: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return `by_context` of `selfspec.json` for the drafter chosen: layer skip moves its exit, others have one."""
    rows = []
    for entry in by_context:
        length, settings, alphas = entry["context_length"], choice.settings, choice.known.alphas
        if settings.drafter == "layer-skip" and settings.draft_vocab is None:
            exit_layer = entry["exit_layer"]
            costs = {"layer-skip": layer_skip_costs(trials.book.at(length), exit_layer, trials.config.max_draft_tokens)}
            k, alphas = entry["num_draft_tokens"], {"layer-skip": profile.alpha[exit_layer]}
        else:
            exit_layer, costs = None, trials.known_costs(settings, length)
            again = of_rounds(settings, trials.sum(choice.label), costs)
            k = choice.num_draft_tokens if again.speedup_predicted > 1 else 0
        values = write_costs(costs, alphas)
        rows.append(
            {
                "max_context": entry["max_context"],
                "exit_layer": exit_layer,
                "num_draft_tokens": k,
                "costs": values,
            }
        )
    return rows


def by_domain(
    profile: Profile, trials: Trials, choice: Candidate, candidates: Sequence[Candidate], exits: Sequence[int]
) -> list[dict[str, Any]]:
    """Return for every domain the best drafter and what the one chosen for all loses there; empty without domains.

    All are scored at the costs of the prompts' mean context length, so that only acceptance differs.
    """
    rows = []
    for domain in profile.domains:
        part = profile.of_domain(domain)
        cells = score(part, trials.book.at(trials.context_length))
        found = []
        for candidate in candidates:
            settings = candidate.settings
            if candidate.label in trials.counted:
                stats = trials.sum(candidate.label, domain)
                again = of_rounds(settings, stats, candidate.known.costs)
                found.append(
                    (again.speedup_predicted, settings, again.num_draft_tokens, again.alpha, again.tokens_per_round)
                )
            else:
                same = settings.exit_layer, candidate.num_draft_tokens
                found += [_of(cell) for cell in cells if (cell.exit_layer, cell.num_draft_tokens) == same]
        shared = found[list(candidates).index(choice)]
        # Any cell of layer skip may be the best of a domain.
        if any(candidate.settings.drafter == "layer-skip" for candidate in candidates):
            found.append(_of(ranked(cell for cell in cells if cell.exit_layer in exits)[0]))
        best = max(found, key=lambda entry: entry[0])
        rows.append(
            {
                "domain": domain,
                "num_prompts": part.num_prompts,
                "num_tokens": part.num_tokens,
                "alpha": shared[3],
                "tokens_per_round": shared[4],
                "best": best[1].label,
                "exit_layer": best[1].exit_layer,
                "num_draft_tokens": best[2],
                "speedup_best": best[0],
                "speedup_shared": shared[0],
                "loss": 1 - shared[0] / best[0],
            }
        )
    return rows


def _of(cell: Cell) -> tuple[float, DraftSettings, int, float | None, float]:
    settings = DraftSettings("layer-skip", cell.exit_layer)
    return cell.speedup_predicted, settings, cell.num_draft_tokens, cell.alpha, cell.tokens_per_round
