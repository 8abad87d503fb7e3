from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from selfspec_tune.errors import UserError
from selfspec_tune.train.data import Sequences, load_sequences
from selfspec_tune.train.records import Record, read_records

EOS = 0


def read(source: Path | str, tokenizer: Any) -> list[Record]:
    return read_records(str(source), tokenizer, text_field="text", messages_field="messages")


def load(train: list[Path], held_out: list[Path], tokenizer: Any, **options: Any) -> tuple[Sequences, Sequences]:
    defaults: dict[str, Any] = {"length": 8, "num_train": 1000, "num_eval": 1000}
    return load_sequences(list(map(str, train)), list(map(str, held_out)), tokenizer, **{**defaults, **options})


def test_every_kind_of_record(tmp_path: Path, tokenizer: Any, jsonl: Callable[..., Path]) -> None:
    file = jsonl(
        tmp_path / "a.jsonl",
        [
            {"text": "plain"},
            {"prompt": "ask", "completion": "answer"},
            {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]},
            {"text": "  "},
        ],
    )
    assert read(file, tokenizer) == [
        Record("plain"),
        Record("answer", prompt="ask"),
        Record("<user> hi <eos>\n<assistant> ho <eos>\n", templated=True),
    ]


def test_a_txt_file_is_one_document(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    assert read(tmp_path / "a.txt", tokenizer) == [Record("one\n\ntwo\n")]


def test_hub_names_go_through_datasets_with_splits_and_slices(
    tmp_path: Path, tokenizer: Any, jsonl: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    data = tmp_path / "set"
    data.mkdir()
    jsonl(data / "train.jsonl", [{"text": f"document {n}"} for n in range(5)])
    jsonl(data / "test.jsonl", [{"text": "held out"}])
    assert read(data, tokenizer) == [Record(f"document {n}") for n in range(5)]
    assert read(f"{data}:test", tokenizer) == [Record("held out")]
    assert read(f"{data}:train[:2]", tokenizer) == [Record("document 0"), Record("document 1")]
    assert read(f"{data}:default:test", tokenizer) == [Record("held out")]
    with pytest.raises(UserError, match="cannot be loaded"):
        read(f"{data}:nosuchsplit", tokenizer)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{broken", "not valid JSON"),
        ("[1]", "not a JSON object"),
        ('{"body": "x"}', "has no text"),
        ('{"text": 7}', "text is not text"),
        ('{"messages": "hello"}', "not a list of messages"),
        ('{"messages": [{"role": "user"}]}', "not a list of messages"),
        ('{"messages": [{"role": "bad", "content": "x"}]}', "no such role"),
        ('{"prompt": "x", "completion": 1}', "completion is not text"),
    ],
)
def test_a_bad_record_is_named_by_file_and_line(tmp_path: Path, tokenizer: Any, line: str, complaint: str) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text('{"text": "fine"}\n\n' + line + "\n")
    with pytest.raises(UserError) as caught:
        read(file, tokenizer)
    assert f"{file}:3" in str(caught.value) and complaint in str(caught.value)


def test_messages_without_a_template_are_refused(
    tmp_path: Path, tokenizer_maker: Callable[..., Any], jsonl: Callable[..., Path]
) -> None:
    bare = tokenizer_maker(tmp_path / "bare", chat_template=None)
    file = jsonl(tmp_path / "a.jsonl", [{"messages": [{"role": "user", "content": "hi"}]}])
    with pytest.raises(UserError, match="no chat template"):
        read(file, bare)


def test_documents_are_packed_with_an_end_token_between(
    tmp_path: Path, tokenizer: Any, jsonl: Callable[..., Path]
) -> None:
    train = jsonl(tmp_path / "a.jsonl", [{"text": text} for text in ("abc", "defgh", "ij", "klmno")])
    held_out = jsonl(tmp_path / "b.jsonl", [{"text": "0123456789"}])
    training, evaluation = load([train], [held_out], tokenizer, length=6)
    stream = training.ids.flatten().tolist()
    assert len(stream) == 18  # 3 + 5 + 2 + 5 tokens, 4 end tokens, cut to whole sequences
    pieces = {p for p in tokenizer.decode(stream).split("<eos>") if p}
    assert {"abc", "defgh", "ij", "klmno"} & pieces and stream.count(EOS) >= 3
    assert evaluation.ids.tolist() == [tokenizer("012345")["input_ids"]]
    assert training.counted.all()


def test_only_the_completion_of_a_prompt_is_counted(tmp_path: Path, tokenizer: Any, jsonl: Callable[..., Path]) -> None:
    train = jsonl(tmp_path / "a.jsonl", [{"prompt": "pppp", "completion": "ccc"}])
    held_out = jsonl(tmp_path / "b.jsonl", [{"text": "held out"}])
    training, _ = load([train], [held_out], tokenizer)
    assert tokenizer.decode(training.ids[0].tolist()) == "ppppccc<eos>"
    assert training.counted.tolist() == [[False] * 4 + [True] * 4]


def test_a_rendered_chat_gets_no_second_end_token(tmp_path: Path, tokenizer: Any, jsonl: Callable[..., Path]) -> None:
    train = jsonl(tmp_path / "a.jsonl", [{"messages": [{"role": "u", "content": "hello"}]}] * 2)
    held_out = jsonl(tmp_path / "b.jsonl", [{"text": "held out " * 4}])
    training, _ = load([train], [held_out], tokenizer, length=24)
    assert tokenizer.decode(training.ids[0].tolist()).startswith("<u> hello <eos>\n<u> ")


def test_the_split_is_by_record_and_does_not_depend_on_order_or_seed(
    tmp_path: Path, tokenizer: Any, jsonl: Callable[..., Path]
) -> None:
    texts = [f"record number {n}" for n in range(400)]
    forward = jsonl(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    backward = jsonl(tmp_path / "b.jsonl", [{"text": text} for text in reversed(texts)])

    def split(file: Path, seed: int) -> tuple[set[str], set[str]]:
        parts = load([file], [], tokenizer, seed=seed)
        decoded = (tokenizer.decode(part.ids.flatten().tolist()).split("<eos>")[:-1] for part in parts)
        training, held_out = map(set, decoded)
        return training, held_out

    training, held_out = split(forward, 0)
    assert 2 <= len(held_out) <= 20
    assert not training & held_out
    again_training, again_held_out = split(backward, 7)
    # The last text of a part may be cut off by the sequence length.
    assert len(again_held_out ^ held_out) <= 2 and len(again_training ^ training) <= 2


def test_a_record_given_as_held_out_is_not_trained_on(
    tmp_path: Path, tokenizer: Any, jsonl: Callable[..., Path]
) -> None:
    train = jsonl(tmp_path / "a.jsonl", [{"text": "SECRET secret"}, {"text": "something to learn"}])
    held_out = jsonl(tmp_path / "b.jsonl", [{"text": "SECRET secret"}])
    training, _ = load([train], [held_out], tokenizer, length=4)
    assert "SECRET" not in tokenizer.decode(training.ids.flatten().tolist())
    with pytest.raises(UserError, match="no training record is left"):
        load([held_out], [held_out], tokenizer, length=4)


@pytest.mark.parametrize("name", ["missing.txt", "missing.jsonl"])
def test_a_missing_file_is_named(tmp_path: Path, tokenizer: Any, name: str) -> None:
    with pytest.raises(UserError, match=name):
        read(tmp_path / name, tokenizer)


def test_empty_and_too_short_data_are_refused(tmp_path: Path, tokenizer: Any, jsonl: Callable[..., Path]) -> None:
    good = jsonl(tmp_path / "good.jsonl", [{"text": "a longer text than eight tokens"}])
    empty, short = jsonl(tmp_path / "e.jsonl", []), jsonl(tmp_path / "s.jsonl", [{"text": "abc"}])
    with pytest.raises(UserError, match="hold no text"):
        load([empty], [good], tokenizer)
    with pytest.raises(UserError, match="training data are too short") as caught:
        load([short], [good], tokenizer)
    assert "4 tokens" in str(caught.value)
    with pytest.raises(UserError, match="held-out data are too short"):
        load([good], [short], tokenizer)
    with pytest.raises(UserError, match="eval-data"):
        load([good], [], tokenizer)


def test_a_long_record_does_not_fill_all_sequences(tmp_path: Path, tokenizer: Any, jsonl: Callable[..., Path]) -> None:
    records = [{"text": letter * 40} for letter in "abcdefgh"]
    train = jsonl(tmp_path / "a.jsonl", records)
    held_out = jsonl(tmp_path / "b.jsonl", [{"text": letter * 40} for letter in "ABCDEFGH"])
    for part in load([train], [held_out], tokenizer, num_train=5, num_eval=5):
        assert len(part) == 5
        letters = set(tokenizer.decode(part.ids.flatten().tolist()).replace("<eos>", ""))
        assert len(letters) > 2  # one record alone has five sequences


def test_not_all_of_a_large_corpus_is_tokenized(tmp_path: Path, tokenizer: Any, jsonl: Callable[..., Path]) -> None:
    class Counting:
        eos_token_id, eos_token, chat_template = tokenizer.eos_token_id, tokenizer.eos_token, None
        calls = 0

        def __call__(self, text: str, **options: Any) -> Any:
            Counting.calls += 1
            return tokenizer(text, **options)

    train = jsonl(tmp_path / "a.jsonl", [{"text": f"some text {n}"} for n in range(500)])
    held_out = jsonl(tmp_path / "b.jsonl", [{"text": "held out"}])
    load([train], [held_out], Counting(), num_train=3)
    assert Counting.calls < 50


def test_the_stream_visits_every_sequence_once_per_epoch_in_a_new_order() -> None:
    ids = torch.arange(10, dtype=torch.int32)[:, None].expand(10, 4)
    sequences = Sequences(ids, torch.ones(10, 4, dtype=torch.bool))
    order = torch.cat([sequences.batch(first, 4, seed=1)[0][:, 0] for first in range(0, 40, 4)]).tolist()
    epochs = [order[start : start + 10] for start in range(0, 40, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert sequences.batch(8, 4, seed=1)[0][:, 0].tolist() == order[8:12]
    assert torch.cat([sequences.batch(0, 10, seed=2)[0][:, 0]]).tolist() != epochs[0]
