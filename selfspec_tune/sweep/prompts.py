"""From records to prompts with their domain and, where asked for, a reference answer."""

from __future__ import annotations

from typing import Any

from selfspec_tune.config import SweepConfig, flag
from selfspec_tune.decode.prompts import read_requests
from selfspec_tune.errors import UserError
from selfspec_tune.sweep.confirm import CONFIRM_PROMPTS
from selfspec_tune.sweep.profile import Prompt


def read_prompts(config: SweepConfig, tokenizer: Any) -> tuple[list[dict[str, Any]], list[Prompt]]:
    """Read the records of `config.prompts`, at most as many as are profiled and confirmed with.

    Returns:
        the records as they are, and a prompt for each.

    Raises:
        UserError: a bad file or record, or no reference answer where one is needed.
    """
    assert config.prompts is not None
    limit = config.num_prompts + CONFIRM_PROMPTS
    records, requests = read_requests(
        config.prompts, tokenizer, config, max_new_tokens=config.max_new_tokens, limit=limit
    )
    prompts = []
    for number, (record, request) in enumerate(zip(records, requests, strict=True), start=1):
        domain = record.get(config.task_field)
        answer = _answer_ids(config, tokenizer, record, number) if config.source == "reference" else None
        prompts.append(Prompt(request, domain if isinstance(domain, str) else "", answer))
    return records, prompts


def _answer_ids(config: SweepConfig, tokenizer: Any, record: dict[str, Any], number: int) -> tuple[int, ...]:
    messages, text = record.get(config.messages_field), record.get(config.reference_field)
    if not isinstance(text, str) and isinstance(messages, list) and messages and isinstance(messages[-1], dict):
        text = messages[-1].get("content") if messages[-1].get("role") == "assistant" else None
    if not isinstance(text, str) or not text:
        raise UserError(
            f"{config.prompts}: record {number} has no reference answer in {config.reference_field!r}",
            got=", ".join(record) or "an empty record",
            allowed="a text there, or chat messages that end with the assistant's",
            command=f"{flag('reference_field')} NAME, or --source generated",
        )
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"][: config.max_new_tokens])
