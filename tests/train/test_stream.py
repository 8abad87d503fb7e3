"""A stream gives every record once an epoch, keeps held-out ones back, and goes on bit for bit where it was."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from selfspec_tune.errors import UserError
from selfspec_tune.train.data import HELD_OUT_ONE_IN, Sequences
from selfspec_tune.train.packing import Layout
from selfspec_tune.train.records import Record, make_parser, read_records
from selfspec_tune.train.stream import Stream, open_stream
from selfspec_tune.trained_on import TrainedOn

ROOT = Path(__file__).parents[2]


def chat(number: int) -> dict[str, Any]:
    turns = [("user", f"question {number}?"), ("assistant", f"answer {number} " * (1 + number % 3))]
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


@pytest.fixture
def files(tmp_path: Path, jsonl: Callable[..., Path]) -> tuple[str, str, str]:
    """Two files to train on, of 30 texts and of 20 chats, and a held-out one."""
    texts = jsonl(tmp_path / "texts.jsonl", [{"text": f"text {number} " * (1 + number % 4)} for number in range(30)])
    chats = jsonl(tmp_path / "chats.jsonl", [chat(number) for number in range(20)])
    return (
        str(texts),
        str(chats),
        str(jsonl(tmp_path / "held.jsonl", [{"text": "held out " * 9}, {"text": "text 3 " * 4}])),
    )


@pytest.fixture
def open_files(files: tuple[str, str, str], tokenizer: Any) -> Callable[..., tuple[Stream, Sequences]]:
    def make(**options: Any) -> tuple[Stream, Sequences]:
        train = options.pop("train", files[:2])
        held_out = options.pop("held_out", files[2:])
        return open_stream(train, held_out, tokenizer, **{"length": 24, "num_eval": 4, "block": 8, **options})

    return make


Open = Callable[..., tuple[Stream, Sequences]]


def batches(stream: Stream, first: int, last: int, count: int = 2) -> list[torch.Tensor]:
    """Return batches `first .. last - 1`, ids and counted stacked."""
    step = stream.ranks * count
    starts = [number * step + stream.rank * count for number in range(first, last)]
    return [torch.stack([part.long() for part in stream.batch(start, count, seed=0)]) for start in starts]


def test_an_epoch_has_every_record_once_and_no_held_out_one(open_files: Open, tokenizer: Any) -> None:
    stream, held_out = open_files(length=200, packing=False)
    ids = torch.cat([batch[0] for batch in batches(stream, 0, 49, count=1)])
    texts = [tokenizer.decode(row.tolist()).strip("<eos>\n") for row in ids]
    assert stream.rows.epoch == 0 and len(set(texts)) == 49
    assert sum("question" in text for text in texts) == 20
    assert not any(text.strip() == ("text 3 " * 4).strip() for text in texts)
    assert {record.text for record in held_out.records} == {"held out " * 9, "text 3 " * 4}
    stream.batch(49, 1, seed=0)
    assert stream.rows.epoch == 1


def test_records_lie_in_the_stream_one_behind_the_other(
    open_files: Open, files: tuple[str, str, str], tokenizer: Any
) -> None:
    stream, evaluation = open_files(assistant_only=True)
    found = torch.cat([batch.flatten(1) for batch in batches(stream, 0, 40)], dim=1)
    assert evaluation.ids.shape[1] == 24 and stream.rows.epoch == 1
    tokens, counted = "".join(map(chr, found[0].tolist())), found[1].bool().tolist()
    layout, parser = Layout(tokenizer, 24), make_parser(tokenizer, assistant_only=True)
    for record in [record for file in files[:2] for record in read_records(file, parser)]:
        ids, said = layout.tokenize(record)
        at = tokens.find("".join(map(chr, ids)))
        assert (at < 0) == (record.text == "text 3 " * 4)
        assert at < 0 or counted[at : at + len(ids)] == said


CASES: dict[str, dict[str, Any]] = {
    "packed": {},
    "padded": {"packing": False},
    "assistant only": {"assistant_only": True},
    "long sequences": {"length": 100},
    "short sequences": {"length": 5},
    "one block": {"block": 1000},
    "split by hash": {"held_out": ()},
}


@pytest.mark.parametrize("rank", [None, 0, 1])
@pytest.mark.parametrize("case", CASES)
def test_ten_and_ten_batches_are_twenty_bit_for_bit(
    open_files: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, rank: int | None
) -> None:
    if case == "split by hash":
        monkeypatch.setattr("selfspec_tune.train.data.HELD_OUT_ONE_IN", 5)
    options = {**CASES[case], **({} if rank is None else {"rank": rank, "ranks": 2})}
    monkeypatch.setattr(Stream, "_of_all_ranks", lambda self, own: [own] * self.ranks)
    straight, _ = open_files(**options)
    expected = batches(straight, 0, 20)
    for before in (0, 1, 10, 17):
        stream, _ = open_files(**options)
        batches(stream, 0, before)
        torch.save(stream.state_dict(), tmp_path / "state")
        again, _ = open_files(**options)
        again.load_state_dict(torch.load(tmp_path / "state", weights_only=False))
        for found, wanted in zip(batches(again, before, 20), expected[before:], strict=True):
            assert found.equal(wanted)
        assert again.seen.hashes().tolist() == straight.seen.hashes().tolist()
    assert case == "short sequences" or straight.rows.epoch > 0 or straight.rows.number > 0 or case == "one block"


def test_a_stream_of_a_table_goes_on_where_it_was(
    open_files: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from datasets import Dataset

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "set").mkdir()
    for part in range(3):
        rows = [{"text": f"part {part} text {number}"} for number in range(7)]
        Dataset.from_list(rows).to_parquet(tmp_path / "set" / f"train-{part:05d}-of-00003.parquet")
    train = (str(tmp_path / "set"), str(tmp_path / "set" / "train-00001-of-00003.parquet"))
    expected = batches(open_files(train=train)[0], 0, 20)
    stream, _ = open_files(train=train)
    batches(stream, 0, 10)
    again, _ = open_files(train=train)
    again.load_state_dict(stream.state_dict())
    assert all(a.equal(b) for a, b in zip(batches(again, 10, 20), expected[10:], strict=True))
    assert again.rows.epoch > 0


def test_ranks_read_different_records(open_files: Open, tokenizer: Any) -> None:
    read: list[set[str]] = []
    for rank in range(2):
        stream, _ = open_files(rank=rank, ranks=2, length=200, packing=False)
        rows = torch.cat([batch[0] for batch in batches(stream, 0, 24, count=1)])
        read.append({tokenizer.decode(row.tolist()) for row in rows})
        assert stream.rows.epoch == 0
    assert not read[0] & read[1] and len(read[0] | read[1]) == 48


PROGRAM = """
import sys
import torch
from transformers import AutoTokenizer
from selfspec_tune.train.stream import open_stream
from selfspec_tune.trained_on import TrainedOn
torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
model, texts, held, state = sys.argv[1:]
def fresh():
    return open_stream((texts,), (held,), AutoTokenizer.from_pretrained(model), length=24, num_eval=4, block=8,
                       rank=rank, ranks=2)[0]
def read(stream, first, last):
    return [stream.batch(n * 4 + rank * 2, 2, seed=0)[0] for n in range(first, last)]
straight = read(fresh(), 0, 20)
stream = fresh()
read(stream, 0, 10)
saved = stream.state_dict()
if rank == 0:
    torch.save(saved, state)
torch.distributed.barrier()
again = fresh()
again.load_state_dict(torch.load(state, weights_only=False))
assert all(a.equal(b) for a, b in zip(read(again, 10, 20), straight[10:], strict=True))
seen = TrainedOn()
again.hash_into(seen)
if rank == 1:
    torch.save([seen.hashes().tolist(), torch.stack(straight).tolist()], state + ".read")
torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""


def test_two_processes_have_one_state_and_one_list_of_what_was_read(
    files: tuple[str, str, str], tiny: Path, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)]
    arguments = [str(tiny), files[0], files[2], str(tmp_path / "state")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    done = subprocess.run([*command, *arguments], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    hashes, _ = torch.load(tmp_path / "state.read", weights_only=False)
    expected = TrainedOn()
    for line in Path(files[0]).read_text().splitlines():
        if json.loads(line)["text"] != "text 3 " * 4:
            expected.add([json.loads(line)["text"]])
    assert hashes == expected.hashes().tolist()


def test_the_split_by_hash_is_that_of_data_read_at_once(
    tmp_path: Path, tokenizer: Any, jsonl: Callable[..., Path]
) -> None:
    texts = [f"record number {number}" for number in range(400)]
    file = str(jsonl(tmp_path / "a.jsonl", [{"text": text} for text in texts]))
    held = {text for text in texts if Record(text).digest() % HELD_OUT_ONE_IN == 0}
    found = []
    for block in (7, 1000):
        stream, evaluation = open_stream((file,), (), tokenizer, length=32, num_eval=100, packing=False, block=block)
        assert {record.text for record in evaluation.records} == held
        rows = torch.cat([batch[0] for batch in batches(stream, 0, 400 - len(held), count=1)])
        shown = {tokenizer.decode(row.tolist()).removesuffix("<eos>").strip("<eos>") for row in rows}
        assert stream.rows.epoch == 0 and len(shown) == 400 - len(held) and not shown & held
        found.append(evaluation.ids)
    assert found[0].equal(found[1])


def test_no_more_is_read_for_the_held_out_part_than_it_needs(
    tmp_path: Path, tokenizer: Any, jsonl: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from selfspec_tune.train import shuffle, stream

    monkeypatch.setattr(shuffle, "BLOCK_CHARACTERS", 2000)
    read = []
    rows = shuffle.ShuffledRows.next
    monkeypatch.setattr(stream.ShuffledRows, "next", lambda self: read.append(0) or rows(self))
    file = str(jsonl(tmp_path / "a.jsonl", [{"text": f"record number {number}"} for number in range(5000)]))
    _, evaluation = open_stream((file,), (), tokenizer, length=16, num_eval=2)
    assert len(evaluation) == 2 and len(read) < 600  # 4 held-out records of about 200


def test_a_bad_record_is_named_or_skipped_and_counted_once(
    open_files: Open, files: tuple[str, str, str], tmp_path: Path
) -> None:
    file = Path(files[0])
    file.write_text('{"text": 7}\n' + file.read_text() + "{\n")
    with pytest.raises(UserError, match=r"texts\.jsonl:(1|32)") as caught:
        batches(open_files(train=files[:1])[0], 0, 40)
    assert caught.value.command == "--skip-bad-records"
    stream, _ = open_files(train=files[:1], skip_bad=True)
    batches(stream, 0, 40)
    assert stream.rows.epoch > 1
    first, *named = stream.skipped
    assert first == "2 bad records were skipped:"
    assert {line.split(" ")[2].removesuffix(":") for line in named} == {f"{file}:1", f"{file}:32"}
    again, _ = open_files(train=files[:1], skip_bad=True)
    again.load_state_dict(stream.state_dict())
    assert again.skipped == stream.skipped


def test_data_without_a_record_to_train_on_are_refused(
    open_files: Open, files: tuple[str, str, str], tmp_path: Path, jsonl: Callable[..., Path]
) -> None:
    with pytest.raises(UserError, match="no training record is left"):
        batches(open_files(train=files[2:])[0], 0, 1)
    short = str(jsonl(tmp_path / "short.jsonl", [{"prompt": "p" * 30, "completion": "c"}] * 3))
    with pytest.raises(UserError, match=r"short\.jsonl:\d: nothing is to be predicted"):
        batches(open_files(train=(short,), packing=False)[0], 0, 1)
    with pytest.raises(UserError, match="no training record is left") as caught:
        batches(open_files(train=(short,), packing=False, skip_bad=True)[0], 0, 1)
    assert "3 bad records were skipped" in str(caught.value)
    with pytest.raises(UserError, match="held-out share"):
        open_files(train=(short,), held_out=())
    with pytest.raises(UserError, match=r"missing\.jsonl does not exist"):
        open_files(train=(str(tmp_path / "missing.jsonl"),))


def test_a_stream_is_read_in_order_only(open_files: Open) -> None:
    stream, _ = open_files()
    stream.batch(0, 2, seed=0)
    with pytest.raises(ValueError, match="not at 0"):
        stream.batch(0, 2, seed=0)


def test_a_token_that_the_model_does_not_know_is_refused(open_files: Open) -> None:
    stream, _ = open_files()
    stream.check_vocabulary(2)
    with pytest.raises(UserError, match="tokens that the model does not know"):
        stream.batch(0, 2, seed=0)


def test_files_of_another_size_are_other_data(open_files: Open, files: tuple[str, str, str]) -> None:
    before = open_files()[0].digest()
    assert open_files()[0].digest() == before
    with Path(files[0]).open("a") as handle:
        handle.write('{"text": "one more"}\n')
    assert open_files()[0].digest() != before
