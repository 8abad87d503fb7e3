from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from selfspec_tune.train.chat import assistant_spans, render

PLAIN = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MARKED = (
    "{% for m in messages %}<{{ m['role'] }}>{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}<eos>{% endgeneration %}{% else %}{{ m['content'] }}<eos>{% endif %}\n"
    "{% endfor %}"
)
# Thoughts of past turns are left out, as Qwen3's template does.
FORGETFUL = (
    "{% for m in messages %}<{{ m['role'] }}>{% if m['role'] == 'assistant' and loop.last %}(hm){% endif %}"
    "{{ m['content'] }}<eos>\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
# Says how many messages there are: nothing rendered is how a longer conversation begins.
COUNTING = "{{ messages | length }}{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<eos>{% endfor %}"
SHOUTING = (
    "{% for m in messages %}<{{ m['role'] }}>{% if loop.last %}{{ m['content'] }}{% else %}{{ m['content'] | upper }}"
    "{% endif %}<eos>\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
NO_END_TOKEN = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def messages(*said: str) -> list[dict[str, Any]]:
    """User and assistant in turn; a first text that begins with "!" is the system's."""
    system = [{"role": "system", "content": said[0][1:]}] if said[0].startswith("!") else []
    rest = said[len(system) :]
    return system + [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(rest)]


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory, tokenizer_maker: Callable[..., Any]) -> Callable[..., list[str]]:
    """Return the parts of a conversation that the assistant says by some template."""
    tokenizer = tokenizer_maker(Path(tmp_path_factory.mktemp("chat")))

    def parts(template: str, conversation: list[dict[str, Any]]) -> list[str]:
        tokenizer.chat_template = template
        text = render(conversation, tokenizer)
        return [text[start:end] for start, end in assistant_spans(conversation, text, tokenizer)]

    return parts


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["by its beginnings", "by its markers"])
@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (("hi", "ho"), ["ho<eos>"]),
        (("!be kind", "hi", "ho", "what", "that"), ["ho<eos>", "that<eos>"]),
        (("ho", "ho", "ho", "<assistant>ho"), ["ho<eos>", "<assistant>ho<eos>"]),
        (("naïve 日本", "früh 日本語 🙂", "x"), ["früh 日本語 🙂<eos>"]),
        (("hi", " ho\n", "no answer"), [" ho\n<eos>"]),
    ],
)
def test_only_what_the_assistant_says(
    spoken: Callable[..., list[str]], template: str, said: tuple[str, ...], expected: list[str]
) -> None:
    assert spoken(template, messages(*said)) == expected


def test_white_space_without_an_end_token_is_the_end_of_the_turn(spoken: Callable[..., list[str]]) -> None:
    assert spoken(NO_END_TOKEN, messages("hi", "ho", "what", "that")) == ["ho\n", "that\n"]


def test_a_past_turn_may_be_written_without_its_thoughts(spoken: Callable[..., list[str]]) -> None:
    said = messages("hi", "ho", "what", "that")
    assert spoken(FORGETFUL, said) == ["ho<eos>", "(hm)that<eos>"]


@pytest.mark.parametrize(
    ("template", "said", "complaint"),
    [
        (COUNTING, ("hi", "ho"), "message 2, the assistant's, begins cannot be told"),
        (SHOUTING, ("HI", "ho", "HI", "ho"), "message 2, the assistant's, ends cannot be told"),
        (PLAIN, ("hi",), "the assistant says nothing"),
        (MARKED, ("hi",), "the assistant says nothing"),
        ("{{ raise_exception('not you') }}", ("hi", "ho"), "refuses these messages: not you"),
    ],
)
def test_what_cannot_be_told_is_an_error(
    spoken: Callable[..., list[str]], template: str, said: tuple[str, ...], complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        spoken(template, messages(*said))


def test_an_answer_before_any_question_is_an_error(spoken: Callable[..., list[str]]) -> None:
    with pytest.raises(ValueError, match="empty conversation"):
        spoken(PLAIN, [{"role": "assistant", "content": "hello"}])
