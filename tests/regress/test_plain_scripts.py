"""The two scripts that set our plain decoding beside transformers' generate: equal where they must be, and honest."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"script_{name}", SCRIPTS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_plain_decoding_is_what_transformers_generates(
    checkpoint: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(checkpoint), "--prompts", str(prompts), "--max-new-tokens", "12", "--device", "cpu"]
    assert load("compare_generate").main(arguments) == 0
    out = capsys.readouterr().out
    # The second prompt ends early: both stop at the end token.
    assert out.count("12 tokens equal") == 2 and out.count(" tokens equal\n") == 3
    assert "passed: 3 prompts" in out and "0 ties" in out and "0 failures" in out


def test_a_difference_that_is_no_tie_fails(
    checkpoint: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = load("compare_generate")
    real = script.generate
    monkeypatch.setattr(script, "generate", lambda *args: [*real(*args)[:3], 7, 7])
    arguments = [str(checkpoint), "--prompts", str(prompts), "--num-prompts", "1", "--max-new-tokens", "5"]
    assert script.main([*arguments, "--device", "cpu"]) == 1
    assert "p0: 3 tokens equal" in (out := capsys.readouterr().out) and "DIFFERENT" in out


def test_a_tie_is_allowed_and_an_end_is_not() -> None:
    script = load("compare_generate")
    close, clear = torch.tensor([1.0, 1.00005, 0.0]), torch.tensor([1.0, 2.0, 0.0])
    assert script.first_parting([1, 1], [1, 1], [clear, clear]) is None
    assert script.first_parting([1, 1], [1, 0], [clear, close]).allowed(1e-4)
    assert not script.first_parting([1, 1], [0, 1], [clear, close]).allowed(1e-4)
    for ours, theirs in (([1, 1], [1]), ([1], [1, 1])):
        parting = script.first_parting(ours, theirs, [clear, close][: len(ours)])
        assert parting.position == 1 and not parting.allowed(1e-4)


def test_ratios_are_paired_by_turn() -> None:
    script = load("bench_plain")
    # The machine is ten times slower in the last turn, for all three.
    times = {"exact": [1.0, 1.0, 10.0], "fast": [0.5, 0.5, 5.0], "generate": [2.0, 2.2, 24.0]}
    found = script.summarise(times)
    assert found["generate_over_ours"]["exact"] == pytest.approx([2.1, 2.2, 2.3])
    assert found["generate_over_ours"]["fast"][1] == pytest.approx(4.4)
    assert found["milliseconds_per_token"]["generate"] == pytest.approx(2200.0)


def test_the_bench_runs_and_prints_one_object(
    checkpoint: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = load("bench_plain")
    small = ["--num-prompts", "1", "--max-new-tokens", "4", "--rounds", "2", "--device", "cpu"]
    assert script.main([str(checkpoint), "--prompts", str(prompts), *small, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["turns"] == 2 and found["measured_on"]["dtype"] == "bfloat16"
    assert list(found["milliseconds_per_token"]) == ["exact", "fast", "generate"]
    assert script.main([str(checkpoint), "--prompts", "missing.jsonl"]) == 2
    assert "error: " in capsys.readouterr().err
