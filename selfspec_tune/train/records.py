"""Rows of any source become `Record`s, and bad ones are named. Knows nothing of tokens and sequences."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, replace
from typing import Any

from selfspec_tune.errors import UserError
from selfspec_tune.train.chat import Span, assistant_spans, render
from selfspec_tune.train.sources import Row, open_source
from selfspec_tune.trained_on import contents

SHOWN = 5
"""Skipped records that are named; the others are counted."""


class BadRecord(UserError):
    """A record that cannot be used, named by file and line (of a table: by row). Others of its source may be good."""


@dataclass(frozen=True)
class Record:
    """One document: `prompt` is read but not predicted, `text` is both. `templated` text holds its special tokens.

    Attributes:
        contents: what the messages of a templated text say, the system's left out.
        spans: the only characters of `text` that are predicted; None for all of them.
        where: file and line.
    """

    text: str
    prompt: str = ""
    templated: bool = False
    contents: tuple[str, ...] = field(default=(), compare=False)
    spans: tuple[Span, ...] | None = field(default=None, compare=False)
    where: str = field(default="", compare=False)

    @property
    def parts(self) -> tuple[str, ...]:
        """What the record says, without a template."""
        return self.contents or (self.prompt, self.text)

    def digest(self) -> int:
        """Return a number that depends on the text alone, not on the file, the order or the process."""
        return int.from_bytes(hashlib.sha256(f"{self.prompt}\0{self.text}".encode()).digest()[:8], "big")


class Skipped:
    """Bad records that were left out: the first ones by name, the others by number."""

    def __init__(self) -> None:
        self.total = 0
        self.named: list[str] = []

    def add(self, error: BadRecord) -> None:
        """Add one."""
        self.total += 1
        if len(self.named) < SHOWN:
            self.named.append(error.what if error.got is None else f"{error.what} (got: {error.got})")

    def lines(self) -> tuple[str, ...]:
        """Return what to print; nothing where nothing was skipped."""
        if not self.total:
            return ()
        rest = self.total - len(self.named)
        first = "1 bad record was skipped:" if self.total == 1 else f"{self.total} bad records were skipped:"
        return (first, *(f"  {name}" for name in self.named), *([f"  and {rest} more"] if rest else []))


@dataclass(frozen=True)
class Parser:
    """Makes records of rows.

    Args:
        tokenizer: renders chat messages through its template.
        text_field: field of the text; a row may have `prompt` and `completion` instead.
        messages_field: field of chat messages; wins where a row has it.
        assistant_only: of chat messages, predict what the assistant says only.
        skipped: where bad records go; None if they are errors.
        way_out: what the error of a bad record tells to type, if nothing better is known.
    """

    tokenizer: Any
    text_field: str = "text"
    messages_field: str = "messages"
    assistant_only: bool = False
    skipped: Skipped | None = None
    way_out: str | None = None

    def parse(self, where: str, row: Row) -> Record | None:
        """Return the record of a row; None if it is bad, and bad ones are skipped.

        Args:
            where: its place, such as file and line.
            row: the bytes of a JSON line, the fields of a row, or a text.

        Raises:
            BadRecord: it is not JSON, has no text, an empty one or one of another type, or the template refuses it.
            UserError: there are chat messages, but no chat template.
        """
        try:
            fields = _fields(row, where)
            if isinstance(fields, str):
                return Record(_text(fields, "the text", where), where=where)
            return replace(self._record(fields, where), where=where)
        except BadRecord as error:
            self.refuse(error)
            return None

    def refuse(self, error: BadRecord) -> None:
        """Skip a bad record, or raise the error."""
        if self.skipped is None:
            error.command = error.command or self.way_out
            raise error
        self.skipped.add(error)

    def said(self) -> tuple[str, ...]:
        """Return what to print of the bad records skipped so far."""
        return () if self.skipped is None else self.skipped.lines()

    def _record(self, row: dict[str, Any], where: str) -> Record:
        if row.get(self.messages_field) is not None:
            return self._chat(row[self.messages_field], where)
        if row.get("prompt") is not None and row.get("completion") is not None:
            prompt = _string(row["prompt"], "prompt", where)
            return Record(_text(row["completion"], "completion", where), prompt=prompt)
        if row.get(self.text_field) is not None:
            return Record(_text(row[self.text_field], self.text_field, where))
        raise BadRecord(
            f"{where} has no text",
            got=f"fields {', '.join(row) or '(none)'}",
            allowed=f"{self.text_field}, {self.messages_field}, or prompt and completion",
            command="--text-field FIELD",
        )

    def _chat(self, messages: Any, where: str) -> Record:
        if self.tokenizer.chat_template is None:
            raise UserError(
                f"{where} holds chat messages, but the tokenizer has no chat template", allowed="text records"
            )
        if not isinstance(messages, list) or not all(map(_is_message, messages)):
            raise BadRecord(
                f"{where}: {self.messages_field} is not a list of messages",
                allowed='[{"role": "user", "content": "..."}]',
            )
        _text("".join(message["content"] for message in messages), self.messages_field, where)
        try:
            text = render(messages, self.tokenizer)
            spans = assistant_spans(messages, text, self.tokenizer) if self.assistant_only else None
        except ValueError as error:
            raise BadRecord(f"{where}: {error}") from None
        return Record(text, templated=True, contents=tuple(contents(messages)), spans=spans)


def make_parser(
    tokenizer: Any,
    *,
    text_field: str = "text",
    messages_field: str = "messages",
    assistant_only: bool = False,
    skip_bad: bool = False,
) -> Parser:
    """Return a parser for training data; see `Parser`.

    Raises:
        UserError: parts of records are to be predicted, and the tokenizer cannot say where its tokens are.
    """
    if assistant_only and not tokenizer.is_fast:
        raise UserError("--assistant-only needs a fast tokenizer", got=type(tokenizer).__name__)
    skipped = Skipped() if skip_bad else None
    return Parser(tokenizer, text_field, messages_field, assistant_only, skipped, way_out="--skip-bad-records")


def read_records(source: str, parser: Parser) -> list[Record]:
    """Read every record of one source, see `sources.open_source`.

    Raises:
        UserError: a missing source, or a bad record that is not skipped.
    """
    records = (parser.parse(where, row) for where, row in open_source(source).rows())
    return [record for record in records if record is not None]


def _fields(row: Row, where: str) -> dict[str, Any] | str:
    if not isinstance(row, bytes):
        return row
    try:
        fields = json.loads(row.decode("utf-8"))
    except ValueError as error:  # of JSON, or of UTF-8
        raise BadRecord(f"{where} is not valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise BadRecord(f"{where} is not a JSON object", got=type(fields).__name__, allowed='{"text": "..."}')
    return fields


def _text(value: Any, name: str, where: str) -> str:
    text = _string(value, name, where)
    if not text.strip():
        raise BadRecord(f"{where}: {name} is empty")
    return text


def _string(value: Any, name: str, where: str) -> str:
    if not isinstance(value, str):
        raise BadRecord(f"{where}: {name} is not text", got=type(value).__name__)
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:  # JSON can say \ud800
        raise BadRecord(f"{where}: {name} holds half a character", allowed="text that UTF-8 can write") from None
    return value


def _is_message(message: Any) -> bool:
    return (
        isinstance(message, dict) and isinstance(message.get("role"), str) and isinstance(message.get("content"), str)
    )
