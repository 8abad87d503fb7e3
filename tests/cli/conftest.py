"""Run the installed `selfspec` command as a user does."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., subprocess.CompletedProcess]


@pytest.fixture(scope="session")
def selfspec() -> Run:
    """Return `run(*arguments, stdin=..., code=0)`: run `selfspec`, check the exit code, return the process."""
    beside = Path(sys.executable).with_name("selfspec")
    command = str(beside) if beside.exists() else shutil.which("selfspec")
    if command is None:
        pytest.fail("the selfspec command is not installed: pip install -e '.[dev]'")
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "120"}

    def run(*arguments: object, stdin: str = "", code: int = 0) -> subprocess.CompletedProcess:
        process = subprocess.run(
            [command, *map(str, arguments)], input=stdin, capture_output=True, text=True, env=environment, timeout=600
        )
        assert process.returncode == code, f"exit code {process.returncode}\n{process.stdout}\n{process.stderr}"
        assert "Traceback" not in process.stderr, process.stderr
        return process

    return run
