"""Run the `selfspec` command: in this process where speed matters, as installed where the installation does."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

Run = Callable[..., subprocess.CompletedProcess]


@pytest.fixture
def selfspec(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., SimpleNamespace]:
    """Return `run(*arguments, stdin=..., code=0)`: run the command in this process and check its exit code."""
    from selfspec_tune.cli import main

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def run(*arguments: object, stdin: str = "", code: int = 0) -> SimpleNamespace:
        monkeypatch.setattr(sys, "argv", ["selfspec", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            main()
        out, err = capsys.readouterr()
        assert (stopped.value.code or 0) == code, f"exit code {stopped.value.code}\n{out}\n{err}"
        return SimpleNamespace(stdout=out, stderr=err)

    return run


@pytest.fixture(scope="session")
def installed_selfspec() -> Run:
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
