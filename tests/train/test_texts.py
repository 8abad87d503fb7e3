"""The texts of a run, whole or streamed: what the run is told of them, and that a stream resumes in the loop."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from selfspec_tune.config import TrainConfig
from selfspec_tune.errors import UserError
from selfspec_tune.train.loop import train
from selfspec_tune.train.stream import Stream
from selfspec_tune.train.texts import Texts, load_texts

Make = Callable[..., TrainConfig]


def load(config: TrainConfig, tokenizer: Any) -> tuple[Texts, list[str]]:
    said: list[dict[str, Any]] = []
    texts = load_texts(config, tokenizer, 0, 1, said.append)
    return texts, [record["notice"] for record in said]


def test_assistant_only_without_messages_is_warned_of(
    make_config: Make, tmp_path: Path, tokenizer: Any, jsonl: Callable[..., Path]
) -> None:
    _, said = load(make_config(assistant_only=True), tokenizer)
    assert len(said) == 1 and "--assistant-only has no effect" in said[0]
    turns = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sees a bird " * 9}]
    chats = jsonl(tmp_path / "chats.jsonl", [{"messages": turns}] * 9)
    texts, said = load(make_config(assistant_only=True, train_data=(str(chats),)), tokenizer)
    assert said == [] and not texts.training.batch(0, 2, seed=0)[1].all()


def test_general_text_is_read_as_the_held_out_is(make_config: Make, corpus: Path, tokenizer: Any) -> None:
    texts, said = load(make_config(general_data=(str(corpus / "heldout.jsonl"),)), tokenizer)
    assert texts.general is not None and said == []
    assert torch.equal(texts.general.ids, texts.held_out.ids)
    assert load(make_config(), tokenizer)[0].general is None


def test_skipped_records_are_told_of(
    make_config: Make, tmp_path: Path, tokenizer: Any, jsonl: Callable[..., Path]
) -> None:
    records = [{"text": f"sentence number {n} of the text"} for n in range(40)]
    file = jsonl(tmp_path / "t.jsonl", [*records, {"txt": "no such field"}])
    config = make_config(train_data=(str(file),), skip_bad_records=True)
    _, said = load(config, tokenizer)
    assert said[0] == "1 bad record was skipped:" and "t.jsonl:41" in said[1]
    assert train(config)["skipped"] == said


def test_a_token_that_the_model_does_not_know_is_a_user_error(make_config: Make, tokenizer: Any) -> None:
    with pytest.raises(UserError, match="tokens that the model does not know"):
        load(make_config(), tokenizer)[0].training.check_vocabulary(50)


def test_a_streamed_run_resumes_to_the_same_bits(make_config: Make, tmp_path: Path, tokenizer: Any) -> None:
    from safetensors.torch import load_file

    assert isinstance(load(make_config(streaming=True), tokenizer)[0].training, Stream)
    train(make_config(streaming=True, output=tmp_path / "straight"))
    config = make_config(streaming=True, output=tmp_path / "resumed")

    def stop(stage: str, done: int, total: int) -> None:
        if (stage, done) == ("train", 3):
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(config, stop)
    train(config)
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("straight", "resumed"))
    assert all(torch.equal(one[name], other[name]) for name in other)
    read = [(tmp_path / name / "trained_on.npy").read_bytes() for name in ("straight", "resumed")]
    assert read[0] == read[1]
