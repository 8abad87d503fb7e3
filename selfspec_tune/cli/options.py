"""Turn a config dataclass into the flags of a Typer command, so that an option is declared once."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer

from selfspec_tune.config import field_defaults, field_help, field_types, flag, is_listed


def options_from(config: type, *, skip: tuple[str, ...] = ()) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate `command(..., flags: dict)` so that Typer sees one option per field of `config`.

    Only flags the user gave arrive in `flags`; `config.build` adds the defaults.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        hints, help_texts, defaults = field_types(config), field_help(config), field_defaults(config)
        names = [name for name in hints if name not in skip]

        def run(**arguments: Any) -> None:
            given = {name: arguments.pop(name) for name in names}
            flags = {name: value for name, value in given.items() if value is not None and value != []}
            command(**arguments, flags=flags)

        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "flags"]
        generated = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=_annotation(name, hints[name], help_texts[name], defaults[name]),
            )
            for name in names
        ]
        own = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own]
        run.__signature__ = inspect.Signature([*own, *generated])  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in [*own, *generated]}
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        return run

    return decorate


def _annotation(name: str, hint: Any, help_text: str, default: Any) -> Any:
    inner = hint
    if get_origin(hint) in (Union, types.UnionType):
        inner = next(a for a in get_args(hint) if a is not type(None))
    if inner is bool:
        return Annotated[bool | None, typer.Option(flag(name), help=help_text, show_default=False)]
    if default not in (None, (), False):
        shown = ",".join(map(str, default)) if isinstance(default, tuple) else str(default)
        help_text = f"{help_text} [default: {shown}]"
    option = typer.Option(flag(name), help=help_text, show_default=False, metavar=_metavar(inner))
    if get_origin(inner) is tuple:
        element = get_args(inner)[0]
        return Annotated[(str if is_listed(element) else list[str]) | None, option]
    if get_origin(inner) is Literal or inner is Path:
        return Annotated[str | None, option]
    return Annotated[inner | None, option]


def _metavar(inner: Any) -> str:
    if get_origin(inner) is Literal:
        return "|".join(map(str, get_args(inner)))
    if get_origin(inner) is tuple:
        element = get_args(inner)[0]
        return {int: "INT,...", float: "NUMBER,...", str: "TEXT", Path: "PATH"}.get(element, "NAME,...")
    return {int: "INT", float: "NUMBER", Path: "PATH"}.get(inner, "TEXT")
