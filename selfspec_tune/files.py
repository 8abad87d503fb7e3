"""Reading and writing files so that nothing is ever half written and a bad line is named. Imports no torch."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from selfspec_tune.errors import UserError


@contextmanager
def temporary_beside(path: Path) -> Iterator[Path]:
    """Make a temporary file beside `path`, to be written, and rename it over `path` only if the block succeeds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    os.close(descriptor)
    temporary = Path(name)
    try:
        yield temporary
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def atomic_writer(path: Path) -> Iterator[TextIO]:
    """Open a temporary file beside `path` and rename it over `path` only if the block succeeds."""
    with temporary_beside(path) as temporary, temporary.open("w", encoding="utf-8") as handle:
        yield handle
        handle.flush()
        os.fsync(handle.fileno())


def write_bytes(path: Path, content: bytes) -> None:
    """Write `content`, atomically."""
    with temporary_beside(path) as temporary:
        temporary.write_bytes(content)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, atomically."""
    with atomic_writer(path) as handle:
        json.dump(value, handle, indent=2, ensure_ascii=False)
        handle.write("\n")


def read_json(path: Path) -> Any:
    """Read one JSON file; a missing or broken file is a UserError that names it."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist", command=f"ls {path.parent}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid JSON: {error}") from None


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Read a JSONL file of objects; a bad line is a UserError that names file and line."""
    if not path.is_file():
        raise UserError(f"{path} does not exist or is not a file", command=f"ls {path.parent}")
    records = []
    with path.open("rb") as handle:
        for number, line in enumerate(handle, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                raise UserError(f"{path}:{number} is not valid JSON: {error}") from None
            if not isinstance(record, dict):
                raise UserError(
                    f"{path}:{number} is not a JSON object", got=type(record).__name__, allowed='{"prompt": "..."}'
                )
            records.append(record)
    return records


def read_text(path: Path) -> str:
    """Read a UTF-8 text file; a missing or binary file is a UserError."""
    try:
        return path.read_text(encoding="utf-8")
    except (FileNotFoundError, IsADirectoryError):
        raise UserError(f"{path} does not exist or is not a file", command=f"ls {path.parent}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: {error}") from None
