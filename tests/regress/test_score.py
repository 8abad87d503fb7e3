"""Both models' scores are what plain forwards of both give, though only one of them is there at a time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import tiny_model

from selfspec_tune.errors import UserError
from selfspec_tune.model.load import load_model
from selfspec_tune.progress import silent
from selfspec_tune.regress import score
from selfspec_tune.regress.documents import Document

LENGTHS = ((2,), (5, score.HEAD_CHUNK + 1), (2 * score.HEAD_CHUNK + 7,))


@pytest.fixture(scope="module")
def documents() -> list[Document]:
    generator = torch.Generator().manual_seed(0)
    return [Document([torch.randint(256, (n,), generator=generator) for n in lengths]) for lengths in LENGTHS]


def test_scores_are_those_of_plain_forwards(checkpoint: Path, documents: list[Document]) -> None:
    trained, base = load_model(str(checkpoint)), tiny_model(seed=3)
    calls: list[tuple[str, int, int]] = []
    kept = score.score_trained(trained, documents, lambda *call: calls.append(call))
    assert calls == [("perplexity of the model", done, 4) for done in (1, 2, 3, 4)]
    del trained
    found = score.score_base(base, documents, kept, lambda *call: calls.append(call))
    assert calls[4:] == [("perplexity of the base", done, 4) for done in (1, 2, 3, 4)]

    expected = torch.zeros(3, 4, dtype=torch.float64)
    trained = load_model(str(checkpoint))
    for index, document in enumerate(documents):
        for window in document.windows:
            p, q = (m(input_ids=window[None]).logits[0, :-1].double().log_softmax(-1) for m in (base, trained))
            expected[index, 0] -= q.gather(1, window[1:, None]).sum()
            expected[index, 1] -= p.gather(1, window[1:, None]).sum()
            expected[index, 2] += torch.nn.functional.kl_div(q, p, log_target=True, reduction="sum")
            expected[index, 3] += (p.argmax(-1) == q.argmax(-1)).sum()
    given = torch.stack([found.trained, found.base, found.kl, found.agreeing], 1)
    assert given.dtype == torch.float64
    torch.testing.assert_close(given, expected.detach(), rtol=1e-5, atol=0)
    assert found.counts.tolist() == [1.0, 4.0 + score.HEAD_CHUNK, 2 * score.HEAD_CHUNK + 6]
    assert found.part(1, 3).kl.tolist() == found.kl[1:].tolist()


def test_a_head_with_a_bias_is_kept_whole(documents: list[Document]) -> None:
    model = tiny_model(seed=4)
    head = torch.nn.Linear(96, model.config.vocab_size, bias=True)
    torch.nn.init.normal_(head.bias, std=3.0)
    model.set_output_embeddings(head)
    kept = score.score_trained(model, documents, silent)
    same = score.score_base(model, documents, kept, silent)
    assert torch.equal(same.trained, same.base) and torch.equal(same.agreeing, same.counts)
    assert same.kl.tolist() == [0.0, 0.0, 0.0], "the same weights differ by exactly nothing"


def test_an_unknown_token_is_refused(checkpoint: Path) -> None:
    with pytest.raises(UserError, match="does not know"):
        score.score_trained(load_model(str(checkpoint)), [Document([torch.tensor([1, 5000])])], silent)
