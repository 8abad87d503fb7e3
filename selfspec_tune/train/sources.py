"""Where training data lie: rows of local files and hub data sets, each with its place, from any position on.

A row is what its source holds: the bytes of a JSONL line, the fields of a table's row, or a text as a whole.
`records.py` makes records of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from selfspec_tune.errors import UserError
from selfspec_tune.files import read_text

Row = bytes | str | dict[str, Any]

# NAME, NAME:SPLIT or NAME:CONFIG:SPLIT; a split may be a slice such as train[:5000].
_HUB_NAME = re.compile(r"(?P<name>[^:]+)(:(?P<config>[^:\[]+)(?=:))?(:(?P<split>[^:\[]+(\[[^\]]*\])?))?")
KINDS = ".txt, .jsonl, .parquet, or a hub name as NAME, NAME:SPLIT or NAME:CONFIG:SPLIT"


class Source(Protocol):
    """One source of rows. `rows` goes on from where the source is, and ends with the source."""

    def rows(self) -> Iterator[tuple[str, Row]]:
        """Yield each row with its place, such as file and line."""
        ...

    def position(self) -> Any:
        """Return where the source is: behind the row yielded last. Plain values."""
        ...

    def go_to(self, position: Any) -> None:
        """Go to a position; None is the beginning. Iterators of before are of no use any more."""
        ...


def open_source(source: str, *, streaming: bool = False, rank: int = 0, ranks: int = 1) -> Source:
    """Return a source at its beginning.

    Args:
        source: a .txt file (one row), a .jsonl file, a .parquet file, or a hub data set as NAME, NAME:SPLIT or
            NAME:CONFIG:SPLIT (split train by default; slices such as train[:5000] work if not streamed). NAME may be a
            directory of such files.
        streaming: read a hub data set while it is iterated over, instead of all of it now. Files always are.
        rank: which part of the rows to yield.
        ranks: number of parts.

    Raises:
        UserError: there is no such source.
    """
    path = Path(source)
    if path.suffix in (".txt", ".jsonl", ".parquet") and not path.is_file():
        raise UserError(f"{path} does not exist or is not a file", command=f"ls {path.parent}")
    if path.suffix == ".txt":
        return TextFile(path, rank)
    if path.suffix == ".jsonl":
        return JsonLines(path, rank, ranks)
    return Table(_dataset(source, streaming), source, rank, ranks)


class TextFile:
    """A file that is one row, the first part's."""

    def __init__(self, path: Path, rank: int) -> None:
        self.path, self.rank, self.done = path, rank, False

    def rows(self) -> Iterator[tuple[str, Row]]:
        if self.rank == 0 and not self.done:
            self.done = True
            yield str(self.path), read_text(self.path)

    def position(self) -> bool:
        return self.done

    def go_to(self, position: bool | None) -> None:
        self.done = bool(position)


class JsonLines:
    """A file of lines. Not read by `datasets`, whose JSON reader cannot say which line is broken."""

    def __init__(self, path: Path, rank: int, ranks: int) -> None:
        self.path, self.rank, self.ranks = path, rank, ranks
        self.go_to(None)

    def rows(self) -> Iterator[tuple[str, Row]]:
        with self.path.open("rb") as handle:
            handle.seek(self.offset)
            for line in iter(handle.readline, b""):
                self.offset += len(line)
                self.line += 1
                if not line.strip():
                    continue
                self.count += 1
                if self.count % self.ranks == (self.rank + 1) % self.ranks:
                    yield f"{self.path}:{self.line}", line

    def position(self) -> list[int]:
        return [self.offset, self.line, self.count]

    def go_to(self, position: list[int] | None) -> None:
        self.offset, self.line, self.count = position or (0, 0, 0)


class Table:
    """A data set of the library `datasets`."""

    def __init__(self, dataset: Any, name: str, rank: int, ranks: int) -> None:
        from datasets.distributed import split_dataset_by_node

        self.dataset = split_dataset_by_node(dataset, rank, ranks) if ranks > 1 else dataset
        self.name, self.part = name, f" of part {rank + 1} of {ranks}" if ranks > 1 else ""
        self.go_to(None)

    def rows(self) -> Iterator[tuple[str, Row]]:
        try:
            self.dataset.load_state_dict(self.start)
            self.begun = True
            for row in self.dataset:
                self.count += 1
                yield f"{self.name} row {self.count}{self.part}", dict(row)
        except Exception as error:  # of any class: a damaged file, a lost connection
            raise UserError(f"{self.name} cannot be read after row {self.count}: {_reason(error)}") from None

    def position(self) -> list[Any]:
        return [self.dataset.state_dict() if self.begun else self.start, self.count]

    def go_to(self, position: list[Any] | None) -> None:
        self.start: Any = position[0] if position else None
        self.count: int = position[1] if position else 0
        self.begun = False


def _dataset(source: str, streaming: bool) -> Any:
    from datasets import load_dataset

    try:
        if source.endswith(".parquet"):
            # Streamed in any case, for that copies nothing into the cache.
            return load_dataset("parquet", data_files=source, split="train", streaming=True)
        match = _HUB_NAME.fullmatch(source)
        if match is None or Path(source).is_file():
            raise UserError("this training data cannot be read", got=source, allowed=KINDS)
        split = match["split"] or "train"
        if streaming and "[" in split:
            raise UserError(
                "a slice of a split cannot be streamed", got=source, allowed="NAME:SPLIT, or no --streaming"
            )
        found = load_dataset(match["name"], match["config"], split=split, streaming=streaming)
        return found if streaming else found.to_iterable_dataset()
    except UserError:
        raise
    except Exception as error:  # datasets raises a different class for every way in which a name can be wrong
        raise UserError(f"the data set {source!r} cannot be loaded: {_reason(error)}", allowed=KINDS) from None


def _reason(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
