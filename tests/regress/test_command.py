"""`selfspec regress` as typed: exit codes 0, 1 and 2, one JSON object or a table on stdout."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from selfspec_tune.cli import main

SMALL = {"device": "cpu", "window-length": 64, "num-prompts": 1, "max-new-tokens": 4, "sampling-texts": 0}
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
    assert "FAILED" in out and "ratio, 95 % interval" in out and "at most 1.0200" in out
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


def test_undecided_is_1_and_says_how_many_documents_would_decide(
    run, damaged: Path, learnt: Path, heldout: Path
) -> None:  # type: ignore[no-untyped-def]
    code, out, _ = run(damaged, "--base", learnt, "--text", heldout, "--max-documents", 3, *OPTIONS)
    assert code == 1 and "undecided" in out and "FAILED" not in out
    assert re.search(r"heldout.jsonl: use >= \d+ documents: --max-documents \d+", " ".join(out.split()))


def test_a_config_gives_thresholds_and_flags_win(run, copy: Path, learnt: Path, heldout: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    gate = tmp_path / "gate.yaml"
    gate.write_text("max_perplexity_increase: 5%\nmax_documents: 9\nwindow_length: 32\n", encoding="utf-8")
    given = (copy, "--config", gate, "--base", learnt, "--text", heldout, "--json", "--device", "cpu")
    found = json.loads(run(*given)[1])["perplexity"]
    assert (found["limit"], found["sets"][0]["documents"], found["sets"][0]["tokens"]) == (1.05, 9, 9 * 31)
    found = json.loads(run(*given, "--max-documents", 4, "--max-perplexity-increase", "3%")[1])["perplexity"]
    assert (found["limit"], found["sets"][0]["documents"]) == (1.03, 4)
    gate.write_text("max_perplexity_increas: 5%\n", encoding="utf-8")
    code, _, err = run(*given)
    assert code == 2 and "did you mean 'max_perplexity_increase'" in err
    assert run(copy, "--config", tmp_path / "none.yaml")[0] == 2


@pytest.mark.parametrize("columns", [80, 200])
def test_the_table_reads_well(  # type: ignore[no-untyped-def]
    run, columns: int, copy: Path, learnt: Path, heldout: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    _, out, _ = run(copy, "--base", learnt, "--text", heldout, "--prompts", prompts, "--raw", *OPTIONS)
    print(out)
    assert max(map(len, out.splitlines())) <= columns
    rows = [line for line in out.splitlines() if line.startswith("│")]
    # No cell is broken over two lines: every row of the body begins with a test's name.
    assert len(rows) == 9 and all(row[2] != " " for row in rows)
    assert "heldout.jsonl: 12 of 12 documents, 756 tokens" in out


def test_a_report_is_written_for_a_pull_request(  # type: ignore[no-untyped-def]
    run, damaged: Path, learnt: Path, heldout: Path, prompts: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "new" / "report"
    both = ("--base", learnt, "--text", heldout, "--prompts", prompts, "--raw", "--report", directory)
    code, out, err = run(damaged, *both, "--json", *OPTIONS)
    assert code == 1 and str(directory / "regress.md") in err
    assert sorted(path.name for path in directory.iterdir()) == ["regress.json", "regress.md"]
    verdict = json.loads(out)
    assert json.loads((directory / "regress.json").read_text()) == {"model": str(damaged), **verdict}
    text = (directory / "regress.md").read_text(encoding="utf-8")
    assert text.startswith(f"**selfspec regress: {damaged}: FAILED**\n\n| | test | found | allowed | |\n|---|")
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert all(line.count("|") == 6 for line in table), "a stray bar would break the table"
    for piece in ("at most 1.0200 | FAILED |", "| tokens that differ | 0 of 4 | 0 | passed |", "KL(base‖model)"):
        assert piece in text
    for name in ("window: 64 tokens", "stride: 64 tokens", "bos: none", "truncation: ", "versions: selfspec", "date: "):
        assert f"- {name}" in text
