"""The whole chain through the installed command: train → sweep-exit → regress → decode on a tiny checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("corpus")
    source = Path(json.__file__).read_text(encoding="utf-8")
    documents = [source[start : start + 900] for start in range(0, 9000, 900)]
    # Eight documents at least, or the gate cannot decide.
    heldout = [text[start : start + 225] for text in documents[7:] for start in range(0, 900, 225)]
    for name, part in (("train", documents[:7]), ("heldout", heldout)):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in part))
    prompts = [{"id": str(n), "prompt": text[:120]} for n, text in enumerate(documents[7:] * 3)]
    (directory / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in prompts))
    return directory


def test_train_sweep_regress_decode(installed_selfspec, checkpoint, corpus, tmp_path):
    selfspec = installed_selfspec
    trained, prompts, heldout = tmp_path / "trained", corpus / "prompts.jsonl", corpus / "heldout.jsonl"

    facts = json.loads(
        selfspec(
            "train", "--model", checkpoint, "--output", trained, "--train-data", corpus / "train.jsonl",
            "--eval-data", heldout, "--max-steps", 12, "--sequence-length", 64, "--batch-size", 4,
            "--exits", "2,4", "--learning-rate", "2e-3", "--warmup-steps", 2, "--layer-dropout", 0.1, "--json",
        ).stdout
    )  # fmt: skip
    assert facts["steps"] == 12 and set(facts["alpha_after"]) == {"2", "4"}
    assert facts["perplexity_after"] < facts["perplexity_before"]
    assert (trained / "model.safetensors").exists() and (trained / "metrics.jsonl").exists()

    ungated = selfspec("decode", trained, "--prompt", "a", "--max-new-tokens", 1)
    assert "never gated" in ungated.stderr

    sweep = json.loads(
        selfspec(
            "sweep-exit", trained, "--prompts", prompts, "--raw", "--num-prompts", 6, "--max-new-tokens", 24,
            "--repeats", 3, "--max-draft-tokens", 4, "--json",
        ).stdout
    )  # fmt: skip
    artifact = json.loads((trained / "selfspec.json").read_text())
    assert artifact == sweep["artifact"]
    assert {(cell["exit_layer"], cell["num_draft_tokens"]) for cell in sweep["cells"]} == {
        (exit_layer, k) for exit_layer in range(1, 6) for k in range(1, 5)
    }
    assert artifact["enabled"] or artifact["reason"]

    verdict = json.loads(
        selfspec(
            "regress", trained, "--text", heldout, "--prompts", prompts, "--raw", "--num-prompts", 2,
            "--max-new-tokens", 16, "--exit-layers", "2,5", "--num-draft-tokens", "3", "--sampling-texts", 16,
            "--json",
        ).stdout
    )  # fmt: skip
    assert verdict["status"] == "passed" and verdict["lossless"]["differing_tokens"] == 0
    assert verdict["sampling"]["passed"]
    assert verdict["perplexity"]["ratio"] < 1
    assert json.loads((trained / "selfspec.json").read_text())["regress"]["passed"]

    common = ("decode", trained, "--prompt", "def load(", "--raw", "--max-new-tokens", 30, "--json")
    plain = json.loads(selfspec(*common, "--no-speculation").stdout)
    spec = json.loads(selfspec(*common, "--exit-layer", 2, "--num-draft-tokens", 3).stdout)
    assert plain["completion"] == spec["completion"] and spec["rounds"] > 0
    assert "never gated" not in selfspec(*common).stderr

    # A gate that fails is exit code 1, and seen wherever the checkpoint is used: the untrained weights are worse.
    untrained = tmp_path / "untrained"
    shutil.copytree(checkpoint, untrained)
    selfspec("regress", untrained, "--base", trained, "--text", heldout, code=1)
    assert "FAILED its regression gate" in selfspec("decode", untrained, "--prompt", "a", "--max-new-tokens", 1).stderr
