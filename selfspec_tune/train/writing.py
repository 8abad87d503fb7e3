"""Writing that may fail: a full disk is one clear error, and the same one on all ranks."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from selfspec_tune.errors import UserError

FOREIGN = ("PytorchStreamWriter", "inline_container", "I/O error")
"""What libraries that write by themselves say instead of raising an OSError."""


def write_together(accelerator: Any, write: Callable[[], object], place: Path, *, kept: str = "") -> None:
    """Run `write` on every rank and wait for all; where one cannot write, all raise, so that none waits for ever.

    Args:
        accelerator: of the run.
        write: writes below `place`; may do nothing on some ranks. Collectives within must fail on all ranks or none.
        place: what the error names.
        kept: what is unharmed, for the error.

    Raises:
        UserError: a file could not be written.
    """
    failure: BaseException | None = None
    try:
        write()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # that of torch.distributed.checkpoint is no Exception
        failure = failed_write(error)
        if failure is None:
            raise
    if accelerator.num_processes > 1:
        flags = torch.tensor([float(failure is not None)], device=accelerator.device)
        failed = bool(accelerator.reduce(flags, "sum").item())
    else:
        failed = failure is not None
    if failed:
        raise cannot_write(place, failure, kept=kept) from failure


def cannot_write(place: Path, failure: BaseException | None, *, kept: str = "") -> UserError:
    """Return the error of a file below `place` that could not be written; None: another rank knows why."""
    reason = "see the other processes" if failure is None else _reason(failure)
    near = next((path for path in (place, *place.parents) if path.exists()), Path())
    return UserError(
        f"{place} cannot be written: {reason}",
        got=f"{shutil.disk_usage(near).free / 2**20:,.0f} MiB free",
        allowed=kept or None,
        command="make room, then the same command again",
    )


def failed_write(error: BaseException) -> BaseException | None:
    """Return what went wrong with a file if that is what `error` comes from, else None."""
    causes = list(_causes(error))
    found: list[BaseException] = [each for each in causes if isinstance(each, OSError)]
    found += [each for each in causes if any(text in str(each) for text in FOREIGN)]
    return found[0] if found else None


def _reason(failure: BaseException) -> str:
    """Return what to say of it: torch tells positions in a file, which help nobody."""
    if isinstance(failure, OSError) or "I/O error" in str(failure):
        return str(failure).strip().splitlines()[0]
    return "the disk took only a part of a file"


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and those behind it, of other ranks included."""
    waiting, seen = [error], set()
    while waiting:
        each = waiting.pop(0)
        if id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        waiting += [cause for cause in (each.__cause__, each.__context__) if cause is not None]
        failures = getattr(each, "failures", {})  # of torch.distributed.checkpoint: rank → (error, its stack)
        waiting += [wrapped[0] for wrapped in failures.values()] if isinstance(failures, dict) else []
