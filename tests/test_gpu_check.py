"""The check of a GPU, run on a CPU with a tiny model: every part runs, says what it measured, and fails alone.

No figure's size is asserted but of what must hold anywhere: ops near their references, and no bit that differs.
"""

from __future__ import annotations

import importlib
import inspect
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
import selfspec_kernels
import torch
from selfspec_kernels import accept_reference, reference

from selfspec_tune.decode.drafters import Draft
from selfspec_tune.decode.drafters.layer_skip import LayerSkipDrafter

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "scripts"
PARTS = ["model", "ops", "rows", "exact", "copy", "plain", "rounds", "speedups", "sizes"]
CASES = 44
CPU = torch.device("cpu")
NO_OPS = {
    *("accept_matching", "block_attention", "visibility_bias"),  # PyTorch on every device
    *("compiled", "has_compiled_attention", "has_packed_product", "pack", "packed_bytes"),
}
"""Functions of `selfspec_kernels` of which a device has no kernel."""


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
    assert len(values["ops"]["cases"]) == CASES and values["ops"]["beyond_tolerance"] == []
    functions = {name for name in selfspec_kernels.__all__ if inspect.isfunction(getattr(selfspec_kernels, name))}
    named = [case["name"] for case in values["ops"]["cases"]]
    assert {name.replace(",", " ").split()[0] for name in named} == functions - NO_OPS and len(set(named)) == CASES
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


def test_ops_that_are_off_are_seen(check: ModuleType, bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a tenth, by NaN, by a little more than the op's own tolerance, by one in a whole number, and by a slot."""
    layers, tokens = sys.modules["gpu_parts.layer_cases"], sys.modules["gpu_parts.token_cases"]
    linear, norm, greedy, compact = layers.few_row_linear, layers.rms_norm, tokens.accept_greedy, layers.compact
    calls: list[Any] = []

    def off(**given: Any) -> torch.Tensor:
        calls.append(given)
        return linear(**given) * (1.1 if len(calls) == 1 else float("nan") if len(calls) == 2 else 1)

    def next_token(**given: Any) -> Any:
        found = greedy(**given)
        return found._replace(following=found.following + 1)

    monkeypatch.setattr(layers, "few_row_linear", off)
    monkeypatch.setattr(layers, "rms_norm", lambda **given: norm(**given) * (1 + 1e-5))
    monkeypatch.setattr(layers, "compact", lambda cache, rows, ends: compact(cache, rows, ends - (ends == 129).long()))
    monkeypatch.setattr(tokens, "accept_greedy", next_token)
    found = result(check)
    sys.modules["gpu_parts.ops"].check_ops(bench, found)
    bad = found.values["beyond_tolerance"]
    cases = {case["name"]: case for case in found.values["cases"]}
    assert [name.split()[0] for name in bad] == [
        *("few_row_linear", "few_row_linear", "rms_norm", "compact", *("accept_greedy",) * 3)
    ]
    assert len(cases) == CASES
    assert cases[bad[0]]["error"] > 0.05 and "not finite" in cases[bad[1]]["failed"]
    assert bad[2].endswith("float32") and cases[bad[2]]["error"] < 2e-5
    assert all("whole numbers differ" in cases[name]["failed"] for name in bad[3:])
    assert found.targets[0].measured == 7 and found.targets[0].met is False


def test_a_reference_of_nan_hides_nothing(check: ModuleType) -> None:
    """No error is larger than NaN: any result would pass beside it."""
    ops = sys.modules["gpu_parts.ops"]
    given = [lambda inputs, value=value: (torch.full((3,), value),) for value in (1.0, float("nan"))]
    with pytest.raises(ValueError, match="not finite"):
        ops.error_of(ops.Case("an op", *given, lambda device: {}, "sum"), CPU)


def inputs_of(cases: ModuleType, op: str) -> list[dict[str, Any]]:
    found = [case.inputs(CPU) for case in cases.cases(CPU) if case.name.startswith(op)]
    assert len(found) == 3
    return found


def test_no_choice_of_a_case_is_nearly_a_tie(check: ModuleType) -> None:
    """Else arithmetic in another order may give another token, and a card that is right would seem wrong."""
    cases = sys.modules["gpu_parts.token_cases"]
    scores = []
    for each in (cases.shared_inputs(CPU), cases.gumbel_inputs(CPU)):
        scores.append(each.get("target", each.get("probabilities")).log() + each["gumbel"])
    for x in inputs_of(cases, "exit_head"):
        normed = reference.rms_norm(x["hidden"].double(), (x["norm"][0].double(), x["norm"][1]))
        logits = normed @ x["weight"].double().T + x.get("bias", torch.zeros(1))
        scores.append(logits / x.get("temperature", 1.0) + x.get("gumbel", 0.0))
    for each in scores:
        best, second = each.topk(2, -1).values.unbind(-1)
        assert (best - second).min() > 1e-3
    uniform, ratios = cases.draw_inputs(CPU), inputs_of(cases, "accept_ratio")
    drawn = accept_reference.draw(**uniform)
    for factor in (1 - 1e-6, 1 + 1e-6):
        assert torch.equal(accept_reference.draw(uniform["probabilities"], uniform["uniform"] * factor), drawn)
        for x in ratios:
            both = [accept_reference.accept_ratio(*list(x.values())[:3], x["uniforms"] * by) for by in (1, factor)]
            assert torch.equal(torch.stack(both[0]), torch.stack(both[1]))


def test_cases_hold_what_their_names_say(check: ModuleType) -> None:
    layers, tokens = sys.modules["gpu_parts.layer_cases"], sys.modules["gpu_parts.token_cases"]
    x = tokens.greedy_inputs(CPU, dtype=torch.bfloat16)
    assert ((x["logits"] == x["logits"].amax(-1, keepdim=True)).sum(-1) > 1).all()
    assert accept_reference.accept_greedy(x["drafted"], x["logits"])[0].tolist() == [0, 1, 2, 3, 4]
    x = tokens.shared_inputs(CPU)
    assert accept_reference.accept_shared(x["drafted"], x["target"], x["gumbel"])[0].tolist() == [0, 1, 2, 3, 4]
    counts = set()
    for x in inputs_of(tokens, "accept_ratio"):
        counts |= set(accept_reference.accept_ratio(*list(x.values())[:4])[0].tolist())
    assert counts >= {0, 1, 2, 4}
    x = layers.attention_inputs(CPU, rows=9, dtype=torch.bfloat16, window=100, capped=True)
    for sequence, positions in enumerate(x["positions"].tolist()):
        seen = torch.arange(x["keys"].shape[2])
        seen = (seen > positions[0] - 100) & (seen <= positions[-1])
        for part in ("keys", "values"):
            assert torch.equal(x[part][sequence].isfinite(), seen[:, None].expand_as(x[part][sequence]))


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
