"""The `selfspec` command. Each command is a file here: it parses, calls and prints; nothing imports this package."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from selfspec_tune import __version__
from selfspec_tune.cli import check, decode, draft_vocab, regress, sweep_exit, train
from selfspec_tune.errors import UserError

app = typer.Typer(
    name="selfspec",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
)


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"selfspec {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show it.")
    ] = False,
) -> None:
    """Make a causal language model its own draft model: same text, less time."""


app.command("train")(train.train)
app.command("sweep-exit")(sweep_exit.sweep_exit)
app.command("regress")(regress.regress)
app.command("draft-vocab")(draft_vocab.draft_vocab)
app.command("decode")(decode.decode)
app.command("check")(check.check)


def main() -> None:
    """Run the command line; a UserError becomes exit code 2 (Typer turns Ctrl-C into 130)."""
    try:
        app()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
