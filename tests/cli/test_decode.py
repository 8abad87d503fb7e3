"""`selfspec decode` through the installed command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write(path: Path, *records: dict) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_prompt_file_and_stdin_give_the_same_text(selfspec, checkpoint, tmp_path):
    (tmp_path / "prompt.txt").write_text("def add(a, b):")
    common = (checkpoint, "--raw", "--max-new-tokens", 20)
    by_flag = selfspec("decode", *common, "--prompt", "def add(a, b):")
    by_file = selfspec("decode", *common, "--prompt-file", tmp_path / "prompt.txt")
    by_stdin = selfspec("decode", *common, stdin="def add(a, b):")
    assert by_flag.stdout == by_file.stdout == by_stdin.stdout != ""
    assert "selfspec sweep-exit" in by_flag.stderr, "without selfspec.json it says how to get one"
    assert "20 tokens" in by_flag.stderr and "tokens/s" in by_flag.stderr


def test_speculation_by_flags_changes_nothing_but_the_statistics(selfspec, checkpoint):
    common = ("decode", checkpoint, "--prompt", "hello", "--max-new-tokens", 40, "--json")
    plain = json.loads(selfspec(*common, "--no-speculation").stdout)
    spec = json.loads(selfspec(*common, "--exit-layer", 3, "--num-draft-tokens", 4).stdout)
    assert plain["completion"] == spec["completion"]
    assert (plain["rounds"], plain["enabled"], plain["numerics"]) == (0, False, "exact")
    assert spec["enabled"] and spec["exit_layer"] == 3 and spec["num_draft_tokens"] == 4
    expected = {
        "tokens_per_second", "prefill_seconds", "draft_seconds", "verify_seconds", "rounds", "drafted", "accepted",
        "emitted", "alpha", "accepted_fraction", "tokens_per_round", "drafter", "exit_layer", "num_draft_tokens",
        "numerics", "enabled", "reason",
    }  # fmt: skip
    assert expected <= set(spec)


def test_jsonl_keeps_records_and_resumes(selfspec, checkpoint, tmp_path):
    records = [{"id": f"r{n}", "prompt": f"text {n}", "extra": n} for n in range(5)]
    source, target = write(tmp_path / "in.jsonl", *records), tmp_path / "out" / "answers.jsonl"
    common = ("decode", checkpoint, "--input", source, "--output", target, "--max-new-tokens", 8, "--batch-size", 2)
    first = json.loads(selfspec(*common, "--json").stdout)
    assert (first["written"], first["skipped"]) == (5, 0)
    whole = target.read_text()
    for record, answer in zip(records, read(target), strict=True):
        assert {key: answer[key] for key in record} == record
        assert set(answer) - set(record) == {"completion", "num_tokens", "finish_reason"}
    # An interruption after two records and a half.
    lines = whole.splitlines(keepends=True)
    target.write_text(lines[0] + lines[1] + lines[2][:20])
    again = json.loads(selfspec(*common, "--json").stdout)
    assert (again["written"], again["skipped"]) == (3, 2)
    assert sorted(target.read_text().splitlines()) == sorted(whole.splitlines())
    assert json.loads(selfspec(*common, "--json").stdout)["written"] == 0


def test_field_names_chats_and_records_without_ids(selfspec, checkpoint, tmp_path):
    chat = {"turns": [{"role": "user", "content": "hi"}]}
    source = write(tmp_path / "in.jsonl", {"question": "hi"}, chat)
    target = tmp_path / "out.jsonl"
    fields = ("--prompt-field", "question", "--messages-field", "turns")
    selfspec("decode", checkpoint, "--input", source, "--output", target, "--max-new-tokens", 6, *fields)
    answers = read(target)
    assert [answer["id"] for answer in answers] == [0, 1] or [answer["id"] for answer in answers] == ["0", "1"]
    assert answers[0]["completion"] == answers[1]["completion"], "a prompt is a user's chat turn"


def test_max_new_tokens_zero_and_stop(selfspec, checkpoint):
    nothing = json.loads(selfspec("decode", checkpoint, "--prompt", "a", "--max-new-tokens", 0, "--json").stdout)
    assert (nothing["completion"], nothing["num_tokens"], nothing["finish_reason"]) == ("", 0, "length")
    common = ("decode", checkpoint, "--prompt", "a", "--raw", "--max-new-tokens", 60, "--json")
    free = json.loads(selfspec(*common).stdout)["completion"]
    stop = next(c for c in free if c.isascii() and c.isprintable())
    cut = json.loads(selfspec(*common, "--stop", stop).stdout)
    assert cut["completion"] == free[: free.index(stop)] and cut["finish_reason"] == "stop"


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--prompt", ""), "the prompt is empty"),
        (("--prompt", "x" * 2000, "--raw"), "longer than the model's context"),
        (("--prompt", "a", "--exit-layer", 0), "exit_layer is out of range"),
        (("--prompt", "a", "--exit-layer", 6), "exit_layer is out of range"),
        (("--prompt", "a", "--num-draft-tokens", 2), "needs a draft"),
        (("--prompt", "a", "--prompt-file", "b"), "more than one source"),
        (("--prompt-file", "no-such-file"), "does not exist"),
        (("--input", "no-such-file.jsonl", "--output", "out.jsonl"), "does not exist"),
        (("--input", "x.jsonl"), "go together"),
        (("--prompt", "a", "--top-p", 2), "top_p is out of range"),
        (("--prompt", "a", "--numerics", "exactly"), "numerics"),
        (("--prompt", "a", "--max-new-tokens", -1), "negative"),
        (("--prompt", "a", "--device", "toaster"), "device"),
    ],
)
def test_user_errors_have_no_traceback_and_exit_2(selfspec, checkpoint, arguments, message):
    process = selfspec("decode", checkpoint, *arguments, code=2)
    assert message in process.stderr and process.stdout == ""


def test_an_artifact_of_other_weights_is_refused(selfspec, save_tiny):
    directory = save_tiny("foreign")
    content = {
        "checkpoint_fingerprint": "0" * 64,
        "model_type": "llama",
        "num_layers": 6,
        "enabled": False,
        "reason": "",
    }
    (directory / "selfspec.json").write_text(json.dumps(content | {"schema_version": 1}))
    assert "other weights" in selfspec("decode", directory, "--prompt", "a", code=2).stderr
    (directory / "selfspec.json").write_text(json.dumps(content | {"schema_version": 99}))
    assert "unknown schema" in selfspec("decode", directory, "--prompt", "a", code=2).stderr
    (directory / "selfspec.json").write_text("{")
    assert "not valid JSON" in selfspec("decode", directory, "--prompt", "a", code=2).stderr


def test_check(selfspec, checkpoint):
    result = json.loads(selfspec("check", checkpoint, "--live-length", 200, "--json").stdout)
    assert result["exact"] and result["classes"][0][-1] >= 9 and set(result["plain_step_ms"]) == {"exact", "fast"}
    assert "exact: yes" in selfspec("check", checkpoint, "--live-length", 130).stdout


def test_files_that_are_not_ours_are_left_alone(selfspec, checkpoint, tmp_path):
    source = write(tmp_path / "in.jsonl", {"prompt": "a"})
    for content in ("precious", '{"other": 1}\n', "first\nlast", '{"id": "0", "completion": 1}\nx'):
        target = tmp_path / "notes.txt"
        target.write_text(content)
        process = selfspec("decode", checkpoint, "--input", source, "--output", target, code=2)
        assert "was not written by" in process.stderr and target.read_text() == content
    assert "is a directory" in selfspec("decode", checkpoint, "--input", source, "--output", tmp_path, code=2).stderr


def test_an_answer_to_another_record_of_the_same_id_is_not_taken_for_this_one(selfspec, checkpoint, tmp_path):
    target = tmp_path / "out.jsonl"
    common = ("decode", checkpoint, "--output", target, "--max-new-tokens", 2, "--input")
    selfspec(*common, write(tmp_path / "in.jsonl", {"prompt": "a"}, {"prompt": "b"}))
    before = target.read_text()
    process = selfspec(*common, write(tmp_path / "other.jsonl", {"prompt": "x"}, {"prompt": "a"}), code=2)
    assert "another record" in process.stderr and target.read_text() == before


def test_line_separators_and_lone_surrogates_survive_a_resume(selfspec, checkpoint, tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text(
        '{"id": "a", "prompt": "x\\u2028y\\u0085z"}\n{"id": "b", "prompt": "\\ud83d", "note": "\\udc00"}\n'
    )
    common = ("decode", checkpoint, "--input", source, "--output", tmp_path / "out.jsonl", "--max-new-tokens", 2)
    selfspec(*common)
    assert json.loads(selfspec(*common, "--json").stdout)["written"] == 0


def test_one_prompt_too_long_is_named_before_anything_is_decoded(selfspec, checkpoint, tmp_path):
    source = write(tmp_path / "in.jsonl", {"prompt": "a"}, {"id": "long", "prompt": "x" * 2000})
    target = tmp_path / "out.jsonl"
    assert "request long" in selfspec("decode", checkpoint, "--input", source, "--output", target, code=2).stderr
    assert not target.exists()


def test_text_that_is_not_utf8_is_a_user_error(selfspec, checkpoint, tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_bytes(b'{"prompt": "caf\xe9"}\n')
    process = selfspec("decode", checkpoint, "--input", source, "--output", tmp_path / "out.jsonl", code=2)
    assert "in.jsonl:1" in process.stderr


def test_exit_layer_0_is_refused_beside_an_enabled_artifact(selfspec, save_tiny):
    from dataclasses import replace

    from selfspec_tune import artifact

    directory = save_tiny("enabled")
    good = artifact.Artifact(artifact.fingerprint(directory), "llama", 6, True, "", exit_layer=3, num_draft_tokens=2)
    artifact.write(directory, good)
    common = ("decode", directory, "--prompt", "a", "--max-new-tokens", 8, "--json")
    assert json.loads(selfspec(*common).stdout)["exit_layer"] == 3
    assert "out of range" in selfspec(*common, "--exit-layer", 0, code=2).stderr
    artifact.write(directory, replace(good, numerics="roughly"))
    assert "numerics is unknown" in selfspec(*common, code=2).stderr
