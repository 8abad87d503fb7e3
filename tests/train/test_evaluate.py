"""What an evaluation says of a model: perplexity as transformers has it, and alpha counted by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from selfspec_tune.errors import UserError
from selfspec_tune.progress import silent
from selfspec_tune.speedup import best_estimate
from selfspec_tune.train.data import Sequences
from selfspec_tune.train.evaluate import Evaluator, assumed_costs
from selfspec_tune.train.module import EarlyExitModule

EXITS = (1, 3)


@pytest.fixture(scope="module")
def model(tiny: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()


def text(seed: int, count: int) -> Sequences:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 257, (count, 24), generator=generator, dtype=torch.int32)
    return Sequences(ids, torch.rand(count, 24, generator=generator) < 0.7)


def reference(model: Any, data: Sequences) -> tuple[float, list[float]]:
    """Return perplexity and alpha per exit from transformers' own hidden states."""
    with torch.no_grad():
        out = model(data.ids.long(), output_hidden_states=True)
        early = [model.lm_head(model.model.norm(out.hidden_states[e]))[:, :-1].argmax(-1) for e in EXITS]
    counted = data.counted[:, 1:]
    nll = F.cross_entropy(out.logits[:, :-1][counted], data.ids[:, 1:][counted].long())
    best = out.logits[:, :-1].argmax(-1)
    return math.exp(nll), [float((each == best)[counted].double().mean()) for each in early]


def evaluator(model: Any, **changes: Any) -> Evaluator:
    costs = assumed_costs(model, EXITS)
    return replace(Evaluator(text(1, 5), text(2, 3), EXITS, costs, 2, torch.device("cpu"), silent), **changes)


def test_perplexity_of_both_texts_and_alpha_are_those_of_transformers(model: Any) -> None:
    module = EarlyExitModule(model).train()
    own = evaluator(model)
    record = own.measure(module)
    perplexity, alpha = reference(model, own.held_out)
    assert record["perplexity"] == pytest.approx(perplexity, rel=1e-5)
    assert record["alpha"] == pytest.approx(dict(zip(map(str, EXITS), alpha, strict=True)))
    assert own.general is not None
    assert record["general_perplexity"] == pytest.approx(reference(model, own.general)[0], rel=1e-5)
    assert module.training, "measuring leaves the module as it was"


def test_without_general_text_nothing_is_said_of_it(model: Any) -> None:
    assert "general_perplexity" not in evaluator(model, general=None).measure(EarlyExitModule(model))


def test_the_estimate_is_the_best_cell_of_the_measured_alpha(model: Any) -> None:
    own = evaluator(model)
    record = own.measure(EarlyExitModule(model))
    alpha = {int(layer): value for layer, value in record["alpha"].items()}
    assert record["speedup_estimate"] == best_estimate(alpha, own.cost_ratio).to_dict()


def test_progress_counts_the_sequences_of_both_texts(model: Any) -> None:
    seen: list[tuple[str, int, int]] = []
    evaluator(model, progress=lambda *said: seen.append(said)).measure(EarlyExitModule(model))
    assert seen == [("evaluate", done, 8) for done in (2, 4, 5, 7, 8)]


def test_text_without_a_token_to_predict_is_a_user_error(model: Any) -> None:
    empty = replace(text(1, 2), counted=torch.zeros(2, 24, dtype=torch.bool))
    with pytest.raises(UserError, match="no token to predict"):
        evaluator(model, held_out=empty).measure(EarlyExitModule(model))


def test_costs_are_shares_of_the_weights_read(model: Any) -> None:
    # The tiny model: 4 layers of 32·(32+16+16+32) + 3·32·48 + 2·32 weights, a head of 288·32.
    layer, head = 32 * 96 + 3 * 32 * 48 + 64, 288 * 32
    costs = assumed_costs(model, EXITS)
    assert costs == pytest.approx({e: (e * layer + head) / (4 * layer + head) for e in EXITS})
    more = assumed_costs(model, (1,), extra_layers=1)
    assert more[1] == pytest.approx((2 * layer + head) / (4 * layer + head))
