"""Imports point one way: cli → train, sweep, regress, decode → model → config, artifact, errors. See DESIGN, section 2.

The walk reads every import with `ast`, those inside functions and under TYPE_CHECKING included, so an arrow cannot hide
in a late import. Each rule is also shown to catch a file that breaks it.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE, KERNELS = "selfspec_tune", "selfspec_kernels"
LEAVES = {"config", "artifact", "bootstrap", "errors", "evenly", "files", "progress", "speedup", "trained_on"}
HEAVY = {
    "torch",
    "transformers",
    "accelerate",
    "datasets",
    "peft",
    "triton",
    "wandb",
    "safetensors",
    "numpy",
    "numba",
    "matplotlib",
}
# The ops compiled for CPUs are written with numba, its code builder and numpy's names of number types.
CPU_OPS_KNOW = {"numba", "llvmlite", "numpy"}

# light module → what it may load all the same
KNOWN = {"trained_on": {"numpy"}}
# layer → what it may import besides itself and the leaves
ALLOWED = {
    "cli": {"train", "sweep", "regress", "decode", "model"},
    "train": {"model", KERNELS},
    "sweep": {"decode", "model"},
    "regress": {"decode", "model"},
    "decode": {"model", KERNELS},
    "model": {KERNELS},
    "config": {"errors", "files"},
    "artifact": {"config", "errors", "files"},
    "bootstrap": set(),
    "files": {"errors"},
    "errors": set(),
    "evenly": set(),
    "progress": set(),
    "speedup": {"config"},
    "trained_on": {"errors", "files"},
    "__init__": set(),
    "__main__": {"cli"},
    KERNELS: set(),
}
NO_TORCH = sorted([*LEAVES, "sweep/objective", "sweep/page", "sweep/tables", "sweep/words"])


def module_name(path: Path) -> str:
    """Return the dotted name of a source file, `x.__init__` for a package's own."""
    folder = ROOT / "kernels" if "kernels" in path.relative_to(ROOT).parts[:1] else ROOT
    return ".".join(path.relative_to(folder).with_suffix("").parts)


def layer_of(dotted: str) -> str:
    """Return the layer of a dotted name: the part below the package, or the kernels."""
    parts = dotted.split(".")
    if parts[0] == KERNELS:
        return KERNELS
    return parts[1] if len(parts) > 1 else "__init__"


def imports(source: str, module: str, *, module_level: bool = False) -> set[str]:
    """Return the dotted names `source` imports; with `module_level` only those that run when it is imported."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if module_level and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            return
        if module_level and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = module.split(".")[: -node.level]
                base = ".".join([*above, *([node.module] if node.module else [])])
            found.update(f"{base}.{alias.name}" for alias in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(source))
    return found


def violations(source: str, module: str) -> list[str]:
    """Return one line per import of `source` that points the wrong way or loads what `module` must not know."""
    extra = CPU_OPS_KNOW if module.startswith(f"{KERNELS}.cpu.") else set()
    layer, wrong = layer_of(module), []
    own_name = module.removeprefix(f"{PACKAGE}.").replace(".", "/")
    in_cli = layer == "cli"
    for name in sorted(imports(source, module)):
        top = name.split(".")[0]
        if top in (PACKAGE, KERNELS):
            target = layer_of(name)
            own = target == layer or (target == "__version__" and layer != KERNELS)
            if not own and target not in ALLOWED[layer] and not (target in LEAVES and ALLOWED[layer] - LEAVES):
                wrong.append(f"{module} imports {name}: {layer} → {target} is not allowed")
        elif top in ("rich",) and module != f"{PACKAGE}.cli.console":
            wrong.append(f"{module} imports {name}: only cli/console.py draws")
        elif top in HEAVY - KNOWN.get(own_name, set()) and own_name in NO_TORCH:
            wrong.append(f"{module} imports {name}: it must stay free of torch and its kin")
        elif layer == KERNELS and top not in {"torch", "triton", *sys.stdlib_module_names, *extra}:
            wrong.append(f"{module} imports {name}: the kernels know torch and triton only")
    if in_cli:
        for name in sorted(imports(source, module, module_level=True)):
            if name.split(".")[0] in HEAVY:
                wrong.append(f"{module} imports {name} at module level: commands import it in their bodies")
    return wrong


def source_files() -> list[Path]:
    """Return every source file of the two packages."""
    files = [*(ROOT / PACKAGE).rglob("*.py"), *(ROOT / "kernels" / KERNELS).rglob("*.py")]
    return sorted(path for path in files if "__pycache__" not in path.parts)


def test_the_walk_sees_both_packages_and_every_layer() -> None:
    layers = {layer_of(module_name(path)) for path in source_files()}
    assert layers == set(ALLOWED), "a layer is new or gone: give it its arrows here"


@pytest.mark.parametrize("path", source_files(), ids=module_name)
def test_imports_point_one_way(path: Path) -> None:
    assert violations(path.read_text(encoding="utf-8"), module_name(path)) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("decode.engine", "from selfspec_tune.cli import console"),
        ("decode.engine", "def late():\n    import selfspec_tune.train.loop"),
        ("decode.drafters.layer_skip", "from ...sweep import profile"),
        ("model.cache", "from selfspec_tune.decode.engine import Engine"),
        ("model.cache", "from ..decode import engine"),
        ("train.loop", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import selfspec_tune.regress.report"),
        ("sweep.select", "import selfspec_kernels"),
        ("regress.report", "from selfspec_tune.sweep import objective"),
        ("errors", "from selfspec_tune.files import read_json"),
        ("progress", "from selfspec_tune import errors"),
        ("artifact", "import torch"),
        ("artifact", "import numpy"),
        ("trained_on", "import torch"),
        ("trained_on", "from selfspec_tune.train.records import Record"),
        ("config", "def late():\n    import torch.nn"),
        ("sweep.objective", "from torch import Tensor"),
        ("sweep.select", "from rich.table import Table"),
        ("cli.train", "import rich"),
        ("cli.train", "import torch"),
        ("cli.decode", "try:\n    from transformers import AutoModelForCausalLM\nexcept ImportError:\n    pass"),
    ],
)
def test_a_wrong_arrow_is_seen(module: str, source: str) -> None:
    assert violations(source, f"{PACKAGE}.{module}") != []


@pytest.mark.parametrize("source", ["import transformers", "from selfspec_tune import errors", "import numpy"])
def test_kernels_know_torch_and_triton_only(source: str) -> None:
    assert violations(source, f"{KERNELS}.attention") != []
    assert violations("import torch, triton, math\nfrom . import reference", f"{KERNELS}.attention") == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("cli.decode", "def decode():\n    import torch\n    from selfspec_tune.decode import engine"),
        ("cli.console", "import rich"),
        ("sweep.select", "from selfspec_tune.decode.engine import Engine\nfrom selfspec_tune.artifact import Artifact"),
        ("decode.engine", "import torch\nfrom selfspec_kernels import attention\nfrom ..model import cache"),
    ],
)
def test_a_right_arrow_is_let_through(module: str, source: str) -> None:
    assert violations(source, f"{PACKAGE}.{module}") == []


@pytest.mark.parametrize("stem", NO_TORCH)
def test_importing_a_light_module_loads_no_torch(stem: str) -> None:
    assert (ROOT / PACKAGE / f"{stem}.py").is_file()
    module = f"{PACKAGE}.{stem.replace('/', '.')}"
    code = f"import {module}, sys; print(sorted({{'torch', 'transformers', 'rich'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
