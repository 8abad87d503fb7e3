"""From a record or a text to prompt token ids: chat template, field names, errors that name the record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from selfspec_tune.config import PromptConfig
from selfspec_tune.decode.requests import Request
from selfspec_tune.errors import UserError
from selfspec_tune.files import read_jsonl
from selfspec_tune.trained_on import contents


def encode_text(tokenizer: Any, prompt: str, *, raw: bool) -> list[int]:
    """Turn one prompt into token ids: as a user's chat turn where the tokenizer has a chat template, else as it is."""
    prompt = prompt.encode("utf-8", "replace").decode("utf-8")  # a lone surrogate is no character
    if raw or not getattr(tokenizer, "chat_template", None):
        return list(tokenizer(prompt)["input_ids"])
    return encode_messages(tokenizer, [{"role": "user", "content": prompt}])


def encode_messages(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    """Turn chat messages into token ids, ready for the assistant's turn.

    Raises:
        UserError: the tokenizer has no chat template, a message has no role, or the template refuses the messages.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise UserError("these are chat messages, but the tokenizer has no chat template", command="--raw with prompts")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            allowed = '{"role": "user", "content": "..."}'
            raise UserError("a chat message needs a role and a content", got=str(message)[:200], allowed=allowed)
    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except Exception as error:  # a template is a program of the checkpoint's; whatever it raises is about the input
        raise UserError(f"the chat template refuses these messages: {error}", got=str(messages)[:200]) from None
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def read_requests(
    path: Path,
    tokenizer: Any,
    config: PromptConfig,
    *,
    max_new_tokens: int,
    stop: tuple[str, ...] = (),
    limit: int | None = None,
) -> tuple[list[dict[str, Any]], list[Request]]:
    """Read prompts from a JSONL file.

    A record holds a text in `config.prompt_field` or chat messages in `config.messages_field`; a last assistant
    message is the answer to be written and is left out. Ids default to the record's number in the file, from 0.

    Returns:
        the records as they are, and a request for each.

    Raises:
        UserError: no records, or a record without a usable prompt; the message names file and record.
    """
    records = read_jsonl(path)[:limit]
    if not records:
        raise UserError(f"{path} holds no records", allowed='lines such as {"prompt": "..."}')
    requests, seen = [], set()
    for number, record in enumerate(records):
        request_id = str(record.get(config.id_field, number))
        if request_id in seen:
            raise UserError(
                f"{path}: two records have the same {config.id_field}", got=request_id, command="--id-field FIELD"
            )
        seen.add(request_id)
        messages, prompt = _messages(record, config), record.get(config.prompt_field)
        if messages is not None:
            ids = encode_messages(tokenizer, messages)
        elif isinstance(prompt, str):
            ids = encode_text(tokenizer, prompt, raw=config.raw)
        else:
            unused = config.raw and record.get(config.messages_field)
            raise UserError(
                f"{path}: record {number + 1} has no text in {config.prompt_field!r} "
                f"and no messages in {config.messages_field!r}",
                got=", ".join(record) or "an empty record",
                command="no --raw" if unused else "--prompt-field NAME or --messages-field NAME",
            )
        if not ids:
            raise UserError(f"{path}: record {number + 1} has an empty prompt", allowed="at least one token")
        requests.append(Request(request_id, ids, max_new_tokens, stop))
    return records, requests


def prompt_text(record: dict[str, Any], config: PromptConfig) -> str:
    """Return what the prompt of a record says: its text, or what its messages say, the system's left out."""
    messages = _messages(record, config)
    return str(record.get(config.prompt_field, "")) if messages is None else "\n".join(contents(messages))


def _messages(record: dict[str, Any], config: PromptConfig) -> list[Any] | None:
    """Return the chat messages to be answered; None where the prompt is a text."""
    messages = record.get(config.messages_field)
    if config.raw or not isinstance(messages, list) or not messages:
        return None
    last = messages[-1]
    return messages[:-1] if isinstance(last, dict) and last.get("role") == "assistant" else messages
