"""A gate that did not pass is seen wherever the checkpoint is used, by the same words."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from selfspec_tune import artifact
from selfspec_tune.artifact import Artifact, judged
from selfspec_tune.cli.verdict import gate_notices

PASSED, FAILED, UNDECIDED = (
    {"status": status, "passed": status == "passed"} for status in ("passed", "failed", "undecided")
)


@pytest.mark.parametrize(
    ("parts", "status"),
    [
        ({"perplexity": PASSED, "lossless": PASSED}, "passed"),
        ({"perplexity": PASSED, "lossless": None, "sampling": FAILED}, "failed"),
        ({"perplexity": UNDECIDED, "lossless": PASSED}, "undecided"),
        ({"perplexity": UNDECIDED, "lossless": FAILED}, "failed"),
        ({"perplexity": PASSED, "tasks": UNDECIDED}, "undecided"),
        ({"perplexity": {"passed": False}}, "failed"),  # of an older version
    ],
)
def test_a_verdict_is_as_bad_as_its_worst_part(parts: dict[str, Any], status: str) -> None:
    verdict = judged({"date": "now", **parts})
    assert (verdict["status"], verdict["passed"]) == (status, status == "passed")


def test_the_warning(tmp_path: Path) -> None:
    untouched, trained = tmp_path / "untouched", tmp_path / "trained"
    for directory in (untouched, trained):
        directory.mkdir()
    (trained / "training.json").write_text("{}")
    whole = {**PASSED, "perplexity": PASSED}
    assert (
        gate_notices("m", untouched, None) == gate_notices("m", None, None) == gate_notices("m", trained, whole) == []
    )
    assert "FAILED its regression gate" in gate_notices("m", untouched, FAILED)[0]
    assert "FAILED" in gate_notices("m", untouched, {"passed": False})[0]
    assert "undecided" in gate_notices("m", untouched, UNDECIDED)[0]
    for verdict in (None, {**PASSED, "perplexity": None}):
        assert "never gated" in gate_notices("m", trained, verdict)[0]


def test_every_command_that_uses_the_checkpoint_warns(selfspec, checkpoint, tmp_path) -> None:  # type: ignore[no-untyped-def]
    model = tmp_path / "model"
    shutil.copytree(checkpoint, model)
    verdict = {**UNDECIDED, "perplexity": UNDECIDED, "lossless": None}
    known = Artifact(artifact.fingerprint(model), "llama", 6, False, "no sweep was run", regress=verdict)
    artifact.write(model, known)
    assert "is undecided" in selfspec("decode", model, "--prompt", "a", "--max-new-tokens", 1).stderr
    assert "is undecided" in selfspec("check", model, "--live-length", 20).stderr
    text = tmp_path / "text.txt"
    text.write_text("some text to count")
    other = tmp_path / "other.txt"
    other.write_text("quite another text to look at")
    assert "is undecided" in selfspec("draft-vocab", model, "--text", text).stderr
    data = ("--train-data", text, "--output", tmp_path / "out", "--max-steps", 1, "--sequence-length", 4)
    assert "is undecided" in selfspec("train", "--model", model, *data, "--eval-data", other).stderr
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"text {n}"}) + "\n" for n in range(2)))
    swept = selfspec(
        "sweep-exit", model, "--prompts", prompts, "--num-prompts", 2, "--max-new-tokens", 6, "--repeats", 1,
        "--max-draft-tokens", 2, "--confirm", 0, "--drafters", "layer-skip",
    )  # fmt: skip
    assert "is undecided" in swept.stderr
    assert json.loads((model / "selfspec.json").read_text())["regress"]["status"] == "undecided"
