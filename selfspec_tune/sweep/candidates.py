"""Every drafter by the same measure: how many tokens it brings per step, and what a step costs, in plain steps.

Layer skip comes from the grid of cells, which one pass profiles. The others are profiled by real rounds on the same
prompts, with the policy that decides round by round how many tokens to draft: what a quantised draft proposes depends
on the keys and values it wrote itself in this round, and what can be copied on the text so far. Only counts are taken
from these runs; with the costs measured apart they give the prediction, which `confirm` holds against the clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, get_args

from selfspec_tune.artifact import EXIT_HEAD_FILE
from selfspec_tune.config import DraftGroup, SweepConfig
from selfspec_tune.decode.drafters import Drafter
from selfspec_tune.decode.drafters.hybrid import HybridDrafter
from selfspec_tune.decode.drafters.make import DraftSettings, make_drafter
from selfspec_tune.decode.engine import Engine, Request
from selfspec_tune.decode.policy import CostPolicy, DraftCosts, Policy
from selfspec_tune.decode.price import KnownCosts, draft_costs
from selfspec_tune.decode.sampling import SamplingParams
from selfspec_tune.decode.stats import Stats
from selfspec_tune.errors import UserError
from selfspec_tune.model import draft_vocab
from selfspec_tune.model.load import checkpoint_dir
from selfspec_tune.progress import Progress, silent
from selfspec_tune.sweep.objective import Cell, Costs, speedup_model


@dataclass(frozen=True)
class Candidate:
    """A drafter and what it is expected to bring.

    Attributes:
        num_draft_tokens: k; of drafters profiled by real rounds the mean, rounded.
        alpha: of tested draft tokens how many stood; None where none was drafted.
        cost_ratio, verify_ratio: c and v at that k, means over rounds of a hybrid's two parts.
        tokens_per_round: τ, of the rounds that drafted.
        tokens_per_step, cost_per_step: the same over all steps, plain ones among them, and with all costs.
        known: costs and acceptance by part, for the policy.
    """

    settings: DraftSettings
    num_draft_tokens: int
    alpha: float | None
    cost_ratio: float
    verify_ratio: float
    tokens_per_round: float
    tokens_per_step: float
    cost_per_step: float
    known: KnownCosts

    @property
    def label(self) -> str:
        """Name for a reader; one drafter each."""
        return self.settings.label

    @property
    def speedup_model(self) -> float:
        """The textbook score."""
        return speedup_model(self.alpha or 0.0, self.cost_ratio, self.num_draft_tokens)

    @property
    def speedup_predicted(self) -> float:
        """Tokens over plain steps' worth of time."""
        return self.tokens_per_step / self.cost_per_step

    def policy(self, k_max: int) -> Policy:
        """Return the policy that decoding uses, knowing nothing yet but costs and acceptance."""
        return CostPolicy(self.known.costs, self.known.alphas, k_max)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON object."""
        own = {name: value for name, value in asdict(self).items() if name not in ("settings", "known")}
        scores = {"speedup_model": self.speedup_model, "speedup_predicted": self.speedup_predicted}
        return {"label": self.label, **self.settings.to_artifact(), **own, **scores, "costs": self.known.to_artifact()}


def of_cell(cell: Cell, costs: Costs, max_draft_tokens: int) -> Candidate:
    """Return layer skip as a cell of the grid says."""
    k, name = cell.num_draft_tokens, "layer-skip"
    verify = tuple(costs.verify_ratio(cell.exit_layer, drafted) for drafted in range(1, max_draft_tokens + 1))
    return Candidate(
        settings=DraftSettings("layer-skip", cell.exit_layer),
        num_draft_tokens=k,
        alpha=cell.alpha,
        cost_ratio=cell.cost_ratio,
        verify_ratio=cell.verify_ratio,
        tokens_per_round=cell.tokens_per_round,
        tokens_per_step=cell.tokens_per_round,
        cost_per_step=cell.tokens_per_round / cell.speedup_predicted,
        known=KnownCosts({name: DraftCosts(cell.cost_ratio, verify, costs.overhead_ratio)}, {name: cell.alpha}),
    )


def of_rounds(settings: DraftSettings, stats: Stats, known: dict[str, DraftCosts]) -> Candidate:
    """Return a drafter as counted in real rounds, at measured costs."""
    rounds, steps = stats.rounds, stats.rounds + stats.plain_steps
    drafting = sum(n * k * known[name].cost_ratio for (name, k, _), n in stats.rounds_of.items())
    verifying = sum(n * known[name].verify_ratio[k - 1] for (name, k, _), n in stats.rounds_of.items())
    total = stats.plain_steps + sum(n * known[name].round(k) for (name, k, _), n in stats.rounds_of.items())
    parts = {name: stats.part(name).alpha for name in known}
    return Candidate(
        settings=settings,
        num_draft_tokens=max(1, round(stats.drafted / rounds)) if rounds else 1,
        alpha=stats.alpha,
        cost_ratio=drafting / stats.drafted if rounds else known[next(iter(known))].cost_ratio,
        verify_ratio=verifying / rounds if rounds else known[next(iter(known))].verify_ratio[0],
        tokens_per_round=(stats.accepted + rounds) / rounds if rounds else 1.0,
        tokens_per_step=(stats.emitted - stats.from_prefill) / steps if steps else 1.0,
        cost_per_step=total / steps if steps else 1.0,
        known=KnownCosts(known, {name: alpha for name, alpha in parts.items() if alpha is not None}),
    )


class Trials:
    """Makes drafters, times each once, and profiles them by real rounds; one quantised copy is kept at a time.

    Args:
        engine: batch size 1, in the numerics to be used.
        model: the directory or hub name its model came from.
        overhead_ratio: o, what a round costs besides drafting and verification.

    Attributes:
        skipped: label → why a drafter could not be tried.
    """

    def __init__(
        self, engine: Engine, model: str, config: SweepConfig, overhead_ratio: float, progress: Progress = silent
    ) -> None:
        self.engine, self.model, self.config, self.progress = engine, model, config, progress
        self.overhead_ratio = overhead_ratio
        self.skipped: dict[str, str] = {}
        self._drafters: dict[DraftSettings, Drafter] = {}
        self._costs: dict[DraftSettings, DraftCosts] = {}

    def drafter(self, settings: DraftSettings) -> Drafter:
        """Return the drafter of these settings; a hybrid is made of the two that are there."""
        if settings not in self._drafters:
            if settings.drafter == "low-precision":
                # One quantised copy of the model at a time.
                packed = ("low-precision", "hybrid")
                self._drafters = {key: value for key, value in self._drafters.items() if key.drafter not in packed}
            if settings.drafter == "hybrid":
                copy, other = (self.drafter(part) for part in settings.parts)
                self._drafters[settings] = HybridDrafter(copy, other)
            else:
                self._drafters[settings] = make_drafter(settings, self.engine.decoder, self.model)
        return self._drafters[settings]

    def candidates(
        self, requests: Sequence[Request], params: SamplingParams, layer_skip: Candidate | None = None
    ) -> list[Candidate]:
        """Profile the drafters asked for besides `layer_skip`; the hybrid copies, and takes the best of the others."""
        asked, found = self.config.drafters, [layer_skip] if layer_skip else []
        plain = [DraftSettings("copy")] if "copy" in asked else []
        if "low-precision" in asked:
            plain += [DraftSettings("low-precision", draft_group=int(group)) for group in get_args(DraftGroup)]
            plain += [DraftSettings("low-precision", draft_head_bits=4), DraftSettings("low-precision", draft_bits=8)]
        if "exit-head" in asked and self._has_exit_head():
            plain.append(DraftSettings("exit-head"))
        elif "exit-head" in asked and asked != SweepConfig.drafters:
            self.skipped["exit-head"] = "there is none beside the checkpoint"
        for settings in plain:
            found += self._try(settings, requests, params)
        for settings in self._with_less_vocabulary(found):
            found += self._try(settings, requests, params)
        if "hybrid" in asked:
            layered = [candidate for candidate in found if candidate.settings.drafter != "copy"]
            best = max(layered, key=lambda candidate: candidate.speedup_predicted, default=None)
            if best is not None:
                name: Any = best.settings.drafter
                found += self._try(replace(best.settings, drafter="hybrid", hybrid_with=name), requests, params)
            else:
                self.skipped["hybrid"] = "no drafter was tried that runs layers"
        return found

    def _has_exit_head(self) -> bool:
        directory = checkpoint_dir(self.model)
        return directory is not None and (directory / EXIT_HEAD_FILE).is_file()

    def _with_less_vocabulary(self, found: Sequence[Candidate]) -> list[DraftSettings]:
        """Return the best setting of each drafter that reads the head, with every size of draft vocabulary there is."""
        directory = checkpoint_dir(self.model)
        if directory is None or not (directory / draft_vocab.FILE_NAME).is_file():
            return []
        try:
            most = len(draft_vocab.read_draft_vocab(directory).ranked)
        except UserError as error:
            self.skipped["draft vocabulary"] = error.what
            return []
        sizes = sorted({min(size, most) for size in self.config.draft_vocab})
        best: dict[str, Candidate] = {}
        for candidate in sorted(found, key=lambda candidate: candidate.speedup_predicted):
            if candidate.settings.drafter != "copy":
                best[candidate.settings.drafter] = candidate
        return [replace(one.settings, draft_vocab=size) for one in best.values() for size in sizes]

    def _try(self, settings: DraftSettings, requests: Sequence[Request], params: SamplingParams) -> list[Candidate]:
        try:
            drafter = self.drafter(settings)
        except UserError as error:
            self.skipped[settings.label] = f"{error.what} (got {error.got})" if error.got else error.what
            return []
        known: dict[str, DraftCosts] = {part.drafter: self._costs_of(part) for part in settings.parts}
        policy, stats = CostPolicy(known, k_max=self.config.max_draft_tokens), Stats()
        for number, request in enumerate(requests):
            self.progress(f"profile {settings.label}", number, len(requests))
            stats.add(self.engine.generate([request], params, drafter, policy)[1])
        self.progress(f"profile {settings.label}", len(requests), len(requests))
        return [of_rounds(settings, stats, known)]

    def _costs_of(self, settings: DraftSettings) -> DraftCosts:
        if settings not in self._costs:
            self._costs[settings] = draft_costs(
                self.engine,
                self.drafter(settings),
                context_length=self.config.context_length,
                repeats=self.config.repeats,
                overhead=self.overhead_ratio,
                progress=self.progress,
            )
        return self._costs[settings]
