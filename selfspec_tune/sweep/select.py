"""From acceptance and costs to a decision: score every drafter, try the best ones, write `selfspec.json`.

The decision is against plain decoding in the numerics in use. A prediction alone never turns speculation on, unless no
confirmation was asked for: the best drafters are decoded in turn with plain decoding, in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from selfspec_tune import artifact as artifacts
from selfspec_tune.artifact import Artifact
from selfspec_tune.config import SweepConfig
from selfspec_tune.decode.engine import Engine
from selfspec_tune.decode.price import measured_on
from selfspec_tune.decode.sampling import SamplingParams
from selfspec_tune.errors import UserError
from selfspec_tune.model import draft_vocab
from selfspec_tune.model.decoder import LayeredDecoder
from selfspec_tune.model.load import checkpoint_dir
from selfspec_tune.progress import Progress, silent
from selfspec_tune.sweep import objective, warnings
from selfspec_tune.sweep.breakdown import (
    by_domain,
    choice_by_context,
    layer_skip_by_context,
    needed_for,
    ranked,
    score,
    with_intervals,
)
from selfspec_tune.sweep.candidates import Candidate, Trials, of_cell
from selfspec_tune.sweep.confirm import Confirmed, confirm, split
from selfspec_tune.sweep.costs import CostBook, contexts_that_fit
from selfspec_tune.sweep.decision import decide, off_everywhere, ranked_candidates
from selfspec_tune.sweep.kept import Kept
from selfspec_tune.sweep.objective import Cell, Costs, why_not
from selfspec_tune.sweep.processes import Processes
from selfspec_tune.sweep.profile import Profiler, Prompt, checked
from selfspec_tune.sweep.record import build_artifact
from selfspec_tune.sweep.tally import Profile, PromptTally

CLEARLY_SLOWER = 0.9
"""Where the best prediction is below this one drafter only is confirmed, so that the report holds a measured number."""


@dataclass(frozen=True)
class Sweep:
    """Everything `sweep-exit` found.

    Attributes:
        cells: layer skip, every exit and k, at the costs of the context length the prompts have.
        costs: measured, by batch size and context length.
        here: the costs at the prompts' context length.
        candidates: the drafters compared, ranked; of layer skip the best cell in the window.
        skipped: label → why a drafter was not tried.
        by_context, by_domain, alpha_needed: see `breakdown`.
        path: where the artifact was written, None for a model without a directory.
    """

    model: str
    config: SweepConfig
    artifact: Artifact
    cells: list[Cell]
    profile: Profile
    costs: list[Costs]
    here: Costs
    candidates: list[Candidate]
    skipped: dict[str, str]
    confirmed: list[Confirmed]
    better_outside_window: Cell | None
    by_context: list[dict[str, Any]]
    by_domain: list[dict[str, Any]]
    alpha_needed: list[dict[str, Any]]
    warnings: list[str]
    path: Path | None

    def to_dict(self) -> dict[str, Any]:
        """Return one JSON object."""
        outside, config, profile = self.better_outside_window, self.config, self.profile
        exits = range(1, profile.num_layers)
        return {
            "model": self.model,
            "num_layers": profile.num_layers,
            "prompts": str(config.prompts),
            "raw": config.raw,
            "source": config.source,
            "approximate": config.source == "reference",
            "sampling": {name: getattr(config, name) for name in ("temperature", "top_k", "top_p")},
            "numerics": config.numerics,
            "window": list(config.window),
            "artifact": asdict(self.artifact),
            "cells": [{**asdict(cell), "interval": list(cell.interval)} for cell in self.cells],
            "alpha_by_exit": {str(exit_layer): value for exit_layer, value in profile.alpha.items()},
            "alpha_intervals": {str(exit_layer): list(ends) for exit_layer, ends in profile.alpha_intervals().items()},
            "context_length": self.here.context_length,
            "overhead_ratio": self.here.overhead_ratio,
            "costs": [
                {
                    "context_length": costs.context_length,
                    "batch_size": costs.batch_size,
                    "plain_seconds": costs.step,
                    "plain_spread": costs.spread(),
                    "exact_over_fast": costs.exact_over_fast,
                    "overhead_ratio": costs.overhead_ratio,
                    "composed_over_measured": costs.composed_over_measured,
                    "cost_ratio": {str(e): costs.cost_ratio(e) for e in exits},
                    "verify_ratio": {
                        str(e): [costs.verify_ratio(e, k) for k in range(1, config.max_draft_tokens + 1)] for e in exits
                    },
                }
                for costs in self.costs
            ],
            "by_context": self.by_context,
            "by_domain": self.by_domain,
            "alpha_needed": self.alpha_needed,
            "candidates": [candidate.to_dict() for candidate in self.candidates],
            "skipped": self.skipped,
            "confirmed": [asdict(result) for result in self.confirmed],
            "better_outside_window": asdict(outside) if outside else None,
            "warnings": self.warnings,
            "plain_tokens_per_second": 1 / self.here.step,
            "generate_seconds": profile.generate_seconds,
            "profile_seconds": profile.profile_seconds,
            "path": str(self.path) if self.path else None,
        }


def sweep(
    model: str,
    engine: Engine,
    prompts: Sequence[Prompt],
    config: SweepConfig,
    processes: Processes | None = None,
    known_warnings: Sequence[str] = (),
    notice: Callable[[str], object] = lambda text: None,
    progress: Progress = silent,
) -> Sweep | None:
    """Profile, measure, choose, confirm, and write `selfspec.json` beside the checkpoint.

    Args:
        model: the directory or hub name the engine's model came from.
        engine: batch size 1, in `config.numerics`.
        prompts: those after the first `num_prompts` serve to confirm.
        processes: that share the work; all call this, and only the main one gets a result.
        known_warnings: what was found out before, for the report.
        notice: told of what an earlier, interrupted run had finished.

    Raises:
        UserError: no exit lies in the window, continuations too short, a context too long.
    """
    processes = processes or Processes()
    exits = check_fits(engine.decoder, prompts, config)
    params = SamplingParams(config.temperature, config.top_k, config.top_p, config.seed)
    profiled, others = split(prompts, config.num_prompts)
    kept = Kept(_identity(model, engine, config, prompts), processes.rank)
    if kept.found and processes.main:
        notice(f"going on with an interrupted sweep: {kept.found} results of it are kept in {kept.directory}")
    path = config.costs or (kept.directory / "costs.json" if kept.directory else None)
    book = CostBook(engine, params, config, path, progress)
    processes.from_main(book.read)
    profile = _profile(engine, profiled, params, config, processes, kept, progress)
    here = profile.context
    processes.from_main(lambda: book.measure(profiled[0].request))
    costs = processes.from_main(lambda: book.at(here))
    cells = score(profile, costs)
    inside = ranked(cell for cell in cells if cell.exit_layer in exits)
    outside = ranked(cell for cell in cells if cell.exit_layer not in exits)
    better = outside[0] if outside and outside[0].speedup_predicted > inside[0].speedup_predicted else None
    trials = Trials(engine, model, config, book, here, processes, kept, progress)
    layer_skip = of_cell(inside[0], costs, config.max_draft_tokens) if "layer-skip" in config.drafters else None
    candidates = ranked_candidates(trials.candidates(profiled, params, layer_skip))
    if not candidates:
        got = "; ".join(f"{label}: {why}" for label, why in trials.skipped.items()) or ", ".join(config.drafters)
        raise UserError("none of the drafters asked for can be tried here", got=got, command="--drafters layer-skip")
    if not processes.main:
        return None
    count = config.confirm if candidates[0].speedup_predicted >= CLEARLY_SLOWER else min(config.confirm, 1)
    confirmed = confirm(trials, others, params, candidates[:count])
    exact, must_confirm = engine.numerics == "exact", config.confirm > 0
    choice = decide(candidates, confirmed, why_not(inside[0], costs), exact=exact, must_confirm=must_confirm)
    contexts = layer_skip_by_context(profile, book, exits)
    followed = choice_by_context(choice.candidate, profile, trials, contexts)
    choice = off_everywhere(choice, followed)
    artifact = replace(build_artifact(model, engine, config, profile, choice), by_context=followed)
    cells, parts = with_intervals(cells, profile, book)
    best = next(cell for cell in cells if _place(cell) == _place(inside[0]))
    found = Sweep(
        model=model,
        config=config,
        artifact=artifact,
        cells=cells,
        profile=profile,
        costs=book.all,
        here=costs,
        candidates=candidates,
        skipped=trials.skipped,
        confirmed=confirmed,
        better_outside_window=better,
        by_context=contexts,
        by_domain=by_domain(profile, trials, choice.candidate, candidates, exits),
        alpha_needed=needed_for(cells, costs.overhead_ratio, range(1, profile.num_layers)),
        warnings=[
            *known_warnings,
            *warnings.of_profile(profile, approximate=config.source == "reference"),
            *warnings.of_costs(book.all, best if layer_skip else None, parts[_place(best)]),
            *warnings.of_confirmed(candidates, confirmed),
        ],
        path=_write(model, artifact, notice),
    )
    kept.discard()
    return found


def _place(cell: Cell) -> tuple[int, int]:
    return cell.exit_layer, cell.num_draft_tokens


def _write(model: str, artifact: Artifact, notice: Callable[[str], object]) -> Path | None:
    directory = checkpoint_dir(model)
    try:
        return artifacts.write(directory, artifact) if directory else None
    except OSError as error:
        notice(f"selfspec.json could not be written to {directory}: {error.strerror or error}")
        return None


def _identity(model: str, engine: Engine, config: SweepConfig, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Return what finished parts of a sweep depend on."""
    directory = checkpoint_dir(model)
    asked = asdict(config)
    for name in ("prompts", "costs", "json", "report", "window", "confirm"):
        del asked[name]
    drafts = [directory / name for name in (artifacts.EXIT_HEAD_FILE, draft_vocab.FILE_NAME)] if directory else []
    return {
        "model": artifacts.fingerprint(directory) if directory else model,
        "options": asked,
        "drafts": [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in drafts if path.exists()],
        "measured_on": measured_on(engine.decoder),
        "prompts": [[p.request.id, p.request.prompt_ids, p.answer_ids, p.domain] for p in prompts],
    }


def _profile(
    engine: Engine,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    config: SweepConfig,
    processes: Processes,
    kept: Kept,
    progress: Progress,
) -> Profile:
    """Profile this process's share of the prompts that no earlier run finished, and gather all."""
    profiler = Profiler(engine, params, config.max_draft_tokens, config.source)
    own = processes.share(prompts)
    todo = [prompt for prompt in own if kept.get("profile", prompt.request.id) is None]
    for tally in profiler.run(todo, progress, done=len(own) - len(todo)):
        kept.put("profile", tally.prompt, tally.to_dict())
    done: list[Any] = processes.gather([kept.get("profile", prompt.request.id) for prompt in own])
    return checked(Profile(engine.decoder.num_layers, [PromptTally(**tally) for tally in done]))


def check_fits(decoder: LayeredDecoder, prompts: Sequence[Prompt], config: SweepConfig) -> list[int]:
    """Return the exits in the window; a UserError for whatever would fail only after minutes of work."""
    exits, limit = objective.exits_in(config.window, decoder.num_layers), decoder.family.max_context
    if not exits and "layer-skip" not in config.drafters:
        exits = list(range(1, decoder.num_layers))
    if not exits:
        low, high = config.window
        got = f"{low:g},{high:g} of {decoder.num_layers} layers"
        raise UserError("no exit layer lies in the window", got=got, command="--window 0,1")
    for prompt in prompts:
        request = prompt.request
        if len(request.prompt_ids) + request.max_new_tokens > limit:
            raise UserError(
                "a prompt and its continuation are longer than the model's context",
                got=f"{len(request.prompt_ids)} + {request.max_new_tokens} tokens (prompt {request.id})",
                allowed=f"{limit} together",
            )
    if not contexts_that_fit(config, limit):
        raise UserError(
            "no context length to measure costs at fits the model's context",
            got=", ".join(map(str, config.context_lengths)),
            command=f"--context-lengths {limit // 2}",
        )
    return exits
