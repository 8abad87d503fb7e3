"""Processes that cost nothing to start: forks of the one that tests, which has torch loaded already.

A fork must not touch a GPU that its parent may hold, so these tests are skipped where there is one.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

needs_fork = pytest.mark.skipif(
    not hasattr(os, "fork") or torch.cuda.is_available(), reason="needs fork, and no GPU in the process that forks"
)


def fork(act: Callable[[], object], log: Path, environment: Mapping[str, str] | None = None) -> int:
    """Run `act` in a fork and return its process id; exit codes as those of `selfspec`, 70 for an unforeseen error."""
    sys.stdout.flush()
    process = os.fork()
    if process:
        return process
    code = 70
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        os.environ.update(environment or {})
        _forget_accelerate()
        act()
        code = 0
    except SystemExit as error:
        code = int(error.code or 0)
    except KeyboardInterrupt:
        code = 130
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)


def _forget_accelerate() -> None:
    """Let accelerate look at the environment anew: a run in the parent has left it the state of one process."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def wait(processes: list[int], *, seconds: float = 300.0) -> list[int]:
    """Return the exit codes of forks, negative for a signal; kill those that outlive the time, which fails the test."""
    codes: dict[int, int] = {}
    deadline = time.monotonic() + seconds
    while len(codes) < len(processes) and time.monotonic() < deadline:
        for process in set(processes) - codes.keys():
            done, status = os.waitpid(process, os.WNOHANG)
            if done:
                codes[process] = os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    late = set(processes) - codes.keys()
    for process in late:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    assert not late, f"{len(late)} processes did not end"
    return [codes[process] for process in processes]


def free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def run_ranks(
    act: Callable[[int], object], count: int, logs: Path, environment: Mapping[str, str] | None = None
) -> list[int]:
    """Run `act(rank)` in `count` processes that will form a group, and return their exit codes."""
    group = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    group |= {"LOCAL_WORLD_SIZE": str(count), **(environment or {})}

    def started(rank: int) -> int:
        return fork(lambda: act(rank), logs / f"rank{rank}.log", {**group, "RANK": str(rank), "LOCAL_RANK": str(rank)})

    return wait([started(rank) for rank in range(count)])
