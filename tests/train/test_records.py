from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from selfspec_tune.errors import UserError
from selfspec_tune.train.records import BadRecord, Parser, Record, Skipped, make_parser, read_records

# A line of a file that is bad, and what is said of it.
BAD = [
    ("{broken", "is not valid JSON"),
    ("[1]", "is not a JSON object"),
    ("{}", "has no text"),
    ('{"body": "x"}', "has no text"),
    ('{"text": null}', "has no text"),
    ('{"prompt": "x"}', "has no text"),
    ('{"text": 7}', "text is not text"),
    ('{"text": ""}', "text is empty"),
    ('{"text": " \\n"}', "text is empty"),
    ('{"text": "half \\ud800"}', "text holds half a character"),
    ('{"messages": "hello"}', "not a list of messages"),
    ('{"messages": [{"role": "user"}]}', "not a list of messages"),
    ('{"messages": []}', "messages is empty"),
    ('{"messages": [{"role": "user", "content": " "}]}', "messages is empty"),
    ('{"messages": [{"role": "bad", "content": "x"}]}', "no such role"),
    ('{"prompt": "x", "completion": 1}', "completion is not text"),
    ('{"prompt": 0, "completion": "x"}', "prompt is not text"),
    ('{"prompt": "x", "completion": ""}', "completion is empty"),
]


def test_every_kind_of_record(tmp_path: Path, tokenizer: Any, jsonl: Callable[..., Path]) -> None:
    file = jsonl(
        tmp_path / "a.jsonl",
        [
            {"text": "plain"},
            {"prompt": "ask", "completion": "answer"},
            {"prompt": "", "completion": "answer"},
            {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]},
        ],
    )
    records = read_records(str(file), Parser(tokenizer))
    assert records == [
        Record("plain"),
        Record("answer", prompt="ask"),
        Record("answer"),
        Record("<user> hi <eos>\n<assistant> ho <eos>\n", templated=True),
    ]
    assert [record.where for record in records] == [f"{file}:{line}" for line in (1, 2, 3, 4)]
    assert [record.spans for record in records] == [None] * 4


def test_the_same_records_come_from_a_table(tmp_path: Path, tokenizer: Any) -> None:
    from datasets import Dataset

    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    rows = [{"text": None, "messages": chat}, {"text": "plain", "messages": None}]
    Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
    records = read_records(str(tmp_path / "a.parquet"), Parser(tokenizer))
    assert records == [Record("<user> hi <eos>\n<assistant> ho <eos>\n", templated=True), Record("plain")]
    Dataset.from_list([{"text": "fine"}, {"text": ""}]).to_parquet(tmp_path / "b.parquet")
    with pytest.raises(BadRecord, match=r"b\.parquet row 2: text is empty"):
        read_records(str(tmp_path / "b.parquet"), Parser(tokenizer))


def test_a_txt_file_is_one_document(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    assert read_records(str(tmp_path / "a.txt"), Parser(tokenizer)) == [Record("one\n\ntwo\n")]
    (tmp_path / "b.txt").write_text(" \n")
    with pytest.raises(BadRecord, match=r"b\.txt: the text is empty"):
        read_records(str(tmp_path / "b.txt"), Parser(tokenizer))


@pytest.mark.parametrize(("line", "complaint"), BAD)
def test_a_bad_record_is_named_by_file_and_line(tmp_path: Path, tokenizer: Any, line: str, complaint: str) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text('{"text": "fine"}\n\n' + line + "\n")
    with pytest.raises(UserError) as caught:
        read_records(str(file), make_parser(tokenizer))
    assert f"{file}:3" in str(caught.value) and complaint in str(caught.value)
    assert caught.value.command in ("--skip-bad-records", "--text-field FIELD")


def test_bytes_that_are_not_utf8_are_named_by_their_line(tmp_path: Path, tokenizer: Any) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_bytes(b'{"text": "fine"}\n{"text": "\xff"}\n')
    with pytest.raises(BadRecord, match=r"bad\.jsonl:2 is not valid JSON"):
        read_records(str(file), Parser(tokenizer))


def test_bad_records_can_be_skipped_and_are_listed(tmp_path: Path, tokenizer: Any) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text('{"text": "fine"}\n' + "".join(line + "\n" for line, _ in BAD) + '{"text": "fine too"}\n')
    parser = make_parser(tokenizer, skip_bad=True)
    assert read_records(str(file), parser) == [Record("fine"), Record("fine too")]
    first, *named, rest = parser.said()
    assert first == f"{len(BAD)} bad records were skipped:"
    assert len(named) == 5 and all(f"{file}:{n + 2}" in line and BAD[n][1] in line for n, line in enumerate(named))
    assert rest == f"  and {len(BAD) - 5} more"


def test_nothing_is_said_where_nothing_was_skipped(tokenizer: Any) -> None:
    assert Skipped().lines() == () and make_parser(tokenizer).said() == ()
    one = Skipped()
    one.add(BadRecord("a:1 has no text", got="fields x"))
    assert one.lines() == ("1 bad record was skipped:", "  a:1 has no text (got: fields x)")


def test_messages_without_a_template_are_refused_even_when_skipping(
    tmp_path: Path, tokenizer_maker: Callable[..., Any], jsonl: Callable[..., Path]
) -> None:
    bare = tokenizer_maker(tmp_path / "bare", chat_template=None)
    file = jsonl(tmp_path / "a.jsonl", [{"messages": [{"role": "user", "content": "hi"}]}])
    with pytest.raises(UserError, match="no chat template"):
        read_records(str(file), make_parser(bare, skip_bad=True))


def test_the_assistants_part_of_a_chat(tmp_path: Path, tokenizer: Any, jsonl: Callable[..., Path]) -> None:
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    file = jsonl(tmp_path / "a.jsonl", [{"messages": chat}, {"text": "plain"}, {"messages": chat[:1]}])
    parser = make_parser(tokenizer, assistant_only=True, skip_bad=True)
    said, plain = read_records(str(file), parser)
    # The template of the tests has no generation prompt: the turn begins with its role.
    assert said.spans is not None
    assert [said.text[start:end] for start, end in said.spans] == ["<assistant> ho <eos>"]
    assert plain.spans is None
    assert parser.said()[1:] == (f"  {file}:3: the assistant says nothing",)
    assert said.digest() == read_records(str(file), make_parser(tokenizer))[0].digest(), "the split must not change"


def test_the_assistants_part_needs_a_tokenizer_that_knows_places(tokenizer: Any) -> None:
    class Slow:
        is_fast = False

    with pytest.raises(UserError, match="needs a fast tokenizer"):
        make_parser(Slow(), assistant_only=True)
    make_parser(Slow())
