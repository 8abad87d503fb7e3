"""What `sweep-exit` leaves behind: the contents of `selfspec.json` for the drafter it chose."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from selfspec_tune import artifact as artifacts
from selfspec_tune.artifact import Artifact
from selfspec_tune.config import SweepConfig
from selfspec_tune.decode.drafters.make import DraftSettings
from selfspec_tune.decode.engine import Engine
from selfspec_tune.decode.price import measured_on
from selfspec_tune.errors import UserError
from selfspec_tune.model.load import checkpoint_dir
from selfspec_tune.sweep.decision import Decision
from selfspec_tune.sweep.tally import Profile


def build_artifact(model: str, engine: Engine, config: SweepConfig, profile: Profile, choice: Decision) -> Artifact:
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
        measured_on=measured_on(engine.decoder),
        eval_set={
            "name": config.prompts.name if config.prompts else "",
            "num_prompts": profile.num_prompts,
            "num_tokens": profile.num_tokens,
            **{name: getattr(config, name) for name in ("temperature", "top_k", "top_p")},
        },
        regress=_kept_verdict(directory, best.settings, engine.numerics),
    )


def _kept_verdict(directory: Path | None, settings: DraftSettings, numerics: str) -> dict[str, Any] | None:
    """Return the verdict of `regress` in the artifact that is there, if it is about these weights.

    What it says of losslessness holds only for the drafter and the numerics that it was about.
    """
    try:
        previous = artifacts.read(directory) if directory else None
        verdict = previous.regress if previous else None
    except UserError:
        return None
    if verdict is None:
        return None
    about = (settings.label, numerics)
    other = [
        name
        for name in ("lossless", "sampling")
        for part in [verdict.get(name)]
        if part and (about[0] not in part.get("drafters", []) or part.get("numerics") != about[1])
    ]
    if not other:
        return verdict
    kept = artifacts.judged({**verdict, **dict.fromkeys(other)})
    return kept if any(kept.get(name) for name in artifacts.VERDICT_PARTS) else None
