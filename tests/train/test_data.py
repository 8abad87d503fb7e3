from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from selfspec_tune.errors import UserError
from selfspec_tune.train.data import Sequences, load_general, load_sequences
from selfspec_tune.trained_on import TrainedOn

EOS = 0


def load(train: list[Path], held_out: list[Path], tokenizer: Any, **options: Any) -> tuple[Sequences, Sequences]:
    defaults: dict[str, Any] = {"length": 8, "num_train": 1000, "num_eval": 1000}
    return load_sequences(list(map(str, train)), list(map(str, held_out)), tokenizer, **{**defaults, **options})


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


def test_one_record_per_sequence_without_packing(tmp_path: Path, tokenizer: Any, jsonl: Callable[..., Path]) -> None:
    rows = [{"text": "abc"}, {"text": "defghijklmnop"}, {"prompt": "qr", "completion": "st"}]
    train, held_out = jsonl(tmp_path / "a.jsonl", rows), jsonl(tmp_path / "b.jsonl", [{"text": "held"}])
    training, evaluation = load([train], [held_out], tokenizer, packing=False)
    shown = {
        tokenizer.decode(ids): said
        for ids, said in zip(*map(torch.Tensor.tolist, (training.ids, training.counted)), strict=True)
    }
    assert shown == {
        "abc" + 5 * "<eos>": [True] * 4 + [False] * 4,
        "defghijk": [True] * 8,
        "qrst" + 4 * "<eos>": [False] * 2 + [True] * 3 + [False] * 3,
    }
    assert tokenizer.decode(evaluation.ids[0]) == "held" + 4 * "<eos>" and evaluation.counted.sum() == 5
    assert {record.text for record in training.records} == {"abc", "defghijklmnop", "st"}
    assert len(load([train], [held_out], tokenizer, packing=False, num_train=2)[0]) == 2


def test_a_prompt_that_fills_its_sequence_is_a_bad_record_without_packing(
    tmp_path: Path, tokenizer: Any, jsonl: Callable[..., Path]
) -> None:
    rows = [{"prompt": "12345678", "completion": "x"}, {"prompt": "1234567", "completion": "x"}]
    train, held_out = jsonl(tmp_path / "a.jsonl", rows), jsonl(tmp_path / "b.jsonl", [{"text": "held"}])
    with pytest.raises(UserError, match=r"a\.jsonl:1: nothing is to be predicted in its first 8 tokens"):
        load([train], [held_out], tokenizer, packing=False)
    training, _ = load([train], [held_out], tokenizer, packing=False, skip_bad=True)
    assert len(training) == len(training.records) == 1 and "a.jsonl:1" in training.skipped[1]
    with pytest.raises(UserError, match="no record that can be used"):
        load([jsonl(tmp_path / "c.jsonl", rows[:1])], [held_out], tokenizer, packing=False, skip_bad=True)


def test_of_a_chat_only_the_assistants_tokens_are_counted(
    tmp_path: Path, tokenizer: Any, jsonl: Callable[..., Path]
) -> None:
    chat = [("user", "Grüße"), ("assistant", "früh 日"), ("user", "so"), ("assistant", "ja")]
    rows = [{"messages": [{"role": role, "content": content} for role, content in chat]}]
    train, held_out = jsonl(tmp_path / "a.jsonl", rows), jsonl(tmp_path / "b.jsonl", [{"text": "held out"}])
    training, _ = load([train], [held_out], tokenizer, assistant_only=True, packing=False, length=90)
    said = training.ids[0][training.counted[0]].tolist()
    assert tokenizer.decode(said) == "<assistant> früh 日 <eos><assistant> ja <eos>"
    everything, _ = load([train], [held_out], tokenizer, packing=False, length=90)
    assert everything.ids.equal(training.ids) and everything.counted.sum() > len(said)


def test_bad_records_are_skipped_in_all_data_and_said_once(tmp_path: Path, tokenizer: Any) -> None:
    train, held_out = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    train.write_text('{"text": "abcdefghijk"}\n{\n')
    held_out.write_text('{"text": "0123456789"}\n{"text": ""}\n')
    training, evaluation = load([train], [held_out], tokenizer, skip_bad=True)
    assert training.skipped[0] == "2 bad records were skipped:" and evaluation.skipped == ()
    assert "a.jsonl:2" in training.skipped[1] and "b.jsonl:2" in training.skipped[2]
    general = load_general([str(held_out)], tokenizer, length=8, num=4, skip_bad=True)
    assert general.ids.tolist() == evaluation.ids.tolist() and len(general.skipped) == 2
    with pytest.raises(UserError, match=r"b\.jsonl:2: text is empty"):
        load_general([str(held_out)], tokenizer, length=8, num=4)
    held_out.write_text("{\n")
    with pytest.raises(UserError, match="hold no text") as caught:
        load_general([str(held_out)], tokenizer, length=8, num=4, skip_bad=True)
    assert "b.jsonl:1 is not valid JSON" in str(caught.value)


def test_a_token_that_the_model_does_not_know_is_refused(
    tmp_path: Path, tokenizer: Any, jsonl: Callable[..., Path]
) -> None:
    file = jsonl(tmp_path / "a.jsonl", [{"text": "0123456789"}])
    general = load_general([str(file)], tokenizer, length=8, num=4)
    largest = int(general.ids.max())
    general.check_vocabulary(largest + 1)
    with pytest.raises(UserError, match="tokens that the model does not know"):
        general.check_vocabulary(largest)


def test_what_was_read_is_hashed(tmp_path: Path, tokenizer: Any, jsonl: Callable[..., Path]) -> None:
    file = jsonl(tmp_path / "a.jsonl", [{"text": "0123456789"}])
    seen, expected = TrainedOn(), TrainedOn()
    load_general([str(file)], tokenizer, length=8, num=4).hash_into(seen)
    expected.add(["0123456789"])
    assert seen.hashes().tolist() == expected.hashes().tolist() and len(seen.hashes()) == 2


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


def test_general_text_is_taken_from_every_source_alike(
    tokenizer: Any, tmp_path: Path, jsonl: Callable[..., Path]
) -> None:
    """A long file read first would fill the pool that sequences are drawn from."""
    long, short = tmp_path / "long.txt", jsonl(tmp_path / "short.jsonl", [{"text": "b" * 20}] * 8)
    long.write_text("a" * 20_000)
    found = load_general([str(long), str(short)], tokenizer, length=8, num=9)
    letters = [{tokenizer.decode([token]) for token in row} & {"a", "b"} for row in found.ids.tolist()]
    assert letters.count({"a"}) == 4 and letters.count({"b"}) == 5
    assert {record.text[0] for record in found.records} == {"a", "b"}
