"""The one exception a user is meant to see: what went wrong, what was given, what is allowed, what to type next."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class UserError(Exception):
    """A mistake in the input. The command line prints it without a traceback and exits with code 2.

    Args:
        what: one sentence saying what is wrong.
        got: the value that was given.
        allowed: the values that would have been accepted.
        command: the next command (or flag) to type.
    """

    def __init__(self, what: str, *, got: object = None, allowed: object = None, command: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.got = got
        self.allowed = allowed
        self.command = command

    def __str__(self) -> str:
        lines = [self.what]
        if self.got is not None:
            lines.append(f"  got:     {self.got}")
        if self.allowed is not None:
            lines.append(f"  allowed: {self.allowed}")
        if self.command is not None:
            lines.append(f"  try:     {self.command}")
        return "\n".join(lines)


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """Return `" (did you mean 'x'?)"` for the known name closest to `given`, or an empty string."""
    close = get_close_matches(given, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
