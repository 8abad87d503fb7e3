"""What the parts of the check share: sizes, one model, a clock each, and what a part found. Knows no part.

A part writes what it finds into its `Result` as it goes, so what was found before it failed or ran out of time stays.
"""

from __future__ import annotations

import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from types import FrameType
from typing import Any, Literal

import torch
from synthetic_weights import synthetic_model  # type: ignore[import-not-found]  # beside gpu_check.py, which runs this

from selfspec_tune.decode.drafters.layer_skip import LayerSkipDrafter
from selfspec_tune.decode.engine import Engine
from selfspec_tune.decode.policy import DraftPolicy
from selfspec_tune.decode.requests import Request
from selfspec_tune.decode.sampling import GREEDY
from selfspec_tune.model.decoder import LayeredDecoder
from selfspec_tune.sweep.timing import sample_in_turn

from .sizes import Sizes

Status = Literal["done", "cut", "failed", "skipped"]


@dataclass(frozen=True)
class Target:
    """A figure and what it shall be.

    Attributes:
        measured: None where it could not be measured; then it is not met.
        judged: whether it counts; it does not where no GPU or no full-size model was measured.
    """

    name: str
    at_least: bool
    bound: float
    measured: float | None
    judged: bool

    @property
    def met(self) -> bool | None:
        """Whether the figure is what it shall be; None where it is not judged."""
        if not self.judged:
            return None
        if self.measured is None:
            return False
        return self.measured >= self.bound if self.at_least else self.measured <= self.bound

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {**asdict(self), "met": self.met}


class Overrun(BaseException):
    """A part's time is up. No `Exception`, so that nothing on the way takes it for an error of its own."""


@dataclass
class Result:
    """What a part found.

    Attributes:
        label: what was measured: every figure is one of it, and of nothing else.
        values: figures, as JSON.
        skipped: what was left out, and why.
    """

    name: str
    title: str
    label: str
    judged: bool
    budget: float
    status: Status = "skipped"
    seconds: float = 0.0
    values: dict[str, Any] = field(default_factory=dict)
    targets: list[Target] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    error: str = ""
    began: float = field(default_factory=time.perf_counter)

    def left(self) -> float:
        """Return the seconds that are left of the budget."""
        return self.budget - (time.perf_counter() - self.began)

    def skip(self, what: str, why: str) -> None:
        """Leave something out, aloud."""
        self.skipped.append(f"{what}: {why}")
        say(f"  skipped {what}: {why}")

    def fits(self, what: str, seconds: float) -> bool:
        """Return whether there is time for work of about so many seconds; else it is skipped."""
        if self.left() > seconds:
            return True
        self.skip(what, f"{max(0.0, self.left()):.0f} s left of {self.budget:.0f}")
        return False

    def aim(self, name: str, measured: float | None, *, at_least: float | None = None, at_most: float = 0.0) -> None:
        """Hold a figure against a bound."""
        bound = at_most if at_least is None else at_least
        self.targets.append(Target(name, at_least is not None, bound, measured, self.judged))

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON object."""
        names = ("name", "title", "label", "status", "seconds", "budget", "values", "skipped", "error")
        return {**{name: getattr(self, name) for name in names}, "targets": [each.to_dict() for each in self.targets]}


class Bench:
    """The model and the engines that parts share, made when first asked for."""

    def __init__(self, sizes: Sizes, device: str) -> None:
        self.sizes, self.device = sizes, torch.device(device)
        self._engines: dict[int, Engine] = {}

    @cached_property
    def decoder(self) -> LayeredDecoder:
        """The synthetic model."""
        return LayeredDecoder(synthetic_model(self.sizes.preset, dtype=self.sizes.dtype, device=str(self.device)))

    @cached_property
    def bandwidth(self) -> float:
        """Bytes read and written per second by a copy on the device, median."""
        source = torch.zeros(self.sizes.copy_bytes, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        seconds = sorted(sample_in_turn({"copy": lambda: target.copy_(source)}, 15)["copy"])
        return 2 * self.sizes.copy_bytes / seconds[len(seconds) // 2]

    def engine(self, batch_size: int) -> Engine:
        """The engine of a batch size, in exact numerics."""
        if batch_size not in self._engines:
            self._engines[batch_size] = Engine(self.decoder, batch_size=batch_size)
        return self._engines[batch_size]

    def release(self) -> None:
        """Give up the engines and their caches."""
        self._engines.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def random_tokens(self, length: int, seed: int = 0) -> list[int]:
        """Return so many random token ids."""
        generator = torch.Generator().manual_seed(seed)
        ids: list[int] = torch.randint(self.decoder.family.vocab_size, (length,), generator=generator).tolist()
        return ids

    def step_bytes(self, live: float, batch_size: int = 1) -> float:
        """Return the bytes a plain step has to read: all products' weights, and keys and values of `live` slots."""
        decoder, family = self.decoder, self.decoder.family
        weights = [weight for layer in range(decoder.num_layers) for weight, _ in decoder.products(layer)]
        slot = 2 * family.num_layers * family.num_kv_heads * family.head_size * decoder.dtype.itemsize
        return sum(weight.nbytes for weight in [*weights, decoder.head[0]]) + batch_size * live * slot


def make_model(bench: Bench, result: Result) -> None:
    """Make the model and decode a few tokens plainly and with layer skip, so that no other part pays for that."""
    engine = bench.engine(1)
    drafter = LayerSkipDrafter(bench.decoder, bench.sizes.exits[0])
    for how in ((None, None), (drafter, DraftPolicy(bench.sizes.draft_lengths[0]))):
        engine.generate([Request("0", bench.random_tokens(8), 8)], GREEDY, *how)
    result.values["parameters"] = sum(weight.numel() for weight in bench.decoder.model.parameters())


def run_part(work: Callable[[Bench, Result], None], bench: Bench, result: Result) -> None:
    """Run a part within its budget; whatever goes wrong stays in its result."""
    say(f"{result.title} (up to {result.budget:.0f} s)")

    def stop(number: int, frame: FrameType | None) -> None:
        raise Overrun

    previous = signal.signal(signal.SIGALRM, stop)
    result.began = time.perf_counter()
    signal.setitimer(signal.ITIMER_REAL, max(result.budget, 0.001))
    try:
        work(bench, result)
        result.status = "done"
    except Overrun:
        result.status = "cut"
        result.skip("the rest of this part", f"its {result.budget:.0f} s are up")
    except Exception as error:  # one part's failure leaves the others
        result.status, result.error = "failed", f"{type(error).__name__}: {error}"
        say("  FAILED: " + "".join(traceback.format_exception(error)[-3:]).rstrip())
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        result.seconds = round(time.perf_counter() - result.began, 2)
        bench.release()


def say(text: str) -> None:
    """Print a progress line on stderr."""
    print(text, file=sys.stderr, flush=True)
