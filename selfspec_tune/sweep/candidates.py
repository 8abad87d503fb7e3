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
from selfspec_tune.decode.engine import Engine
from selfspec_tune.decode.policy import CostPolicy, DraftCosts, Policy
from selfspec_tune.decode.price import KnownCosts
from selfspec_tune.decode.sampling import SamplingParams
from selfspec_tune.decode.stats import Stats
from selfspec_tune.errors import UserError
from selfspec_tune.evenly import spread_evenly
from selfspec_tune.model import draft_vocab
from selfspec_tune.model.load import checkpoint_dir
from selfspec_tune.progress import Progress, silent
from selfspec_tune.speedup import speedup_model
from selfspec_tune.sweep.costs import CostBook
from selfspec_tune.sweep.kept import Kept
from selfspec_tune.sweep.objective import Cell, Costs
from selfspec_tune.sweep.processes import Processes
from selfspec_tune.sweep.profile import Prompt


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


def layer_skip_costs(costs: Costs, exit_layer: int, max_draft_tokens: int) -> DraftCosts:
    """Return what layer skip costs, composed from the measured pieces."""
    verify = tuple(costs.verify_ratio(exit_layer, drafted) for drafted in range(1, max_draft_tokens + 1))
    return DraftCosts(costs.cost_ratio(exit_layer), verify, costs.overhead_ratio)


def of_cell(cell: Cell, costs: Costs, max_draft_tokens: int) -> Candidate:
    """Return layer skip as a cell of the grid says."""
    k, name = cell.num_draft_tokens, "layer-skip"
    known = {name: layer_skip_costs(costs, cell.exit_layer, max_draft_tokens)}
    return Candidate(
        settings=DraftSettings("layer-skip", cell.exit_layer),
        num_draft_tokens=k,
        alpha=cell.alpha,
        cost_ratio=cell.cost_ratio,
        verify_ratio=cell.verify_ratio,
        tokens_per_round=cell.tokens_per_round,
        tokens_per_step=cell.tokens_per_round,
        cost_per_step=cell.tokens_per_round / cell.speedup_predicted,
        known=KnownCosts(known, {name: cell.alpha}),
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


TRIAL_PROMPTS = 32
"""Prompts decoded with each drafter, spread over those profiled: rounds have to be played for each."""


class Trials:
    """Makes drafters, times each once, and profiles them by real rounds; one quantised copy is kept at a time.

    Args:
        engine: batch size 1, in the numerics to be used.
        model: the directory or hub name its model came from.
        book: what costs are asked of; the main process has measured it.
        context_length: live cache length the drafters are timed at.
        processes: among which the prompts are shared.
        kept: where finished drafters are kept.

    Attributes:
        skipped: label → why a drafter could not be tried.
        counted: label → per prompt (its domain, what was counted).
    """

    def __init__(
        self,
        engine: Engine,
        model: str,
        config: SweepConfig,
        book: CostBook,
        context_length: float,
        processes: Processes,
        kept: Kept | None = None,
        progress: Progress = silent,
    ) -> None:
        self.engine, self.model, self.config, self.progress = engine, model, config, progress
        self.book, self.context_length, self.processes, self.kept = book, context_length, processes, kept
        self.skipped: dict[str, str] = {}
        self.counted: dict[str, list[tuple[str, Stats]]] = {}
        self._drafters: dict[DraftSettings, Drafter] = {}

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
        self, prompts: Sequence[Prompt], params: SamplingParams, layer_skip: Candidate | None = None
    ) -> list[Candidate]:
        """Profile the drafters asked for besides `layer_skip`; the hybrid copies, and takes the best of the others."""
        asked, found = self.config.drafters, [layer_skip] if layer_skip else []
        if self.config.source == "reference":
            others = [name for name in asked if name != "layer-skip" and (name != "exit-head" or self._has_exit_head())]
            self.skipped |= dict.fromkeys(others, "it is profiled by decoding: --source generated")
            return found
        requests = some_of_each_domain(prompts, TRIAL_PROMPTS)
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

    def known_costs(self, settings: DraftSettings, context_length: float) -> dict[str, DraftCosts]:
        """Return the costs of a drafter's parts at a context length; layer skip's are composed."""
        known: dict[str, DraftCosts] = {}
        for part in settings.parts:
            if part.drafter == "layer-skip" and part.draft_vocab is None and part.exit_layer:
                costs = self.book.at(context_length)
                known[part.drafter] = layer_skip_costs(costs, part.exit_layer, self.config.max_draft_tokens)
            else:
                known[part.drafter] = self.book.draft(part.label, self.drafter(part), context_length)
        return known

    def _try(self, settings: DraftSettings, prompts: Sequence[Prompt], params: SamplingParams) -> list[Candidate]:
        failed = ""
        try:
            self.drafter(settings)
        except UserError as error:
            failed = f"{error.what} (got {error.got})" if error.got else error.what
        # Where one process cannot, none may: all have to meet below.
        failed = next(filter(None, self.processes.gather([failed])), "")
        if failed:
            self.skipped[settings.label] = failed
            return []
        known = self.processes.from_main(lambda: self.known_costs(settings, self.context_length))
        stage = f"profile {settings.label}"
        done = self.processes.from_main(lambda: self.kept.get(stage, "all") if self.kept else None)
        if done is None:
            policy, own = CostPolicy(known, k_max=self.config.max_draft_tokens), self.processes.share(prompts)
            counted = []
            for number, prompt in enumerate(own):
                self.progress(stage, number, len(own))
                _, stats = self.engine.generate([prompt.request], params, self.drafter(settings), policy)
                counted.append((prompt.domain, stats.counts()))
            self.progress(stage, len(own), len(own))
            done = self.processes.gather(counted)
            if self.kept and self.processes.main:
                self.kept.put(stage, "all", done)
        self.counted[settings.label] = [(domain, Stats.of_counts(counts)) for domain, counts in done]
        return [of_rounds(settings, self.sum(settings.label), known)]

    def sum(self, label: str, domain: str | None = None) -> Stats:
        """Return what was counted of a drafter, in all prompts or those of one domain."""
        total = Stats()
        for name, stats in self.counted[label]:
            if domain is None or name == domain:
                total.add(stats)
        return total


def some_of_each_domain(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """Return about `count` prompts at even distances, of each domain its share, but at least one."""
    by_domain: dict[str, list[int]] = {}
    for number, prompt in enumerate(prompts):
        by_domain.setdefault(prompt.domain, []).append(number)
    chosen: list[int] = []
    for numbers in by_domain.values():
        chosen += spread_evenly(numbers, max(1, round(count * len(numbers) / len(prompts))))
    return [prompts[number] for number in sorted(chosen)]
