"""Chat messages as text, and which part of the text the assistant says. Knows nothing of files and sequences."""

from __future__ import annotations

import re
from typing import Any

Span = tuple[int, int]
"""Start and end of characters, the end excluded."""

# What marks the assistant's part in a template that says so itself.
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


def render(messages: list[dict[str, Any]], tokenizer: Any, *, ask: bool = False) -> str:
    """Return messages as the chat template writes them; `ask`: up to where the assistant would go on.

    Raises:
        ValueError: the template refuses the messages; it may do so with an exception of any class.
    """
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=ask))
    except Exception as error:
        raise ValueError(f"the chat template refuses these messages: {error}") from None


def assistant_spans(messages: list[dict[str, Any]], text: str, tokenizer: Any) -> tuple[Span, ...]:
    """Return which characters of rendered messages the assistant says, its end-of-turn token included.

    A template may mark them with {% generation %}. Otherwise the conversation is rendered up to each of the assistant's
    turns and up to its end; both must be how the whole begins.

    Args:
        messages: a conversation.
        text: the same, rendered.
        tokenizer: a fast one: it must know which characters a token stands for.

    Raises:
        ValueError: the assistant says nothing, or the template writes a turn differently once others follow.
    """
    if _GENERATION.search(tokenizer.get_chat_template()):
        spans = _marked(messages, tokenizer)
    else:
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        spans = [_turn(messages, index, text, tokenizer) for index in turns]
    spans = [(start, end) for start, end in spans if text[start:end].strip()]
    if not spans:
        raise ValueError("the assistant says nothing")
    return tuple(spans)


def _marked(messages: list[dict[str, Any]], tokenizer: Any) -> list[Span]:
    found = tokenizer.apply_chat_template(
        messages,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
        tokenizer_kwargs={"return_offsets_mapping": True, "verbose": False},
    )
    spans: list[Span] = []
    before = 0
    for (start, end), said in zip(found["offset_mapping"], found["assistant_masks"], strict=True):
        if said and before:
            spans[-1] = (spans[-1][0], end)
        elif said:
            spans.append((start, end))
        before = said
    return spans


def _turn(messages: list[dict[str, Any]], index: int, text: str, tokenizer: Any) -> Span:
    asked = render(messages[:index], tokenizer, ask=True)
    if not text.startswith(asked):
        raise ValueError(
            f"where message {index + 1}, the assistant's, begins cannot be told: the chat template has no generation "
            "markers and writes the messages before it differently when it is asked for an answer"
        )
    answered = render(messages[: index + 1], tokenizer)
    if text.startswith(answered):
        return len(asked), _without_space_after_end(answered, tokenizer)
    # Some templates write a past turn without its thoughts; what it says is still there, and comes first.
    said = messages[index]["content"].strip()
    rest = text[len(asked) :].lstrip()
    if not said or not rest.startswith(said):
        raise ValueError(
            f"where message {index + 1}, the assistant's, ends cannot be told: the chat template has no generation "
            "markers and writes it differently once others follow"
        )
    end = len(text) - len(rest) + len(said)
    token = next((token for token in tokenizer.all_special_tokens if text.startswith(token, end)), "")
    return len(asked), end + len(token)


def _without_space_after_end(text: str, tokenizer: Any) -> int:
    """Return the length without white space behind an end-of-turn token: nobody is asked to say that."""
    stripped = text.rstrip()
    return len(stripped) if stripped.endswith(tuple(tokenizer.all_special_tokens)) else len(text)
