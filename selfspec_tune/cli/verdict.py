"""The warning that a checkpoint's gate has not passed, for every command that uses the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from selfspec_tune import artifact
from selfspec_tune.cli import console
from selfspec_tune.errors import UserError


def gate_notices(model: str, directory: Path | None, verdict: dict[str, Any] | None) -> list[str]:
    """Return a warning where the gate failed, is undecided, or was never run on weights that training changed.

    Args:
        model: as the user named it.
        directory: the checkpoint's, None for a hub name.
        verdict: what `selfspec.json` holds under `regress`.
    """
    again = f"run `selfspec regress {model}`"
    status = (verdict or {}).get("status") or ("passed" if (verdict or {}).get("passed") else "failed")
    if verdict and status == "failed":
        return [f"warning: {model} FAILED its regression gate; {again} to see how"]
    if verdict and status == "undecided":
        return [f"warning: the regression gate of {model} is undecided: it neither passed nor failed; {again}"]
    changed = ("training.json", "adapter_config.json")
    trained = directory is not None and any((directory / name).is_file() for name in changed)
    if trained and not ((verdict or {}).get("perplexity") or (verdict or {}).get("tasks")):
        return [f"warning: the weights of {model} were trained and never gated; {again}"]
    return []


def warn_of_gate(model: str) -> None:
    """Print the warning of MODEL's gate, for commands that read nothing else of selfspec.json; a bad file is silent."""
    from selfspec_tune.model.load import checkpoint_dir

    directory = checkpoint_dir(model)
    try:
        known = artifact.read(directory) if directory else None
    except UserError:
        return
    for line in gate_notices(model, directory, known.regress if known else None):
        console.notice(line)
