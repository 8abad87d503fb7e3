"""What `sweep-exit` leaves behind: the contents of `selfspec.json` for the drafter it chose."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from selfspec_tune import artifact as artifacts
from selfspec_tune.artifact import Artifact
from selfspec_tune.config import SweepConfig
from selfspec_tune.decode.engine import Engine
from selfspec_tune.decode.price import environment
from selfspec_tune.errors import UserError
from selfspec_tune.model.load import checkpoint_dir
from selfspec_tune.sweep.candidates import Candidate
from selfspec_tune.sweep.confirm import Confirmed
from selfspec_tune.sweep.profile import Profile


@dataclass(frozen=True)
class Choice:
    """The best drafter, its measured speed-up where it was tried, whether to speculate with it, and why."""

    candidate: Candidate
    confirmed: Confirmed | None
    enabled: bool
    reason: str


def build_artifact(model: str, engine: Engine, config: SweepConfig, profile: Profile, choice: Choice) -> Artifact:
    """Return the artifact of a choice; an earlier verdict of `regress` on the same weights is kept.

    A choice that does not pay is recorded too: `enabled` is false, the rest shows the best there is.
    """
    best, confirmed = choice.candidate, choice.confirmed
    family, directory = engine.decoder.family, checkpoint_dir(model)
    return Artifact(
        checkpoint_fingerprint=artifacts.fingerprint(directory) if directory else "",
        model_type=family.model_type,
        num_layers=family.num_layers,
        enabled=choice.enabled,
        reason=choice.reason,
        **best.settings.to_artifact(),
        num_draft_tokens=best.num_draft_tokens,
        k_max=config.max_draft_tokens,
        k_policy="cost",
        numerics=engine.numerics,
        rows=list(engine.rows.counts),
        batch_size=engine.batch_size,
        alpha=best.alpha,
        cost_ratio=best.cost_ratio,
        verify_ratio=best.verify_ratio,
        costs=best.known.to_artifact(),
        tokens_per_round=best.tokens_per_round,
        speedup_model=best.speedup_model,
        speedup_predicted=best.speedup_predicted,
        speedup_confirmed=asdict(confirmed) if confirmed else None,
        measured_on=measured_on(engine),
        eval_set={
            "name": config.prompts.name if config.prompts else "",
            "num_prompts": profile.num_prompts,
            "num_tokens": profile.num_tokens,
            "temperature": config.temperature,
        },
        regress=_kept_verdict(directory),
    )


def measured_on(engine: Engine) -> dict[str, Any]:
    """Return what the costs depend on besides the model: device, dtype, threads and library versions."""
    return {
        **environment(engine.decoder),
        "torch": torch.__version__,
        "transformers": _version("transformers"),
        "triton": _version("triton"),
        "numba": _version("numba"),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _kept_verdict(directory: Path | None) -> dict[str, Any] | None:
    """Return the verdict of `regress` in the artifact that is there, if it is about these weights."""
    try:
        previous = artifacts.read(directory) if directory else None
    except UserError:
        return None
    return previous.regress if previous else None
