"""A training run as it is seen: a live table in a terminal, plain lines in a pipe, always on stderr."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from selfspec_tune.cli import console
from selfspec_tune.config import TrainConfig
from selfspec_tune.progress import Progress, Report
from selfspec_tune.train import guard

SECONDS_PER_LINE = 15.0
"""In a pipe a step gets a line at most so often; an evaluation always does."""


@contextmanager
def training_view(config: TrainConfig, *, shown: bool = True) -> Iterator[tuple[Progress, Report]]:
    """Yield the two functions that a run reports to. With `shown` False, for ranks but the first, they say nothing."""
    run = RunView(config)
    with console.live_view(shown=shown) as view:

        def report(record: dict[str, Any]) -> None:
            line = run.take(record, time.monotonic())
            if not shown:
                return
            if "notice" in record:
                view.say(record["notice"])
            elif view.is_live:
                view.show(run.rows())
            elif line is not None:
                view.say(line)

        yield (view.progress if view.is_live else _nowhere), report


class RunView:
    """What is known of a run, as text. It reads the records of metrics.jsonl as they come."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.base: dict[str, Any] = {}
        self.step: dict[str, Any] = {}
        self.evaluation: dict[str, Any] = {}
        self.best: dict[str, Any] = {}
        self.line_at = -SECONDS_PER_LINE

    def take(self, record: dict[str, Any], now: float) -> str | None:
        """Take a record at a time in seconds; return a plain line about it where one is due."""
        if "loss" in record:
            self.step = record
            if now - self.line_at < SECONDS_PER_LINE:
                return None
            self.line_at = now
            return f"{self._count(record)}: " + ", ".join([f"loss {record['loss']:.3f}", *self._pace()])
        if "perplexity" not in record:
            return None
        if record["step"] == 0:
            self.base = record
        elif record.get("within_budget") and guard.better(record, self.best or None):
            self.best = record
        self.evaluation, self.line_at = record, now
        over = [] if record.get("within_budget", True) else ["over the budget"]
        parts = [*self._perplexities(), f"alpha {self._alphas()}", f"speed-up {self._speedup()}", *over]
        return f"{self._count(record)}: " + ", ".join([*parts, *self._pace()])

    def rows(self) -> list[tuple[str, str]]:
        """Return names and values of the live table."""
        rows = []
        if self.step:
            rows.append(("loss", f"{self.step['loss']:.3f}"))
            running = ", ".join(f"{layer}: {value:.2f}" for layer, value in self.step["running_alpha"].items())
            rows.append(("accepted in training", running))
        if self.evaluation:
            rows.append(("evaluated", self._count(self.evaluation)))
            rows.append(("alpha per exit", self._alphas()))
            rows += [("perplexity", text.removeprefix("perplexity ")) for text in self._perplexities()]
            rows.append(("speed-up", self._speedup()))
        if self.best:
            rows.append(("best within budget", f"step {self.best['step']}, {guard.score(self.best):.2f}"))
        return [*rows, *([("pace", ", ".join(self._pace()))] if self.step else [])]

    def _count(self, record: dict[str, Any]) -> str:
        kept = f", {record['share_kept']:.0%} of the change kept" if "share_kept" in record else ""
        return f"step {record['step']}/{self.config.max_steps}{kept}"

    def _alphas(self) -> str:
        base = self.base.get("alpha", {})
        before = {layer: f" (base {base[layer]:.2f})" if layer in base else "" for layer in self.evaluation["alpha"]}
        if self.evaluation is self.base:
            before = dict.fromkeys(before, "")
        return ", ".join(f"{layer}: {value:.2f}{before[layer]}" for layer, value in self.evaluation["alpha"].items())

    def _perplexities(self) -> list[str]:
        rises = self.evaluation.get("perplexity_increase", {})
        texts = {"held_out": ("perplexity", "held-out"), "general": ("general_perplexity", "general")}
        return [
            f"perplexity {name} {self.evaluation[key]:.3f}"
            + (f" ({rises[text]:+.1%} over the base)" if text in rises else "")
            for text, (key, name) in texts.items()
            if key in self.evaluation
        ]

    def _speedup(self) -> str:
        cell = self.evaluation["speedup_estimate"]
        at = f"at exit {cell['exit_layer']}, k = {cell['num_draft_tokens']}"
        base = f"; base {guard.score(self.base):.2f}" if self.base and self.evaluation is not self.base else ""
        return f"{cell['speedup_model']:.2f} {at} (estimate{base})"

    def _pace(self) -> list[str]:
        if not self.step:
            return []
        done, seconds, config = self.step["step"], self.step["seconds"], self.config
        left = (config.max_steps - done) * seconds / done
        if config.max_minutes is not None:
            left = min(left, max(0.0, 60 * config.max_minutes - seconds))
        return [f"{self.step['tokens_per_second']:,.0f} tokens/s", f"{_duration(left)} left"]


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def _nowhere(stage: str, done: int, total: int) -> None:
    """Draw no bar."""
