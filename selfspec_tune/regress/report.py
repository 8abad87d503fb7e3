"""The verdict of `selfspec regress`: all tests, what they found, and where that is kept.

Order matters for memory only: the trained model is loaded, scored, decoded with and released before the base is
loaded, so that one model fits at a time.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from selfspec_tune import __version__, artifact
from selfspec_tune.artifact import VERDICT_PARTS, Artifact, judged, worst
from selfspec_tune.config import RegressConfig
from selfspec_tune.files import atomic_writer, write_json
from selfspec_tune.model.families import Family, describe
from selfspec_tune.model.layer import widens
from selfspec_tune.model.load import checkpoint_dir, load_model
from selfspec_tune.progress import Progress, silent
from selfspec_tune.regress import quality, score, table
from selfspec_tune.regress.decoding import Decoded, check_decoding
from selfspec_tune.regress.inputs import Inputs, read_inputs, same_weights
from selfspec_tune.regress.quality import ALL, Quality
from selfspec_tune.regress.score import Scores, Trained
from selfspec_tune.regress.tasks import Tasks, TaskScores, compare_tasks, score_tasks


@dataclass(frozen=True)
class Findings:
    """What the trained model's turn gave: its scores, how it decodes, and what the base must match."""

    trained: Trained | None
    tasks: list[TaskScores]
    decoded: Decoded | None
    family: Family
    config: Any
    versions: dict[str, Any]


def run(model: str, config: RegressConfig, progress: Progress = silent) -> tuple[dict[str, Any], list[str]]:
    """Test `model` and keep the verdict beside it.

    Args:
        model: checkpoint directory, adapter directory or hub name (then nothing is written).
        config: what to test, and how.
        progress: told of windows and cases.

    Returns:
        The verdict, and notices for the user on what was not tested or not written.

    Raises:
        UserError: nothing to test, or bad input.
    """
    inputs = read_inputs(model, config)
    findings = _try_trained(model, config, inputs, progress)
    compared, tasks = _try_base(model, config, inputs, findings, progress) if inputs.base else (None, None)
    verdict = build_verdict(compared, tasks, findings.decoded, inputs.settings, findings.versions)
    if inputs.artifact is not None and inputs.artifact.regress is not None:
        verdict = merged(verdict, inputs.artifact.regress)
    inputs.notices += store(model, verdict, findings.family, inputs.artifact)
    return verdict, inputs.notices


def compare_sets(inputs: Inputs, scores: Scores, *, same: bool) -> list[Quality]:
    """Compare each text set, and where there are several all together, which comes last."""
    start, parts = 0, []
    for text in inputs.texts:
        stop = start + len(text.documents)
        parts.append((text.name, scores.part(start, stop), text.available))
        start = stop
    if len(parts) > 1:
        parts.append((ALL, scores, sum(text.available for text in inputs.texts)))
    limit = inputs.max_increase
    return [
        quality.compare(name, part, max_increase=limit, available=available, same_weights=same)
        for name, part, available in parts
    ]


def build_verdict(
    compared: list[Quality] | None,
    tasks: Tasks | None,
    decoded: Decoded | None,
    settings: dict[str, str],
    versions: dict[str, Any],
) -> dict[str, Any]:
    """Return the verdict as one JSON object; what was not tested is null and cannot fail."""
    perplexity = None
    if compared:
        sets, whole = [each.to_dict() for each in compared], compared[-1].to_dict()
        status = worst(each.status for each in compared)
        top = {name: whole[name] for name in ("base", "trained", "ratio", "limit")}
        perplexity = {"status": status, "passed": status == "passed", **top, "sets": sets, "settings": settings}
    found = {
        "perplexity_ratio": perplexity["ratio"] if perplexity else None,
        "perplexity": perplexity,
        "tasks": tasks.to_dict() if tasks else None,
        "lossless": decoded.lossless.to_dict() if decoded else None,
        "sampling": decoded.sampling.to_dict() if decoded and decoded.sampling else None,
        "versions": versions,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    return judged(found)


def merged(verdict: dict[str, Any], earlier: dict[str, Any]) -> dict[str, Any]:
    """Return `verdict` with what it did not test taken from an earlier verdict on the same weights.

    Otherwise a run without `--text` would hide that perplexity failed. A part taken over keeps its own date.
    """
    kept = {
        name: {"date": earlier.get("date"), "status": _status(earlier[name], earlier), **earlier[name]}
        for name in VERDICT_PARTS
        if verdict.get(name) is None and earlier.get(name) is not None
    }
    if not kept:
        return verdict
    ratio = (kept.get("perplexity") or verdict["perplexity"] or {}).get("ratio")
    return judged({**verdict, **kept, "perplexity_ratio": ratio})


def store(model: str, verdict: dict[str, Any], family: Family, known: Artifact | None) -> list[str]:
    """Put the verdict into MODEL's selfspec.json and return notices; without a directory nothing is written.

    Where there is no usable selfspec.json one is made that says that no sweep has been run.
    """
    directory = checkpoint_dir(model)
    if directory is None:
        return [f"{model} is no directory here: the verdict was not stored"]
    if known is None:
        known = Artifact(
            checkpoint_fingerprint=artifact.fingerprint(directory),
            model_type=family.model_type,
            num_layers=family.num_layers,
            enabled=False,
            reason="no sweep was run",
        )
    try:
        artifact.write(directory, artifact.with_regress(known, verdict))
    except OSError as error:
        return [f"the verdict could not be stored in {directory}: {error.strerror or error}"]
    return []


def write_report(directory: Path, model: str, verdict: dict[str, Any]) -> None:
    """Write DIR/regress.json and DIR/regress.md, each atomically."""
    write_json(directory / "regress.json", {"model": model, **verdict})
    with atomic_writer(directory / "regress.md") as handle:
        handle.write(table.markdown(model, verdict))


def for_scoring(loaded: Any) -> Any:
    """Return the model, its weights widened to fp32 (no value changes) where that is what the device computes fast."""
    return loaded.float() if widens(loaded) else loaded


def _status(part: dict[str, Any], earlier: dict[str, Any]) -> str:
    """Return a part's status; verdicts of older versions had `passed` only, or only as a whole."""
    return str(part.get("status") or ("passed" if part.get("passed", earlier.get("passed")) else "failed"))


def _try_trained(model: str, config: RegressConfig, inputs: Inputs, progress: Progress) -> Findings:
    """Load the trained model and do all that needs it; it is released when this returns."""
    loaded = load_model(model, dtype=config.dtype, device=config.device)
    trained, tasks = None, []
    if inputs.base is not None:
        # Decoding below needs the weights as they are, so scoring in fp32 takes a copy of its own.
        again = widens(loaded) and load_model(model, dtype=config.dtype, device=config.device)
        scored = for_scoring(again) if again else loaded
        if inputs.texts:
            trained = score.score_trained(scored, inputs.documents, progress)
        tasks = _score_tasks(scored, config, inputs, progress)
        del scored, again
    versions = _versions(loaded)
    decoded = check_decoding(model, loaded, config, inputs, progress) if inputs.requests else None
    return Findings(trained, tasks, decoded, describe(loaded.config), loaded.config, versions)


def _try_base(
    model: str, config: RegressConfig, inputs: Inputs, findings: Findings, progress: Progress
) -> tuple[list[Quality] | None, Tasks | None]:
    """Load the base, which the trained model has made room for, and compare."""
    assert inputs.base is not None
    base = for_scoring(load_model(inputs.base, dtype=findings.versions["dtype"], device=config.device))
    quality.check_same_size(findings.config, base.config)
    compared, tasks = None, None
    if findings.trained is not None:
        scores = score.score_base(base, inputs.documents, findings.trained, progress)
        compared = compare_sets(inputs, scores, same=same_weights(model, inputs.base))
    if findings.tasks:
        theirs = _score_tasks(base, config, inputs, progress)
        tasks = compare_tasks(
            findings.tasks, theirs, max_drop=inputs.max_drop, same_weights=same_weights(model, inputs.base)
        )
    return compared, tasks


def _score_tasks(loaded: Any, config: RegressConfig, inputs: Inputs, progress: Progress) -> list[TaskScores]:
    if not inputs.tasks:
        return []
    return score_tasks(loaded, inputs.tokenizer, inputs.tasks, limit=config.task_limit, progress=progress)


def _versions(loaded: Any) -> dict[str, Any]:
    """Return what the numbers depend on besides the weights; dtype is the one both models are loaded in."""
    import transformers

    return {
        "selfspec": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": str(loaded.device),
        "dtype": str(loaded.dtype).removeprefix("torch."),
    }
