"""Costs measured once per context length and batch size, kept in a file, and asked for at any length in between."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from selfspec_tune.config import SweepConfig
from selfspec_tune.decode.drafters import Drafter
from selfspec_tune.decode.engine import Engine
from selfspec_tune.decode.policy import DraftCosts
from selfspec_tune.decode.price import draft_costs, measured_on
from selfspec_tune.decode.requests import Request
from selfspec_tune.decode.sampling import SamplingParams
from selfspec_tune.errors import UserError
from selfspec_tune.files import read_json, write_json
from selfspec_tune.progress import Progress, silent
from selfspec_tune.sweep.objective import Costs, between
from selfspec_tune.sweep.timing import bookkeeping_seconds, measure_costs


def contexts_that_fit(config: SweepConfig, max_context: int) -> list[int]:
    """Return the context lengths to measure at, sorted; those that the model's context cannot hold are left out."""
    most = max_context - config.max_draft_tokens - 1
    return sorted({length for length in config.context_lengths if length <= most})


class CostBook:
    """Costs of one model in one numerics on this machine.

    Args:
        engine: batch size 1.
        path: file to `read` from and write to, `--costs`; None keeps nothing.
        progress: told of repeats.
    """

    def __init__(
        self,
        engine: Engine,
        params: SamplingParams,
        config: SweepConfig,
        path: Path | None = None,
        progress: Progress = silent,
    ) -> None:
        self.engine, self.params, self.config, self.path, self.progress = engine, params, config, path, progress
        self.contexts = contexts_that_fit(config, engine.decoder.family.max_context)
        self._costs: dict[tuple[int, int], Costs] = {}
        self._drafts: dict[tuple[str, int], DraftCosts] = {}
        self._key = self._identity()

    @property
    def all(self) -> list[Costs]:
        """All there are, by batch size and context length."""
        return [self._costs[key] for key in sorted(self._costs, key=lambda key: key[::-1])]

    def read(self) -> None:
        """Read what the file holds, if there is one; a UserError if that was measured for something else, or broken."""
        if self.path is None or not self.path.exists():
            return
        path, content = self.path, read_json(self.path)
        again = "another --costs file, or none: then costs are measured"
        key = content.get("measured_for") if isinstance(content, dict) else None
        if not isinstance(key, dict):
            raise UserError(f"{path} holds no costs of selfspec", command=again)
        wrong = [name for name, value in self._key.items() if key.get(name) != value]
        if wrong:
            got = "; ".join(f"{name} {key.get(name)}" for name in wrong)
            allowed = "; ".join(f"{name} {self._key[name]}" for name in wrong)
            raise UserError(f"{path} was measured for something else", got=got, allowed=allowed, command=again)
        try:
            for value in content["costs"]:
                costs = _costs_of(value)
                self._costs[costs.context_length, costs.batch_size] = costs
            for value in content["drafts"]:
                known = DraftCosts(value["cost_ratio"], tuple(value["verify_ratio"]), value["overhead"])
                self._drafts[value["label"], value["context_length"]] = known
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UserError(f"{path} cannot be read as costs: {error!r}", command=again) from None

    def measure(self, request: Request) -> None:
        """Measure what is asked for and not known yet; `request` is decoded to time the engine's bookkeeping."""
        for batch_size in sorted({1, *self.config.batch_sizes}):
            missing = [length for length in self.contexts if (length, batch_size) not in self._costs]
            if not missing:
                continue
            engine = self.engine if batch_size == 1 else self._batched(batch_size)
            overheads = bookkeeping_seconds(engine, self.params, request, self.config.max_draft_tokens)
            for length in missing:
                self._costs[length, batch_size] = measure_costs(
                    engine,
                    self.params,
                    max_draft_tokens=self.config.max_draft_tokens,
                    context_length=length,
                    repeats=self.config.repeats,
                    overheads=overheads,
                    progress=self.progress,
                )
                self._write()

    def at(self, context_length: float, batch_size: int = 1) -> Costs:
        """Return the costs at any context length, between or beyond those measured."""
        return self._between(context_length, batch_size, lambda costs: costs)

    def resamples(self, context_length: float, count: int, seed: int = 0) -> list[Costs]:
        """Return `count` bootstrap resamples of the costs at a context length, over the repeats."""
        draw = random.Random(seed)
        return [self._between(context_length, 1, lambda costs: costs.resampled(draw)) for _ in range(count)]

    def draft(self, label: str, drafter: Drafter, context_length: float) -> DraftCosts:
        """Return what a drafter costs at a context length, timed once."""
        length = round(context_length)
        if (label, length) not in self._drafts:
            costs = self.at(length)
            self._drafts[label, length] = draft_costs(
                self.engine,
                drafter,
                self.params,
                context_length=length,
                repeats=self.config.repeats,
                overhead=costs.overhead / costs.plain,
                plain_overhead=costs.plain_overhead / costs.plain,
                progress=self.progress,
            )
            self._write()
        return self._drafts[label, length]

    def _between(self, context_length: float, batch_size: int, take: Callable[[Costs], Costs]) -> Costs:
        lengths = sorted(length for length, batch in self._costs if batch == batch_size)
        below = [length for length in lengths[:-1] if length <= context_length]
        low = below[-1] if below else lengths[0]
        high = lengths[min(lengths.index(low) + 1, len(lengths) - 1)]
        ends = take(self._costs[low, batch_size]), take(self._costs[high, batch_size])
        return between(ends[0], ends[1], context_length)

    def _batched(self, batch_size: int) -> Engine:
        return Engine(self.engine.decoder, numerics=self.engine.numerics, batch_size=batch_size)

    def _identity(self) -> dict[str, Any]:
        """Return what costs depend on."""
        family, params = self.engine.decoder.family, self.params
        return {
            "num_layers": family.num_layers,
            "hidden_size": family.hidden_size,
            "vocab_size": family.vocab_size,
            "num_kv_heads": family.num_kv_heads,
            "parameters": sum(weights.numel() for weights in self.engine.decoder.model.parameters()),
            "numerics": self.engine.numerics,
            "max_draft_tokens": self.config.max_draft_tokens,
            "sampling": [params.top_k, params.top_p] if params.temperature > 0 else "greedy",
            "measured_on": measured_on(self.engine.decoder),
        }

    def _write(self) -> None:
        if self.path is None:
            return
        drafts = [
            {"label": label, "context_length": length, **asdict(costs)}
            for (label, length), costs in self._drafts.items()
        ]
        content = {"measured_for": self._key, "costs": [asdict(costs) for costs in self.all], "drafts": drafts}
        write_json(self.path, content)


def _costs_of(value: dict[str, Any]) -> Costs:
    """Return costs from JSON, in which the keys of mappings are texts."""
    rows = {name: {int(key): item for key, item in value[name].items()} for name in ROW_TABLES}
    pieces = {key: tuple(names) for key, names in rows.pop("pieces").items()}
    return Costs(**{**value, **rows, "pieces": pieces})


ROW_TABLES = ("one_layer", "all_layers", "verify_heads", "pieces")
"""Fields of `Costs` by number of rows."""
