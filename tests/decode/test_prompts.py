"""From records to token ids."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny import byte_tokenizer

from selfspec_tune.config import PromptConfig
from selfspec_tune.decode.prompts import encode_text, read_requests
from selfspec_tune.errors import UserError

TOKENIZER = byte_tokenizer()


def write(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def texts(path: Path, limit: int | None = None, **settings) -> list[str]:
    _, requests = read_requests(path, TOKENIZER, PromptConfig(**settings), max_new_tokens=5, limit=limit)
    return [TOKENIZER.decode(request.prompt_ids) for request in requests]


def test_chat_template_and_raw():
    assert TOKENIZER.decode(encode_text(TOKENIZER, "hi", raw=False)) == "[user]hi\n[assistant]"
    assert TOKENIZER.decode(encode_text(TOKENIZER, "hi", raw=True)) == "hi"


def test_fields_ids_and_chats(tmp_path):
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "the answer"}]
    path = write(tmp_path / "p.jsonl", {"id": "x", "prompt": "a"}, {"messages": chat}, {"prompt": "c"})
    assert texts(path) == ["[user]a\n[assistant]", "[user]q\n[assistant]", "[user]c\n[assistant]"]
    assert texts(path, limit=1, raw=True) == ["a"]
    _, requests = read_requests(path, TOKENIZER, PromptConfig(), max_new_tokens=5)
    assert [request.id for request in requests] == ["x", "1", "2"]
    other = write(tmp_path / "q.jsonl", {"question": "why"})
    assert texts(other, prompt_field="question", raw=True) == ["why"]


@pytest.mark.parametrize(
    "records, match",
    [
        ([], "no records"),
        ([{"text": "a"}], "record 1 has no text in 'prompt'"),
        ([{"prompt": "a"}, {"prompt": 3}], "record 2"),
        ([{"id": 1, "prompt": "a"}, {"id": "1", "prompt": "b"}], "same id"),
        ([{"messages": [{"role": "user", "content": "a"}, 4]}], "chat message"),
    ],
)
def test_bad_records_are_named(tmp_path, records, match):
    with pytest.raises(UserError, match=match):
        texts(write(tmp_path / "p.jsonl", *records))


def test_an_empty_prompt_is_named(tmp_path):
    with pytest.raises(UserError, match="record 1 has an empty prompt"):
        texts(write(tmp_path / "p.jsonl", {"prompt": ""}), raw=True)


def test_lines_that_are_not_json_are_named(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": \n')
    with pytest.raises(UserError, match=r"p\.jsonl:2"):
        texts(path)
