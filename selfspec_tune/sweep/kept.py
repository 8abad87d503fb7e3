"""What an interrupted sweep had finished: kept in the user's cache directory until the sweep is done.

Every result is one line of a file of this process, written at once, so an interruption loses the line being written at
most. Another model, other prompts or another option that matters is another directory.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any


def cache_directory() -> Path:
    """Return where programs keep what can be made again: $XDG_CACHE_HOME/selfspec, else ~/.cache/selfspec."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "selfspec"


class Kept:
    """Finished parts of one sweep, by (stage, name).

    Args:
        key: everything the results depend on, as a JSON object.
        rank: number of this process; each writes a file of its own and reads all.

    Attributes:
        directory: where they are, for other files of the same sweep; None where nothing can be written.
        found: how many results an earlier run left.
    """

    def __init__(self, key: dict[str, Any], rank: int = 0) -> None:
        digest = hashlib.blake2b(json.dumps(key, sort_keys=True, default=str).encode(), digest_size=12).hexdigest()
        self.directory: Path | None = None
        self._values: dict[tuple[str, str], Any] = {}
        try:
            self.directory = cache_directory() / "sweeps" / digest
            self.directory.mkdir(parents=True, exist_ok=True)
            for path in sorted(self.directory.glob("done-*.jsonl")):
                self._read(path)
            self._file = self.directory / f"done-{rank}.jsonl"
            with self._file.open("ab+") as handle:
                handle.seek(max(0, handle.tell() - 1))
                if handle.read() not in (b"", b"\n"):
                    handle.write(b"\n")  # the interruption tore the last line
        except (OSError, RuntimeError):  # no home, or one that cannot be written to
            self.directory = None
        self.found = len(self._values)

    def _read(self, path: Path) -> None:
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                stage, name, value = json.loads(line)
            except ValueError:
                continue  # torn by the interruption
            self._values[stage, name] = value

    def get(self, stage: str, name: str) -> Any | None:
        """Return a result, or None if there is none yet."""
        return self._values.get((stage, name))

    def put(self, stage: str, name: str, value: Any) -> None:
        """Keep a result, a JSON value."""
        self._values[stage, name] = value
        if self.directory is not None:
            try:
                with self._file.open("a", encoding="utf-8") as handle:
                    handle.write(json.dumps([stage, name, value]) + "\n")
            except OSError:  # a full disk, or another sweep like this one has ended and taken the directory along
                self.directory = None

    def discard(self) -> None:
        """Forget everything: the sweep is done."""
        if self.directory is not None:
            shutil.rmtree(self.directory, ignore_errors=True)
