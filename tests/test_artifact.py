"""selfspec.json: what is written is read, and what belongs to other weights or another version is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from selfspec_tune import artifact as artifacts
from selfspec_tune.artifact import Artifact
from selfspec_tune.errors import UserError

COSTS = {"alpha": None, "cost_ratio": 0.0, "verify_ratio": [1.1, 1.2], "overhead": 0.01}

CONTEXT = {"max_context": 128, "exit_layer": 5, "num_draft_tokens": 0, "costs": {}}


@pytest.fixture
def saved(save_tiny, tmp_path):
    """A checkpoint of its own with an enabled artifact: (directory, artifact)."""
    directory = save_tiny("artifact")
    value = Artifact(
        artifacts.fingerprint(directory), "llama", 6, True, "pays", exit_layer=3, num_draft_tokens=2, rows=[4, 8]
    )
    artifacts.write(directory, value)
    return directory, value


def test_round_trip(saved):
    directory, value = saved
    assert artifacts.read(directory) == value
    assert not list(directory.glob(".*.tmp"))
    (directory / artifacts.FILE_NAME).unlink()
    assert artifacts.read(directory) is None


def test_other_weights_or_another_config_are_noticed(saved):
    directory, _ = saved
    weights = directory / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    with pytest.raises(UserError, match="other weights"):
        artifacts.read(directory)
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    artifacts.read(directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "transformers_version": "0"}))
    artifacts.read(directory)
    (directory / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    with pytest.raises(UserError, match="other weights"):
        artifacts.read(directory)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"exit_layer": 0}, "exit_layer is out of range"),
        ({"exit_layer": 6}, "exit_layer is out of range"),
        ({"num_draft_tokens": 0}, "num_draft_tokens is out of range"),
        ({"drafter": "magic"}, "drafter is unknown"),
        ({"numerics": "roughly"}, "numerics is unknown"),
        ({"schema_version": 2}, "unknown schema"),
        ({"num_draft_tokens": 100}, "num_draft_tokens is out of range"),
        ({"k_max": None}, "k_max is out of range"),
        ({"k_max": 9}, "k_max is out of range"),
        ({"k_policy": "often"}, "k_policy is unknown"),
        ({"draft": None}, "draft is no object"),
        ({"measured_on": None}, "measured_on is no object"),
        ({"costs": []}, "costs is no object"),
        ({"draft": {"bits": 4}}, "draft is unknown"),
        ({"draft": {"draft_bits": 5}}, "draft is unknown"),
        ({"draft": {"hybrid_with": "copy"}}, "draft is unknown"),
        ({"draft": {"draft_vocab": "4096"}}, "draft is unknown"),
        (
            {"drafter": "hybrid", "exit_layer": None, "draft": {"hybrid_with": "layer-skip"}},
            "exit_layer is out of range",
        ),
        ({"costs": {"copy": {"alpha": 1}}}, "costs cannot be read"),
        ({"costs": {"copy": {**COSTS, "overhead": None}}}, "costs cannot be read"),
        ({"costs": {"copy": {**COSTS, "verify_ratio": [1.0, 0.0]}}}, "costs cannot be read"),
        ({"costs": {"copy": {**COSTS, "cost_ratio": float("nan")}}}, "costs cannot be read"),
        ({"costs": {"copy": {**COSTS, "alpha": 2}}}, "costs cannot be read"),
        ({"by_context": {}}, "by_context cannot be read"),
        ({"by_context": [3]}, "by_context cannot be read"),
        ({"by_context": [{**CONTEXT, "extra": 1}]}, "by_context cannot be read"),
        ({"by_context": [{"max_context": 128, "costs": {}}]}, "by_context cannot be read"),
        ({"by_context": [{**CONTEXT, "max_context": "128"}]}, "by_context cannot be read"),
        ({"by_context": [{**CONTEXT, "exit_layer": 6}]}, "by_context cannot be read"),
        ({"by_context": [{**CONTEXT, "num_draft_tokens": 9}]}, "by_context cannot be read"),
        ({"by_context": [{**CONTEXT, "num_draft_tokens": None}]}, "by_context cannot be read"),
        ({"by_context": [{**CONTEXT, "costs": {"copy": {**COSTS, "overhead": -1}}}]}, "by_context cannot be read"),
        ({"by_context": [{**CONTEXT, "costs": {"copy": COSTS}}]}, "by_context cannot be read"),
        ({"by_context": [CONTEXT, {**CONTEXT, "max_context": 64}]}, "by_context cannot be read"),
    ],
)
def test_what_cannot_be_decoded_with_is_refused(saved, changes, message):
    directory, value = saved
    artifacts.write(directory, replace(value, **changes))
    with pytest.raises(UserError, match=message) as caught:
        artifacts.read(directory)
    assert "selfspec sweep-exit" in str(caught.value)


def test_unknown_fields_are_refused(saved):
    directory, _ = saved
    path = directory / artifacts.FILE_NAME
    path.write_text(json.dumps({**json.loads(path.read_text()), "extra": 1}))
    with pytest.raises(UserError, match="unknown fields"):
        artifacts.read(directory)


def test_every_drafter_may_stand_in_it(saved):
    directory, value = saved
    for drafter, draft in (("copy", {}), ("low-precision", {"draft_bits": 8, "draft_vocab": 100}), ("hybrid", {})):
        written = replace(value, drafter=drafter, exit_layer=None, draft=draft, costs={"copy": COSTS})
        artifacts.write(directory, written)
        assert artifacts.read(directory) == written


def test_contexts_may_move_the_exit_or_keep_the_drafters_own(saved):
    directory, value = saved
    entries = [{**CONTEXT, "exit_layer": None}, CONTEXT, {**CONTEXT, "max_context": 4096, "num_draft_tokens": 8}]
    written = replace(value, costs={"copy": COSTS}, by_context=[{**each, "costs": {"copy": COSTS}} for each in entries])
    artifacts.write(directory, written)
    assert artifacts.read(directory) == written
