"""`selfspec regress` as typed: exit codes 0, 1 and 2, one JSON object or a table on stdout."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from selfspec_tune.cli import main

SMALL = {"device": "cpu", "window-length": 64, "num-prompts": 1, "max-new-tokens": 4}
CELL = {"exit-layers": 2, "num-draft-tokens": 2}
OPTIONS = [part for name, value in {**SMALL, **CELL}.items() for part in (f"--{name}", str(value))]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):  # type: ignore[no-untyped-def]
    """Run the command; returns exit code, stdout, stderr."""

    def call(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["selfspec", "regress", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_info:
            main()
        captured = capsys.readouterr()
        return int(exit_info.value.code or 0), captured.out, captured.err

    return call


def test_passed_is_0_and_json_is_one_object(run, copy: Path, learnt: Path, heldout: Path, prompts: Path) -> None:  # type: ignore[no-untyped-def]
    code, out, _ = run(copy, "--base", learnt, "--text", heldout, "--prompts", prompts, "--raw", "--json", *OPTIONS)
    assert code == 0
    verdict = json.loads(out)
    assert verdict["passed"] is True and verdict["perplexity"]["ratio"] == 1.0
    assert verdict["lossless"]["differing_tokens"] == 0
    assert json.loads((copy / "selfspec.json").read_text())["regress"] == verdict


def test_failed_is_1_and_the_table_says_so(run, damaged: Path, learnt: Path, heldout: Path) -> None:  # type: ignore[no-untyped-def]
    code, out, err = run(damaged, "--base", learnt, "--text", heldout, *OPTIONS)
    assert code == 1
    assert "FAILED" in out and "ratio" in out and "at most 1.0200" in out
    assert "losslessness was not tested" in err


def test_chat_prompts_and_a_table_without_perplexity(run, copy: Path, prompts: Path) -> None:  # type: ignore[no-untyped-def]
    code, out, err = run(copy, "--prompts", prompts, "--numerics", "fast", *OPTIONS)
    assert code == 0
    assert "passed" in out and "ties only" in out and "0 of 4" in out
    assert "weights were not compared" in err


def test_bad_input_is_2_with_words_and_no_traceback(run, copy: Path, prompts: Path) -> None:  # type: ignore[no-untyped-def]
    for arguments in ([copy], [copy, "--prompts", "missing.jsonl"], ["no/such/model", "--prompts", prompts]):
        code, out, err = run(*arguments, *OPTIONS)
        assert (code, out) == (2, "")
        assert err.startswith("error: ") and "Traceback" not in err
    assert run(copy, "--no-such-flag")[0] == 2
