"""General text on which the final layer is held to the base: a pass of its own at every step."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from selfspec_tune.config import TrainConfig
from selfspec_tune.errors import UserError
from selfspec_tune.train.loop import train
from selfspec_tune.train.module import EarlyExitModule
from selfspec_tune.train.step import Update
from selfspec_tune.train.texts import load_texts

Make = Callable[..., TrainConfig]


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory, jsonl: Callable[..., Path]) -> Path:
    """General text, unlike the corpus."""
    file = tmp_path_factory.mktemp("general") / "digits.jsonl"
    return jsonl(file, [{"text": f"{n * 7919:010d} " * 6} for n in range(400)])


def steps(output: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if "losses" in record]


@pytest.mark.parametrize("extra", [{}, {"lora_rank": 4, "learning_rate": 3e-2}], ids=["full weights", "adapters"])
def test_the_anchor_keeps_general_text_as_the_base_has_it(
    make_config: Make, tmp_path: Path, digits: Path, extra: dict[str, Any]
) -> None:
    options = {"max_steps": 30, "learning_rate": 3e-3, "layer_dropout": 0.0, "eval_every": 100, "eval_sequences": 8}
    options = {**options, **extra, "max_perplexity_increase": "100000%", "general_data": (str(digits),)}
    free = train(make_config(output=tmp_path / "free", **options))
    held = train(make_config(output=tmp_path / "held", **options, anchor_data=(str(digits),), anchor_data_weight=3.0))
    moved = [abs(facts["perplexity_increase"]["general"]) for facts in (free, held)]
    assert moved[1] < 0.5 * moved[0]
    first, *rest = steps(tmp_path / "held")
    # Untrained adapters, and a model before its first update, are the base.
    assert abs(first["losses"]["anchor_data"]) < 1e-5 < max(record["losses"]["anchor_data"] for record in rest)
    final, *exits = (value for name, value in first["losses"].items() if name != "anchor_data")
    assert first["loss"] == pytest.approx(0.5 * final + 0.5 * sum(exits) / len(exits), rel=1e-4)


@pytest.mark.parametrize("many", [1, 3])
def test_a_step_adds_up_the_gradients_of_both_passes(
    model_maker: Callable[..., Any], tmp_path: Path, many: int
) -> None:
    """The total is mean(training batches) + weight * KL(base || model), whatever accelerate divides by."""
    from accelerate import Accelerator

    from selfspec_tune.train.environment import num_passes

    config = TrainConfig(
        gradient_accumulation=many, anchor_data=("x",), anchor_data_weight=0.7, max_grad_norm=1e9, max_steps=1
    )
    generator = torch.Generator().manual_seed(3)
    ids = [torch.randint(288, (2, 12), generator=generator) for _ in range(many + 1)]
    batches = [(each, torch.ones_like(each, dtype=torch.bool)) for each in ids]

    def module() -> EarlyExitModule:
        base = model_maker(tmp_path / "base")
        made = EarlyExitModule(model_maker(tmp_path / "model"), base=base.requires_grad_(False))
        torch.manual_seed(1)
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
        return made.train()

    plain = module()
    total = sum(plain(*batch, (1, 3))[0] for batch in batches[1:]) / many
    whole = total + 0.7 * plain(*batches[0], (), anchor=1.0)[0]
    whole.backward()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=num_passes(config))
    seen: dict[str, torch.Tensor] = {}

    class Keep(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            seen.update({str(i): p.grad.clone() for i, p in enumerate(self.param_groups[0]["params"])})

    wrapped = module()
    prepared, optimizer = accelerator.prepare(wrapped, Keep(list(wrapped.parameters()), lr=0.0))
    taken = Update(config, accelerator, prepared, optimizer).take(1, batches[1:], (1, 3), frozenset(), batches[0])
    assert taken.loss == pytest.approx(whole.item(), rel=1e-5)
    assert seen
    for index, parameter in enumerate(plain.parameters()):
        torch.testing.assert_close(seen[str(index)], parameter.grad, rtol=1e-4, atol=1e-6)


def test_an_anchor_needs_no_mixture_of_losses(make_config: Make, digits: Path) -> None:
    facts = train(make_config(exit_loss="mixture", anchor_data=(str(digits),), max_perplexity_increase="100000%"))
    assert facts["steps"] == 6


def test_the_anchor_does_not_train_on_what_is_measured(
    make_config: Make, tmp_path: Path, jsonl: Callable[..., Path]
) -> None:
    """Held to the base on the very text of the budget, a model would always be within it."""
    general = jsonl(tmp_path / "general.jsonl", [{"text": f"{n} measured " * 9} for n in range(20)])
    both = jsonl(
        tmp_path / "both.jsonl", [{"text": f"{n} {'measured' if n < 20 else 'other'} " * 9} for n in range(60)]
    )
    texts = load_texts(
        make_config(general_data=(str(general),), anchor_data=(str(both),), eval_sequences=100),
        AutoTokenizer.from_pretrained(str(make_config().model)),
        0,
        1,
        lambda record: None,
    )
    assert texts.anchor is not None and {record.text.split()[1] for record in texts.anchor.records} == {"other"}
    with pytest.raises(UserError, match="no record of the anchor data is left"):
        train(make_config(general_data=(str(general),), anchor_data=(str(general),), eval_sequences=100))
