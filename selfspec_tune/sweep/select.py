"""From acceptance and costs to a decision: score every drafter, try the best ones, write `selfspec.json`.

The decision is against plain decoding in the numerics in use. A prediction alone never turns speculation on, unless no
confirmation was asked for: the best drafters are decoded in turn with plain decoding, in one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from selfspec_tune import artifact as artifacts
from selfspec_tune.artifact import Artifact
from selfspec_tune.config import SweepConfig
from selfspec_tune.decode.engine import Engine, Request
from selfspec_tune.decode.sampling import SamplingParams
from selfspec_tune.errors import UserError
from selfspec_tune.model.decoder import LayeredDecoder
from selfspec_tune.model.load import checkpoint_dir
from selfspec_tune.progress import Progress, silent
from selfspec_tune.sweep import objective
from selfspec_tune.sweep.candidates import Candidate, Trials, of_cell
from selfspec_tune.sweep.confirm import Confirmed, confirm, split
from selfspec_tune.sweep.objective import Cell, Costs, why_not
from selfspec_tune.sweep.profile import Profile, profile_exits
from selfspec_tune.sweep.record import Decision, build_artifact
from selfspec_tune.sweep.timing import measure_costs

CLEARLY_SLOWER = 0.9
"""Where the best prediction is below this one drafter only is confirmed, so that the report holds a measured number."""


@dataclass(frozen=True)
class Sweep:
    """Everything `sweep-exit` found.

    Attributes:
        cells: layer skip, every exit and k.
        candidates: the drafters compared, ranked; of layer skip the best cell in the window.
        skipped: label → why a drafter was not tried.
        path: where the artifact was written, None for a model without a directory.
    """

    artifact: Artifact
    cells: list[Cell]
    profile: Profile
    costs: Costs
    candidates: list[Candidate]
    skipped: dict[str, str]
    confirmed: list[Confirmed]
    better_outside_window: Cell | None
    path: Path | None

    def to_dict(self) -> dict[str, Any]:
        """Return one JSON object."""
        outside = self.better_outside_window
        return {
            "artifact": asdict(self.artifact),
            "cells": [asdict(cell) for cell in self.cells],
            "candidates": [candidate.to_dict() for candidate in self.candidates],
            "skipped": self.skipped,
            "alpha_by_exit": {str(exit_layer): value for exit_layer, value in self.profile.alpha.items()},
            "overhead_ratio": self.costs.overhead_ratio,
            "cost_spread": dict(self.costs.spread),
            "composed_over_measured": self.costs.composed_over_measured,
            "plain_tokens_per_second": self.profile.plain_tokens_per_second,
            "exact_over_fast": self.costs.exact_over_fast,
            "confirmed": [asdict(result) for result in self.confirmed],
            "better_outside_window": asdict(outside) if outside else None,
            "path": str(self.path) if self.path else None,
        }


def sweep(
    model: str, engine: Engine, requests: Sequence[Request], config: SweepConfig, progress: Progress = silent
) -> Sweep:
    """Profile, measure, choose, confirm, and write `selfspec.json` beside the checkpoint.

    Args:
        model: the directory or hub name the engine's model came from.
        engine: batch size 1, in `config.numerics`.
        requests: prompts; those after the first `num_prompts` serve to confirm.

    Raises:
        UserError: no exit lies in the window, continuations too short, a context too long.
    """
    exits = check_fits(engine.decoder, requests, config)
    params = SamplingParams(config.temperature, config.top_k, config.top_p, config.seed)
    profiled, others = split(requests, config.num_prompts)
    profile = profile_exits(engine, profiled, params, config.max_draft_tokens, progress)
    costs = measure_costs(
        engine,
        params,
        max_draft_tokens=config.max_draft_tokens,
        context_length=config.context_length,
        repeats=config.repeats,
        overhead_request=profiled[0],
        progress=progress,
    )
    cells = score(profile, costs)
    inside = ranked([cell for cell in cells if cell.exit_layer in exits])
    outside = ranked([cell for cell in cells if cell.exit_layer not in exits])
    better = outside[0] if outside and outside[0].speedup_predicted > inside[0].speedup_predicted else None
    trials = Trials(engine, model, config, costs.overhead_ratio, progress)
    layer_skip = of_cell(inside[0], costs, config.max_draft_tokens) if "layer-skip" in config.drafters else None
    candidates = ranked_candidates(trials.candidates(profiled, params, layer_skip))
    if not candidates:
        got = "; ".join(f"{label}: {why}" for label, why in trials.skipped.items()) or ", ".join(config.drafters)
        raise UserError("none of the drafters asked for can be tried here", got=got, command="--drafters layer-skip")
    count = config.confirm if candidates[0].speedup_predicted >= CLEARLY_SLOWER else min(config.confirm, 1)
    confirmed = confirm(trials, others, params, candidates[:count])
    exact, must_confirm = engine.numerics == "exact", config.confirm > 0
    choice = decide(candidates, confirmed, why_not(inside[0], costs), exact=exact, must_confirm=must_confirm)
    artifact = build_artifact(model, engine, config, profile, choice)
    directory = checkpoint_dir(model)
    path = artifacts.write(directory, artifact) if directory else None
    return Sweep(artifact, cells, profile, costs, candidates, trials.skipped, confirmed, better, path)


def check_fits(decoder: LayeredDecoder, requests: Sequence[Request], config: SweepConfig) -> list[int]:
    """Return the exits in the window; a UserError for whatever would fail only after minutes of work."""
    exits, limit = objective.exits_in(config.window, decoder.num_layers), decoder.family.max_context
    if not exits and "layer-skip" not in config.drafters:
        exits = list(range(1, decoder.num_layers))
    if not exits:
        low, high = config.window
        got = f"{low:g},{high:g} of {decoder.num_layers} layers"
        raise UserError("no exit layer lies in the window", got=got, command="--window 0,1")
    for request in requests:
        if len(request.prompt_ids) + request.max_new_tokens > limit:
            raise UserError(
                "a prompt and its continuation are longer than the model's context",
                got=f"{len(request.prompt_ids)} + {request.max_new_tokens} tokens (prompt {request.id})",
                allowed=f"{limit} together",
            )
    if config.context_length + config.max_draft_tokens + 1 > limit:
        raise UserError(
            "the cost measurement does not fit the model's context",
            got=config.context_length,
            command=f"--context-length {limit // 2}",
        )
    return exits


def score(profile: Profile, costs: Costs) -> list[Cell]:
    """Return a cell for every exit layer and k profiled, with both scores."""
    cells = []
    for (exit_layer, k), tokens in profile.tokens_per_round.items():
        alpha, c, v = profile.alpha[exit_layer], costs.cost_ratio(exit_layer), costs.verify_ratio(exit_layer, k)
        cells.append(
            Cell(
                exit_layer=exit_layer,
                num_draft_tokens=k,
                alpha=alpha,
                cost_ratio=c,
                verify_ratio=v,
                tokens_per_round=tokens,
                speedup_model=objective.speedup_model(alpha, c, k),
                speedup_predicted=objective.speedup_predicted(tokens, c, v, k, costs.overhead_ratio),
            )
        )
    return sorted(cells, key=lambda cell: (cell.exit_layer, cell.num_draft_tokens))


def ranked(cells: list[Cell]) -> list[Cell]:
    """Return cells by predicted speed-up, the best first; of equals the smaller exit and k."""
    return sorted(cells, key=lambda cell: (-cell.speedup_predicted, cell.exit_layer, cell.num_draft_tokens))


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
