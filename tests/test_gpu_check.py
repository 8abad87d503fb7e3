"""The check of a GPU, run on a CPU with a tiny model: every part runs, says what it measured, and fails alone.

No figure's size is asserted but of what must hold anywhere: ops near their references, and no bit that differs.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from selfspec_tune.decode.drafters import Draft
from selfspec_tune.decode.drafters.layer_skip import LayerSkipDrafter

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "scripts"
PARTS = ["model", "ops", "rows", "exact", "copy", "plain", "rounds", "speedups", "sizes"]


@pytest.fixture(scope="module")
def check() -> Iterator[ModuleType]:
    """`gpu_check`, its folder on the path as when it is run."""
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPTS)
        yield importlib.import_module("gpu_check")
    for name in set(sys.modules) - before:
        if name.startswith(("gpu_", "synthetic_", "bench_")):
            del sys.modules[name]


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    command = [str(SCRIPTS / "gpu_check.sh"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def numbers(value: Any) -> Iterator[float]:
    """Yield all numbers of a JSON value."""
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from numbers(each)
    elif isinstance(value, int | float):
        yield value


def test_every_part_runs_and_says_that_it_was_no_gpu(tmp_path: Path) -> None:
    done = run("--tiny", "--device", "cpu", "--output", tmp_path / "check.json")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = json.loads((tmp_path / "check.json").read_text(encoding="utf-8"))
    assert not report["judged"] and report["measured_on"]["preset"] == "tiny"
    parts = {part["name"]: part for part in report["parts"]}
    assert list(parts) == PARTS
    for part in parts.values():
        assert (part["status"], part["error"], part["skipped"]) == ("done", "", []), part["name"]
        assert "CPU" in part["label"] and "tiny" in part["label"]
        assert all(torch.isfinite(torch.tensor(list(numbers(part["values"])))))
        assert all(target["met"] is None and target["measured"] is not None for target in part["targets"])
    assert "CPU, tiny model" in done.stdout and "NOT MET" not in done.stdout
    values = {name: part["values"] for name, part in parts.items()}
    assert len(values["ops"]["cases"]) == 42 and values["ops"]["beyond_tolerance"] == []
    assert set(values["rows"]["classes"]) == {"1", "4", "8", "16"} and all(values["rows"]["classes"].values())
    for batch_size in (1, 8):
        exact = values["exact"][f"batch size {batch_size}"]
        assert exact["passed"] and exact["bitwise_logits"] and exact["compared_tokens"] >= 256
        assert 0 < exact["accepted"] < exact["drafted"]
    assert set(values["plain"]["tokens_per_second"]) == {"exact", "fast", "generate", "compiled static cache"}
    assert len(values["rounds"]["rounds"]) == 6 and len(values["sizes"]["sizes"]) == 9
    for wanted, found in zip((0.7, 0.85, 0.95), values["speedups"]["alphas"], strict=True):
        assert found["reached"] and abs(found["alpha"] - wanted) <= 0.03 and found["distinct"] > 0.95
    bounds = {target["bound"] for part in parts.values() for target in part["targets"]}
    assert bounds == {0, 0.85, 0.95, 1.05}


def test_help_has_examples_and_an_unknown_part_is_refused(tmp_path: Path) -> None:
    shown = run("--help")
    assert shown.returncode == 0 and "examples:" in shown.stdout and "gpu_check.sh --tiny" in shown.stdout
    done = run("--parts", "ops,kernels", "--output", tmp_path / "check.json")
    assert done.returncode == 2 and done.stderr.startswith("error: ") and "kernels" in done.stderr
    assert not (tmp_path / "check.json").exists()


@pytest.fixture
def bench(check: ModuleType) -> Any:
    return check.Bench(check.TINY, "cpu")


def result(check: ModuleType, *, judged: bool = True, budget: float = 60.0) -> Any:
    return check.Result("part", "a part", "a label", judged, budget)


def test_a_part_that_fails_or_overruns_keeps_what_it_found(check: ModuleType, bench: Any) -> None:
    def fail(bench: Any, found: Any) -> None:
        found.values["before"] = 1
        raise RuntimeError("broken")

    def linger(bench: Any, found: Any) -> None:
        found.values["before"] = 1
        for _ in range(1000):  # if nothing stops it
            try:
                time.sleep(0.01)
            except Exception:
                continue

    failed, cut, fine = result(check), result(check, budget=0.05), result(check)
    for work, found in ((fail, failed), (linger, cut), (lambda bench, found: None, fine)):
        check.run_part(work, bench, found)
    assert (failed.status, failed.error, failed.values) == ("failed", "RuntimeError: broken", {"before": 1})
    assert (cut.status, cut.values, len(cut.skipped)) == ("cut", {"before": 1}, 1)
    assert fine.status == "done"
    assert [check.exit_code(found) for found in ([fine], [fine, cut], [fine, cut, failed])] == [0, 1, 2]


def test_targets_are_judged_both_ways_and_count_when_not_measured(check: ModuleType) -> None:
    for aim, met in (({"at_least": 0.9}, [True, True, False]), ({"at_most": 0.9}, [False, True, True])):
        found = result(check)
        found.status = "done"
        for measured in (1.0, 0.9, 0.8):
            found.aim("figure", measured, **aim)
        assert [target.met for target in found.targets] == met
        assert check.exit_code([found]) == 1
    unmeasured, unjudged = result(check), result(check, judged=False)
    for found in (unmeasured, unjudged):
        found.status = "done"
        found.aim("figure", None, at_least=1.0)
    assert (check.exit_code([unmeasured]), check.exit_code([unjudged])) == (1, 0)
    found = result(check, budget=0.0)
    assert not found.fits("a cell", 1.0) and found.skipped == ["a cell: 0 s left of 0"]


def test_what_is_left_out_for_time_is_said(
    check: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--tiny", "--device", "cpu", "--parts", "sizes,copy", "--output", str(tmp_path / "check.json")]
    assert check.main([*arguments, "--seconds", "0"]) == 0
    parts = json.loads((tmp_path / "check.json").read_text(encoding="utf-8"))["parts"]
    assert [(part["name"], part["status"], part["values"]) for part in parts] == [
        ("copy", "skipped", {}),
        ("sizes", "skipped", {}),
    ]
    said = capsys.readouterr()
    for name, part in zip(("copy", "sizes"), parts, strict=True):
        assert "are up" in part["skipped"][0] and f"skipped in {name}: {part['skipped'][0]}" in said.out
    assert said.err.count("skipped all of it") == 2


def test_an_op_that_is_off_is_seen(check: ModuleType, bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ops = sys.modules["gpu_parts.ops"]
    right, inputs = ops.few_row_linear, []

    def off(**given: Any) -> torch.Tensor:
        inputs.append(given)
        return right(**given) * (1.1 if len(inputs) == 1 else float("nan") if len(inputs) == 2 else 1)

    monkeypatch.setattr(ops, "few_row_linear", off)
    found = result(check)
    ops.check_ops(bench, found)
    first, second, *others = found.values["cases"]
    assert first["error"] > 0.05 and "not finite" in second["failed"]
    assert found.values["beyond_tolerance"] == [first["name"], second["name"]] and len(others) == 40
    assert found.targets[0].measured == 2 and found.targets[0].met is False


def test_bits_that_differ_are_seen(check: ModuleType, bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    exactness = sys.modules["gpu_parts.exactness"]

    class Nudged(LayerSkipDrafter):
        def propose(self, *arguments: Any) -> Draft:
            draft = super().propose(*arguments)
            return replace(draft, hidden=draft.hidden * 1.01)

    monkeypatch.setattr(exactness, "LayerSkipDrafter", Nudged)
    found = result(check)
    exactness.check_exactness(bench, found)
    assert [target.met for target in found.targets] == [False, False]
