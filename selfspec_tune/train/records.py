"""Reading training records: .txt, .jsonl and hub data sets become `Record`s. Knows nothing of tokens and sequences."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from selfspec_tune.errors import UserError
from selfspec_tune.files import read_text
from selfspec_tune.trained_on import contents

# NAME, NAME:SPLIT or NAME:CONFIG:SPLIT; a split may be a slice such as train[:5000].
_HUB_NAME = re.compile(r"(?P<name>[^:]+)(:(?P<config>[^:\[]+)(?=:))?(:(?P<split>[^:\[]+(\[[^\]]*\])?))?")


@dataclass(frozen=True)
class Record:
    """One document: `prompt` is read but not predicted, `text` is both. `templated` text holds its special tokens.

    Attributes:
        contents: what the messages of a templated text say, the system's left out.
    """

    text: str
    prompt: str = ""
    templated: bool = False
    contents: tuple[str, ...] = field(default=(), compare=False)

    @property
    def parts(self) -> tuple[str, ...]:
        """What the record says, without a template."""
        return self.contents or (self.prompt, self.text)

    def digest(self) -> int:
        """Return a number that depends on the text alone, not on the file, the order or the process."""
        return int.from_bytes(hashlib.sha256(f"{self.prompt}\0{self.text}".encode()).digest()[:8], "big")


def read_records(source: str, tokenizer: Any, *, text_field: str, messages_field: str) -> list[Record]:
    """Read every record of one source, empty ones left out.

    Args:
        source: a .txt file (one document), a .jsonl file, or a hub data set as NAME, NAME:SPLIT or NAME:CONFIG:SPLIT
            (split train by default; slices such as train[:5000] work).
        tokenizer: renders chat messages through its template.
        text_field: field of the text; a record may have `prompt` and `completion` instead.
        messages_field: field of chat messages; wins where a record has it.

    Raises:
        UserError: a missing source, or a bad record, named by file and line (hub: by row).
    """
    if source.endswith(".txt"):
        return [record for record in [Record(read_text(Path(source)))] if record.text.strip()]
    numbered = _jsonl_rows(Path(source)) if source.endswith(".jsonl") else _hub_rows(source)
    records = (_record(row, where, tokenizer, text_field, messages_field) for where, row in numbered)
    return [record for record in records if record.text.strip()]


def _jsonl_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    # Not through `datasets`: its JSON reader cannot say which line is broken.
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{path}:{number} is not valid JSON: {error}") from None
        if not isinstance(row, dict):
            raise UserError(f"{path}:{number} is not a JSON object", got=type(row).__name__, allowed='{"text": "..."}')
        yield f"{path}:{number}", row


def _hub_rows(source: str) -> Iterator[tuple[str, dict[str, Any]]]:
    from datasets import load_dataset

    match = _HUB_NAME.fullmatch(source)
    kinds = ".txt, .jsonl, or a hub name as NAME, NAME:SPLIT or NAME:CONFIG:SPLIT"
    if match is None or Path(source).is_file():
        raise UserError("this training data cannot be read", got=source, allowed=kinds)
    split = match["split"] or "train"
    try:
        rows = load_dataset(match["name"], match["config"], split=split)
    except Exception as error:  # datasets raises a different class for every way in which a name can be wrong
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"the data set {source!r} cannot be loaded: {reason}", allowed=kinds) from None
    for number, row in enumerate(rows, start=1):
        yield f"{source} row {number}", dict(row)


def _record(row: dict[str, Any], where: str, tokenizer: Any, text_field: str, messages_field: str) -> Record:
    if row.get(messages_field) is not None:
        text = _render(row[messages_field], where, messages_field, tokenizer)
        return Record(text, templated=True, contents=tuple(contents(row[messages_field])))
    if row.get("prompt") is not None and row.get("completion") is not None:
        return Record(_text(row, "completion", where), prompt=_text(row, "prompt", where))
    if row.get(text_field) is not None:
        return Record(_text(row, text_field, where))
    raise UserError(
        f"{where} has no text",
        got=f"fields {', '.join(row) or '(none)'}",
        allowed=f"{text_field}, {messages_field}, or prompt and completion",
        command="--text-field FIELD",
    )


def _text(row: dict[str, Any], field: str, where: str) -> str:
    if not isinstance(row[field], str):
        raise UserError(f"{where}: {field} is not text", got=type(row[field]).__name__)
    return str(row[field])


def _render(messages: Any, where: str, field: str, tokenizer: Any) -> str:
    if tokenizer.chat_template is None:
        raise UserError(f"{where} holds chat messages, but the tokenizer has no chat template", allowed="text records")
    well_formed = isinstance(messages, list) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in messages
    )
    if not well_formed:
        raise UserError(f"{where}: {field} is not a list of messages", allowed='[{"role": "user", "content": "..."}]')
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False))
    except Exception as error:  # a template may refuse an order of roles with an exception of its own
        raise UserError(f"{where}: the chat template refuses these messages: {error}") from None
