"""Records become prompts with a domain and, where asked for, a reference answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny import byte_tokenizer

from selfspec_tune.config import SweepConfig
from selfspec_tune.errors import UserError
from selfspec_tune.sweep.confirm import CONFIRM_PROMPTS
from selfspec_tune.sweep.profile import Prompt
from selfspec_tune.sweep.prompts import read_prompts

USER, ANSWER = {"role": "user", "content": "ask"}, {"role": "assistant", "content": "reply"}


@pytest.fixture
def read(tmp_path: Path) -> Any:
    """Return a function (records, options) → prompts."""

    def prompts(records: list[dict[str, Any]], **options: Any) -> list[Prompt]:
        path = tmp_path / "prompts.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
        found, prompts = read_prompts(SweepConfig(prompts=path, **options), byte_tokenizer())
        assert found == records[: len(prompts)]
        return prompts

    return prompts


def test_a_field_names_the_domain(read: Any) -> None:
    records = [{"prompt": "a", "task": "code", "kind": "x"}, {"prompt": "b"}, {"prompt": "c", "task": 3}]
    assert [prompt.domain for prompt in read(records, raw=True)] == ["code", "", ""]
    assert [prompt.domain for prompt in read(records, raw=True, task_field="kind")] == ["x", "", ""]
    assert [prompt.answer_ids for prompt in read(records, raw=True)] == [None] * 3


def test_reference_answers_come_from_a_field_or_the_last_message(read: Any) -> None:
    records = [
        {"prompt": "a", "completion": "given", "gold": "other"},
        {"messages": [USER, ANSWER]},
        {"messages": [USER, ANSWER], "completion": "field first"},
    ]
    answers = [bytes(prompt.answer_ids) for prompt in read(records, source="reference")]
    assert answers == [b"given", b"reply", b"field first"]
    [first] = read(records[:1], source="reference", reference_field="gold", max_new_tokens=3, max_draft_tokens=1)
    assert bytes(first.answer_ids) == b"oth", "cut as a continuation is"
    assert b"reply" not in bytes(read(records[1:], source="reference")[0].request.prompt_ids)


@pytest.mark.parametrize(
    "record",
    [{"prompt": "a"}, {"prompt": "a", "completion": ""}, {"prompt": "a", "completion": 3}, {"messages": [USER]}],
)
def test_a_missing_answer_is_a_user_error(record: dict[str, Any], read: Any) -> None:
    with pytest.raises(UserError, match="record 2 has no reference answer in 'completion'") as caught:
        read([{"prompt": "a", "completion": "b"}, record], source="reference")
    assert "--reference-field" in str(caught.value.command)


def test_no_more_are_read_than_are_used(read: Any) -> None:
    records = [{"prompt": "a", "id": str(number)} for number in range(20)]
    assert len(read(records, num_prompts=4)) == 4 + CONFIRM_PROMPTS
