"""What is counted of texts and of the model's own answers."""

from __future__ import annotations

import pytest
from tiny import END, byte_tokenizer, tiny_model
from tokenizers.processors import TemplateProcessing

from selfspec_tune.decode.engine import Engine
from selfspec_tune.decode.own_text import own_tokens, text_tokens
from selfspec_tune.decode.requests import Request
from selfspec_tune.decode.sampling import SamplingParams
from selfspec_tune.errors import UserError
from selfspec_tune.model.decoder import LayeredDecoder


def test_a_text_is_counted_as_it_is():
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<end> $A <end>", special_tokens=[("<end>", END)])
    assert tokenizer("ab")["input_ids"] == [END, 97, 98, END]
    assert list(text_tokens(tokenizer, ["ab", "", "c<end>"])) == [[97, 98], [], [99, END]]


def test_answers_are_the_emitted_tokens_without_the_prompt():
    engine = Engine(LayeredDecoder(tiny_model()), end_tokens=(END,), numerics="fast")
    requests = [Request(str(n), [n, n + 1, n + 2], 10) for n in range(3)]
    told: list[tuple[int, int]] = []
    found = list(own_tokens(engine, requests, lambda stage, done, total: told.append((done, total))))
    assert found == [engine.generate([request], SamplingParams())[0][0].token_ids for request in requests]
    assert told == [(1, 3), (2, 3), (3, 3)]


def test_a_prompt_too_long_is_refused_before_the_first_is_decoded(monkeypatch):
    engine = Engine(LayeredDecoder(tiny_model()), numerics="fast")
    decoded: list[object] = []
    monkeypatch.setattr(engine, "generate", lambda *arguments: decoded.append(arguments))
    with pytest.raises(UserError, match="request long"):
        list(own_tokens(engine, [Request("a", [1], 5), Request("long", [1] * 2000, 5)]))
    assert decoded == []
