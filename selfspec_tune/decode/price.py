"""What decoding costs on this machine: exact against fast numerics, and a draft against a plain step, side by side."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from selfspec_tune.artifact import Artifact
from selfspec_tune.config import MAX_DRAFT_TOKENS
from selfspec_tune.decode.accept import accept_greedy, accept_ratio
from selfspec_tune.decode.drafters import Draft, Drafter, Source, never
from selfspec_tune.decode.engine import Engine
from selfspec_tune.decode.graphs import on_device, recordings
from selfspec_tune.decode.policy import ContextCosts, DraftCosts
from selfspec_tune.decode.sampling import GREEDY, SamplingParams, distribution, draw
from selfspec_tune.decode.verify import step_plain, verify
from selfspec_tune.model.cache import SharedKVCache
from selfspec_tune.model.decoder import LayeredDecoder
from selfspec_tune.model.rows import ANY_ROWS, RowCounts
from selfspec_tune.progress import Progress, silent


def plain_step_seconds(
    decoder: LayeredDecoder,
    exact_rows: list[RowCounts],
    *,
    batch_size: int = 1,
    context_length: int = 256,
    repeats: int = 15,
    progress: Progress = silent,
) -> dict[str, float]:
    """Return median seconds of one plain step, {"exact": .., "fast": ..}; no "exact" when `exact_rows` is empty.

    The two are timed in turn, so that a busy machine slows both alike.
    """
    kinds = {"exact": exact_rows[0]} if exact_rows else {}
    kinds["fast"] = ANY_ROWS
    cache = decoder.new_cache(batch_size, context_length + 1)
    cache.expected, recorded = context_length + 1, recordings(decoder)
    last = torch.zeros(batch_size, dtype=torch.long, device=decoder.device)
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    rows_before, exact_before = decoder.rows, decoder.exact
    try:
        for repeat in range(repeats + 2):
            for name, rows in kinds.items():
                decoder.rows, decoder.exact = rows, name == "exact"
                cache.committed.fill_(context_length)
                begin = time.perf_counter()
                with on_device(decoder.device):
                    recorded.run(name, lambda: step_plain(decoder, cache, last).argmax(-1)).tolist()
                if repeat >= 2:
                    seconds[name].append(time.perf_counter() - begin)
            progress("timing plain steps", repeat + 1, repeats + 2)
    finally:
        decoder.rows, decoder.exact = rows_before, exact_before
    return {name: statistics.median(values) for name, values in seconds.items()}


@dataclass(frozen=True)
class KnownCosts:
    """What `selfspec.json` keeps for the cost policy, by drafter: its costs, and how often its tokens stood.

    `by_context` holds the costs at other context lengths, and where a draft does not pay.
    """

    costs: dict[str, DraftCosts]
    alphas: dict[str, float]
    by_context: tuple[ContextCosts, ...] = ()

    @classmethod
    def of(cls, artifact: Artifact) -> KnownCosts:
        """Read the fields `costs` and `by_context`."""
        alphas = {name: value["alpha"] for name, value in artifact.costs.items() if value["alpha"] is not None}
        contexts = tuple(
            ContextCosts(
                max_context=entry["max_context"],
                costs=_read_costs(entry["costs"]),
                exit_layer=entry["exit_layer"],
                enabled=entry["num_draft_tokens"] > 0,
            )
            for entry in artifact.by_context
        )
        return cls(_read_costs(artifact.costs), alphas, contexts)

    def to_artifact(self) -> dict[str, dict[str, Any]]:
        """Return the field `costs`."""
        return write_costs(self.costs, self.alphas)


def write_costs(costs: dict[str, DraftCosts], alphas: dict[str, float]) -> dict[str, dict[str, Any]]:
    """Return costs by drafter as `selfspec.json` holds them."""
    return {
        name: {"alpha": alphas.get(name), **asdict(value), "verify_ratio": list(value.verify_ratio)}
        for name, value in costs.items()
    }


def _read_costs(values: dict[str, dict[str, Any]]) -> dict[str, DraftCosts]:
    return {
        name: DraftCosts(value["cost_ratio"], tuple(value["verify_ratio"]), value["overhead"])
        for name, value in values.items()
    }


def measured_on(decoder: LayeredDecoder) -> dict[str, Any]:
    """Return what costs depend on besides the model: device, dtype, threads and versions of libraries."""
    return {
        "device": torch.cuda.get_device_name(decoder.device) if decoder.device.type == "cuda" else _processor(),
        "dtype": str(decoder.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        **{package: _version(package) for package in ("transformers", "triton", "numba")},
    }


def measured_elsewhere(artifact: Artifact, decoder: LayeredDecoder) -> str:
    """Return in what the artifact's costs were measured elsewhere, such as "threads 8 (here 2)"; "" if in nothing."""
    here, there = measured_on(decoder), artifact.measured_on
    others = [f"{name} {there.get(name)} (here {value})" for name, value in here.items() if there.get(name) != value]
    return ", ".join(others)


def _processor() -> str:
    """Return the name of the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


TIMED_VERIFICATIONS = (1, 2, 4, MAX_DRAFT_TOKENS)
"""Draft lengths whose verification is timed; between them costs are taken to grow linearly."""


def draft_costs(
    engine: Engine,
    drafter: Drafter,
    params: SamplingParams = GREEDY,
    *,
    context_length: int = 256,
    repeats: int = 7,
    overhead: float = 0.0,
    plain_overhead: float = 0.0,
    progress: Progress = silent,
) -> DraftCosts:
    """Time a drafter's steps and the verification of what it drafts against a plain step, in turn.

    Args:
        engine: its numerics and batch size are those measured.
        drafter: offers one source; a repeating text is made for it, so that copying finds a match.
        params: how tokens are chosen on all sides; sampling makes heads and acceptance dearer.
        context_length: live cache length; shortened to fit the model's context.
        overhead, plain_overhead: what a round, and a plain step, cost besides, in passes of a plain step; not timed.
    """
    decoder = engine.decoder
    context_length = min(context_length, decoder.family.max_context - 2 * MAX_DRAFT_TOKENS)
    text = ([2, 3, 4, 5] * context_length)[:context_length]
    seconds: dict[str, list[float]] = {}

    recorded = recordings(decoder)

    def timed(name: str, run: Callable[[], Tensor]) -> Tensor:
        begin = time.perf_counter()
        result = run() if drafter.reads_text and name.startswith("draft") else recorded.run(name, run)
        result.flatten()[-1].item()  # waits for the device
        seconds.setdefault(name, []).append(time.perf_counter() - begin)
        return result

    with torch.inference_mode(), on_device(decoder.device):
        cache, last = engine.ready([text] * engine.batch_size, drafter)
        cache.expected = context_length + MAX_DRAFT_TOKENS + 1
        cache.committed.fill_(context_length)
        source = (drafter.sources() or [Source(drafter.name)])[0]
        # One draft for all repeats: what is recorded keeps its tensors, and their contents do not matter.
        draft = drafter.propose(last, cache, MAX_DRAFT_TOKENS, _Chooser(params), source)
        for repeat in range(repeats + 2):
            timed("plain", lambda: accept_any(step_plain(decoder, cache, last), last[:, None][:, :0], None, params)[1])
            for k in (1, 4):
                # Where rounds are recorded, nobody asks how sure the draft is.
                asked = not recorded.active
                timed(f"draft {k}", partial(_propose, drafter, last, cache, k, source, params, asked=asked))
            for k in TIMED_VERIFICATIONS:
                timed(f"verify {k}", partial(_verify, decoder, cache, last, draft, k, params))
            progress("timing the draft", repeat + 1, repeats + 2)
    decoder.tap, cache.expected = None, None
    # Ratios repeat by repeat: what slows the machine down for a while slows both sides.
    plain = seconds["plain"][2:]
    ratios = {name: [t / unit for t, unit in zip(values[2:], plain, strict=True)] for name, values in seconds.items()}
    medians = {name: statistics.median(values) for name, values in ratios.items()}
    longer = [four - one for one, four in zip(ratios["draft 1"], ratios["draft 4"], strict=True)]
    step = max(0.0, statistics.median(longer)) / 3
    rest = max(0.0, medians["draft 1"] - step)
    verify_ratio = [rest + _between(medians, k) for k in range(1, MAX_DRAFT_TOKENS + 1)]
    # More rows never cost less, whatever the clock says.
    unit = 1 + plain_overhead
    return DraftCosts(step / unit, tuple(cost / unit for cost in accumulate(verify_ratio, max)), overhead / unit)


class _Chooser:
    """Chooses draft tokens, and looks at the draft's confidence as the cost policy does, without ever ending it."""

    confidence: Tensor

    def __init__(self, params: SamplingParams) -> None:
        self.params = params

    def __call__(self, logits: Tensor, offset: int) -> tuple[Tensor, Tensor | None]:
        if self.params.greedy:
            self.confidence = (logits.amax(-1) - logits.logsumexp(-1)).exp()
            return logits.argmax(-1), None
        q = distribution(logits, self.params)
        self.confidence = q.amax(-1)
        return draw(q, torch.full_like(q[:, 0], 0.5)), q

    def enough(self) -> bool:
        return float(self.confidence.mean()) < 0


def _propose(
    drafter: Drafter, last: Tensor, cache: SharedKVCache, k: int, source: Source, params: SamplingParams, *, asked: bool
) -> Tensor:
    chooser = _Chooser(params)
    return drafter.propose(last, cache, k, chooser, source, chooser.enough if asked else never).tokens


def _verify(
    decoder: LayeredDecoder, cache: SharedKVCache, last: Tensor, draft: Draft, k: int, params: SamplingParams
) -> Tensor:
    hidden = None if draft.hidden is None else draft.hidden[:, : k + 1]
    q = None if draft.probabilities is None else draft.probabilities[:, :k]
    logits = verify(decoder, cache, last, Draft(draft.tokens[:, :k], q, hidden, draft.resume_layer))
    return accept_any(logits, draft.tokens[:, :k], q, params)[1]


def accept_any(logits: Tensor, drafted: Tensor, q: Tensor | None, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """Test [B, k] draft tokens against [B, k + 1, V] logits as the engine does; any noise costs the same."""
    if params.greedy:
        return accept_greedy(drafted, logits)
    target = distribution(logits, params)
    uniform = torch.full(logits.shape[:2], 0.5, device=logits.device)
    return accept_ratio(drafted, q, target, uniform[:, :-1], uniform[:, -1])


def _between(medians: dict[str, float], k: int) -> float:
    """Return the cost of verifying k tokens, from the timed lengths around it."""
    low = max(timed for timed in TIMED_VERIFICATIONS if timed <= k)
    high = min(timed for timed in TIMED_VERIFICATIONS if timed >= k)
    share = (k - low) / (high - low) if high > low else 0.0
    return medians[f"verify {low}"] * (1 - share) + medians[f"verify {high}"] * share
