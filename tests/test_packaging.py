"""The installed project: version, console script, start-up that stays light, and the trap of a folder named kernels."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

import selfspec_tune

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SCRIPT = Path(sysconfig.get_path("scripts")) / "selfspec"
COMMANDS = ("train", "sweep-exit", "regress", "draft-vocab", "decode", "check")
HEAVY = ("torch", "transformers", "accelerate", "datasets", "peft", "rich", "matplotlib")


def run(*command: str | Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, cwd=cwd, check=False)


def test_one_version_everywhere(tmp_path: Path) -> None:
    assert selfspec_tune.__version__ == PROJECT["version"] == version("selfspec")
    done = run(SCRIPT, "--version", cwd=tmp_path)
    assert (done.returncode, done.stdout.split()) == (0, ["selfspec", PROJECT["version"]]), done.stderr


def test_help_of_the_installed_script_names_every_command(tmp_path: Path) -> None:
    done = run(SCRIPT, "--help", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [c for c in COMMANDS if c not in done.stdout] == []


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], *([c, "--help"] for c in COMMANDS)], ids=" ".join)
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    # `selfspec --help` answers at once only as long as no command imports torch at module level.
    done = run(sys.executable, "-X", "importtime", "-m", "selfspec_tune", *arguments)
    assert done.returncode == 0, done.stderr[-2000:]
    loaded = {line.rpartition("|")[2].strip().split(".")[0] for line in done.stderr.splitlines() if "|" in line}
    assert "selfspec_tune" in loaded
    assert loaded.intersection(HEAVY) == set()


def test_kernels_and_recipes_are_plain_folders() -> None:
    # transformers looks for a PyPI package named `kernels`; a package of that name on the path breaks its imports.
    for name in ("kernels", "recipes"):
        assert (ROOT / name).is_dir()
        assert not (ROOT / name / "__init__.py").exists()


def test_transformers_imports_from_the_repository_root() -> None:
    done = run(sys.executable, "-c", "from transformers import LlamaForCausalLM")
    assert done.returncode == 0, done.stderr[-2000:]


def test_both_packages_are_typed_and_importable_from_anywhere(tmp_path: Path) -> None:
    code = (
        "import selfspec_tune, selfspec_kernels, pathlib\n"
        "for p in (selfspec_tune, selfspec_kernels):\n"
        "    assert (pathlib.Path(p.__file__).parent / 'py.typed').is_file(), p"
    )
    done = run(sys.executable, "-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]


def test_constraints_pin_what_the_project_needs() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    pinned = {name.lower().replace("_", "-") for name in pins}
    needed = [
        *PROJECT["dependencies"],
        *PROJECT["optional-dependencies"]["cpu"],
        *PROJECT["optional-dependencies"]["demo"],
        *PROJECT["optional-dependencies"]["dev"],
    ]
    names = {requirement.partition(">")[0].strip().lower() for requirement in needed}
    names -= {"selfspec[cpu]", "triton"}  # the requirements of the one are listed above; of the other see below
    assert names - pinned == set()
    assert pins["torch"] == "2.13.0"
    assert "triton" not in pinned  # CPU builds of torch have none; CUDA builds bring their own


def test_a_cpu_install_asks_for_no_triton() -> None:
    assert not [requirement for requirement in PROJECT["dependencies"] if requirement.startswith("triton")]
    assert PROJECT["license"] == "Apache-2.0"
    assert "Apache License" in (ROOT / "LICENSE").read_text(encoding="utf-8")
