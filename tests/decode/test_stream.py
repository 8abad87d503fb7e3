"""Text as it grows."""

from __future__ import annotations

import pytest
from tiny import byte_tokenizer

from selfspec_tune.decode.stream import TextStream
from selfspec_tune.errors import UserError

TOKENIZER = byte_tokenizer()


def feed(text: str, stop: tuple[str, ...] = ()) -> tuple[TextStream, list[str]]:
    stream, shown = TextStream(TOKENIZER, [65], stop), []
    for token in TOKENIZER(text)["input_ids"]:
        stream.push(token)
        shown.append(stream.new_text())
        if stream.stopped:
            break
    shown.append(stream.finish())
    return stream, shown


def test_characters_come_whole():
    stream, shown = feed("aé€😀b")
    assert stream.text == "".join(shown) == "aé€😀b"
    assert [piece for piece in shown if piece] == ["a", "é", "€", "😀", "b"]


def test_an_incomplete_character_appears_at_the_end_only():
    stream = TextStream(TOKENIZER, [65])
    for token in (97, 0xE2, 0x82):
        stream.push(token)
    assert stream.new_text() == "a"
    assert stream.finish() == "\ufffd"


@pytest.mark.parametrize(
    "stop, kept", [(("END",), "one "), (("D\n", "xx"), "one EN"), (("é€",), "one END\n"), (("",), None)]
)
def test_stop_strings_across_tokens(stop, kept):
    text = "one END\né€ two"
    stream, shown = feed(text, stop)
    assert stream.stopped == (kept is not None)
    assert stream.text == "".join(shown) == (text if kept is None else kept)


def test_the_beginning_of_a_stop_string_is_held_back_until_it_is_decided():
    stream = TextStream(TOKENIZER, [65], ("</s>",))
    seen = []
    for character in "a</b</s>":
        stream.push(ord(character))
        seen.append(stream.new_text())
    assert seen == ["a", "", "", "</b", "", "", "", ""]
    assert stream.stopped and stream.text == "a</b"


def test_special_tokens_are_not_text():
    stream = TextStream(TOKENIZER, [65])
    stream.push(97)
    stream.push(TOKENIZER.eos_token_id)
    stream.finish()
    assert stream.text == "a"


def test_other_tokenizers_are_refused():
    with pytest.raises(UserError, match="backend"):
        TextStream(object(), [])


def test_a_prompt_that_ends_inside_a_character_does_not_leak_into_the_completion():
    stream = TextStream(TOKENIZER, [*TOKENIZER("hello ")["input_ids"], 0xE2])
    for token in TOKENIZER(" world")["input_ids"]:
        stream.push(token)
    stream.finish()
    assert stream.text == " world"
