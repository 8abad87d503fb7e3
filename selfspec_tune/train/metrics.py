"""metrics.jsonl: one line per step and per evaluation, and what is in it after an interruption."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from selfspec_tune.files import atomic_writer
from selfspec_tune.train.writing import cannot_write


class Metrics:
    """Appends records with a `step` to a JSONL file; every line is flushed at once.

    Args:
        path: the file.
        enabled: False on all ranks but one.
    """

    def __init__(self, path: Path, *, enabled: bool = True) -> None:
        self.path, self.enabled = path, enabled

    def rewind(self, step: int | None) -> None:
        """Drop what is later than the state resumed from (it will be done again); with None, start an empty file."""
        if not self.enabled:
            return
        kept = []
        if step is not None and self.path.is_file():
            for line in self.path.read_text(encoding="utf-8").splitlines():
                try:
                    record = json.loads(line)
                except json.JSONDecodeError:  # the line being written when the process died
                    continue
                if record["step"] <= step:
                    kept.append(line)
        with atomic_writer(self.path) as handle:
            handle.writelines(f"{line}\n" for line in kept)

    def write(self, record: dict[str, Any]) -> None:
        """Append one record; a full disk is a UserError."""
        if self.enabled:
            try:
                with self.path.open("a", encoding="utf-8") as handle:
                    handle.write(json.dumps(record) + "\n")
            except OSError as error:
                raise cannot_write(self.path, error) from error


def flat(record: dict[str, Any]) -> dict[str, float]:
    """Turn {"alpha": {"6": 0.5}} into {"alpha/6": 0.5}, which trackers draw as one curve each."""
    result: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, dict):
            result.update({f"{name}/{key}": inner for key, inner in value.items()})
        else:
            result[name] = value
    return result
