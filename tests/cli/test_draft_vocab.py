"""`selfspec draft-vocab`: what is counted, what is written, and that decoding with it gives the same text."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny import END, VOCAB

from selfspec_tune.artifact import fingerprint
from selfspec_tune.decode.engine import Engine
from selfspec_tune.decode.requests import Request
from selfspec_tune.decode.sampling import SamplingParams
from selfspec_tune.model.decoder import load_decoder
from selfspec_tune.model.draft_vocab import read_draft_vocab

TEXT = "the quick brown fox jumps over the lazy dog, and the dog sleeps on. " * 3


def answer(model: Path, prompt: str, count: int) -> list[int]:
    """What the model writes after a text, byte by byte."""
    engine = Engine(load_decoder(str(model)))
    [completion], _ = engine.generate([Request("a", list(prompt.encode()), count)], SamplingParams())
    return completion.token_ids


@pytest.fixture
def model(save_tiny: Callable[..., Path]) -> Path:
    return save_tiny("own", late=0.3)


def write(path: Path, *records: dict) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def expected(*texts: str) -> list[int]:
    """The bytes of some texts by falling frequency behind the end token, which is the special one."""
    counts = Counter(byte for text in texts for byte in text.encode())
    return [END, *sorted(counts, key=lambda byte: (-counts[byte], byte))]


def test_texts_are_counted_and_written_beside_the_checkpoint(selfspec, model, tmp_path):
    (tmp_path / "notes.txt").write_text(TEXT)
    chat = [{"role": "user", "content": "Hi!"}, {"role": "assistant", "content": "Yes?"}]
    records = [{"body": "some body"}, {"prompt": "NOT COUNTED", "completion": "counted"}, {"messages": chat}]
    source = write(tmp_path / "mixed.jsonl", *records)
    arguments = ("--text", tmp_path / "notes.txt", "--text", source, "--text-field", "body")
    result = json.loads(selfspec("draft-vocab", model, *arguments, "--json").stdout)

    vocab = read_draft_vocab(model)
    texts = (TEXT, "some body", "counted", "[user]Hi!\n[assistant]Yes?\n[assistant]")
    assert vocab.ranked == expected(*texts) and vocab.special == [END]
    assert vocab.num_tokens == sum(map(len, texts)) and vocab.source == [str(tmp_path / "notes.txt"), str(source)]
    assert vocab.checkpoint_fingerprint == fingerprint(model)
    # The tokenizer is smaller than the head: its 257 tokens stand before the padding of 63 rows.
    assert vocab.vocab_size == VOCAB > 257 > max(vocab.ranked[1:])
    size = str(len(vocab.ranked))
    assert result["coverage"] == vocab.coverage and set(vocab.coverage) == {size}
    assert vocab.coverage[size] == 1, "no byte stands in the last tenth of these alone"
    assert result["head_bytes"] == {size: len(vocab.ranked) * 96 * 4, str(VOCAB): VOCAB * 96 * 4}
    assert (result["num_ranked"], result["num_special"], result["dtype"]) == (len(vocab.ranked), 1, "float32")


def test_the_models_own_answers_are_counted(selfspec, model, tmp_path):
    prompts = write(tmp_path / "prompts.jsonl", *({"prompt": f"number {n}"} for n in range(4)))
    common = ("--raw", "--max-new-tokens", 12)
    result = json.loads(
        selfspec("draft-vocab", model, "--prompts", prompts, "--num-prompts", 3, *common, "--json").stdout
    )
    assert result["source"] == [f"answers to {prompts}"]

    answers = [answer(model, f"number {n}", 12) for n in range(3)]
    assert result["num_tokens"] == sum(map(len, answers))
    counts = Counter(token for tokens in answers for token in tokens)
    assert read_draft_vocab(model).ranked == sorted({END} | counts.keys(), key=lambda t: (t != END, -counts[t], t))


def test_answers_end_at_the_checkpoints_end_tokens_which_are_special(selfspec, model, tmp_path):
    tokens = answer(model, "number", 40)
    last = next(index for index, token in enumerate(tokens) if index > 10 and token not in tokens[:index])
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [END, tokens[last]]}))
    prompts = write(tmp_path / "prompts.jsonl", {"prompt": "number"})
    selfspec("draft-vocab", model, "--prompts", prompts, "--raw", "--max-new-tokens", 40)
    vocab = read_draft_vocab(model)
    assert vocab.num_tokens == last + 1 and vocab.special == sorted([END, tokens[last]]) == sorted(vocab.ranked[:2])


def test_decoding_with_it_gives_the_same_text(selfspec, model, tmp_path):
    (tmp_path / "notes.txt").write_text(TEXT)
    selfspec("draft-vocab", model, "--text", tmp_path / "notes.txt")
    common = ("decode", model, "--prompt", "the quick", "--raw", "--max-new-tokens", 40, "--json")
    plain = json.loads(selfspec(*common, "--no-speculation").stdout)
    for drafter in (("--exit-layer", 3), ("--drafter", "low-precision"), ("--drafter", "hybrid")):
        limited = json.loads(selfspec(*common, *drafter, "--draft-vocab", 12, "--k-policy", "fixed").stdout)
        assert limited["completion"] == plain["completion"] and limited["drafted"] > 0
    assert "1..30" in selfspec(*common, "--exit-layer", 3, "--draft-vocab", 300, code=2).stderr
    assert "reads no head" in selfspec(*common, "--drafter", "copy", "--draft-vocab", 12, code=2).stderr


def test_the_table_shows_coverage_and_bytes(selfspec, save_tiny, tmp_path):
    model = save_tiny("half", dtype=torch.bfloat16)
    (tmp_path / "notes.txt").write_text(TEXT)
    out = selfspec("draft-vocab", model, "--text", tmp_path / "notes.txt").stdout
    assert "30 tokens ranked" in out and "100.00%" in out and "bfloat16" in out
    assert "all tokens" in out and f"{VOCAB * 96 * 2 / 2**20:.2f} MiB" in out
    wide = selfspec("draft-vocab", model, "--text", tmp_path / "notes.txt", "--dtype", "float32", "--size", 5).stdout
    assert "5 tokens ranked" in wide and f"{VOCAB * 96 * 4 / 2**20:.2f} MiB" in wide


def test_every_token_may_be_ranked(selfspec, save_tiny, tmp_path):
    """The whole head is a line of the table, and here the size of the ranking. The tokenizer's end token has no row."""
    model = save_tiny("full", vocab_size=128, eos_token_id=None, pad_token_id=None)
    source = write(tmp_path / "all.jsonl", {"text": "".join(map(chr, range(128)))})
    assert "128 tokens ranked" in selfspec("draft-vocab", model, "--text", source).stdout
    result = json.loads(selfspec("draft-vocab", model, "--text", source, "--json").stdout)
    assert (result["num_ranked"], result["num_special"]) == (128, 0) and set(result["head_bytes"]) == {"128"}


def test_a_failed_run_writes_nothing(selfspec, model, tmp_path):
    write(tmp_path / "few.jsonl", {"text": "abc"})
    assert "too few tokens" in selfspec("draft-vocab", model, "--text", tmp_path / "few.jsonl", code=2).stderr
    assert not [path for path in model.iterdir() if "draft_vocab" in path.name]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((), "something to count"),
        (("--text", "no-such-file.txt"), "does not exist"),
        (("--prompts", "no-such-file.jsonl"), "does not exist"),
        (("--text", "notes.pdf"), ".txt or .jsonl"),
        (("--text", "t.jsonl", "--size", 0), "--size is too small"),
        (("--text", "t.jsonl", "--size", 1), "no room besides the special tokens"),
        (("--text", "t.jsonl", "--size", 40000), "--size is too large"),
        (("--prompts", "p.jsonl", "--num-prompts", 0), "--num-prompts is too small"),
        (("--prompts", "p.jsonl", "--max-new-tokens", 0), "--max-new-tokens is too small"),
        (("--text", "t.jsonl", "--text-field", "body"), "--text-field FIELD"),
        (("--prompts", "p.jsonl", "--prompt-field", "question"), "--prompt-field NAME"),
        (("--prompts", "long.jsonl", "--raw"), "longer than the model's context"),
    ],
)
def test_user_errors_exit_with_2(selfspec, model, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "t.jsonl", {"text": TEXT})
    write(tmp_path / "p.jsonl", {"prompt": "a"})
    write(tmp_path / "long.jsonl", {"prompt": "a" * 2000})
    process = selfspec("draft-vocab", model, *arguments, code=2)
    assert message in process.stderr and process.stdout == ""
    assert not (model / "draft_vocab.json").exists()


def test_a_hub_name_is_refused_before_anything_is_read(selfspec, tmp_path):
    (tmp_path / "notes.txt").write_text(TEXT)
    process = selfspec("draft-vocab", "some/hub-name", "--text", tmp_path / "notes.txt", code=2)
    assert "beside a checkpoint" in process.stderr and "some/hub-name" in process.stderr
