"""What must never go unseen: numbers that are not finite, and a full-depth model that gets worse."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from selfspec_tune.config import TrainConfig
from selfspec_tune.errors import UserError
from selfspec_tune.train import guard
from selfspec_tune.train.loop import train
from selfspec_tune.train.step import Update

Make = Callable[..., TrainConfig]


def weights(output: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    loaded: dict[str, torch.Tensor] = load_file(output / "model.safetensors")
    return loaded


def evaluations(output: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if "perplexity" in record]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_loss_or_norm_that_is_not_finite_is_named_with_its_step(bad: float) -> None:
    guard.check_finite(1.0, 2.0, 3)
    with pytest.raises(guard.Diverged, match=r"the loss is .* at step 7"):
        guard.check_finite(bad, 1.0, 7)
    with pytest.raises(guard.Diverged, match=r"the norm of the gradient is .* at step 7"):
        guard.check_finite(1.0, bad, 7)


def test_a_rise_counts_on_each_text_and_a_fall_does_not() -> None:
    before = {"perplexity": 10.0, "general_perplexity": 20.0}
    rises = guard.increases(before, {"perplexity": 5.0, "general_perplexity": 20.6})
    assert rises == pytest.approx({"held_out": -0.5, "general": 0.03})
    assert guard.beyond(rises, 0.02) == ["general"] and guard.beyond(rises, 0.04) == []
    assert guard.beyond({"held_out": math.nan}, 0.02) == ["held_out"]
    assert guard.increases({"perplexity": 10.0}, {"perplexity": 11.0}) == pytest.approx({"held_out": 0.1})


class Cliff(torch.nn.Module):
    """A loss of 0 whose gradient is not finite."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, *_: Any, **__: Any) -> tuple[torch.Tensor, ...]:
        return self.weight.sqrt().sum(), torch.zeros(2), torch.ones(2)


def test_a_gradient_that_is_not_finite_never_reaches_the_weights(make_config: Make) -> None:
    from accelerate import Accelerator

    accelerator, module = Accelerator(cpu=True), Cliff()
    prepared, optimizer = accelerator.prepare(module, torch.optim.AdamW(module.parameters(), lr=0.1))
    update = Update(make_config(), accelerator, prepared, optimizer)
    with pytest.raises(guard.Diverged, match="norm of the gradient"):
        update.take(1, [(torch.zeros(1), torch.zeros(1))], (1,), frozenset())
    assert module.weight.item() == 0.0


def rates(*known: float, then: float) -> Callable[..., float]:
    """Return a schedule: a rate for each of the first steps, and one for all others."""
    return lambda step, **_: known[step] if step < len(known) else then


def test_a_diverging_run_ends_with_the_best_checkpoint_before(
    make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("selfspec_tune.train.loop.learning_rate", rates(*[1e-3] * 4, then=1e30))
    with pytest.raises(UserError) as caught:
        train(make_config(output=tmp_path / "diverged", eval_every=4, max_grad_norm=1e30))
    text = str(caught.value)
    # Step 5 is taken at the rate that is too high, step 6 finds what it did.
    assert "at step 6" in text and "of step 4, is saved" in text and "--learning-rate" in text
    facts = json.loads((tmp_path / "diverged" / "training.json").read_text())
    assert (facts["stopped_by"], facts["best_step"], facts["steps"]) == ("diverged", 4, 5)
    monkeypatch.setattr("selfspec_tune.train.loop.learning_rate", rates(*[1e-3] * 4, then=0.0))
    train(make_config(output=tmp_path / "standing", eval_every=4, max_grad_norm=1e30))
    one, other = weights(tmp_path / "diverged"), weights(tmp_path / "standing")
    assert all(torch.equal(one[name], other[name]) for name in other)


def test_a_run_that_diverges_before_any_evaluation_saves_nothing(make_config: Make, tmp_path: Path) -> None:
    config = make_config(learning_rate=1e30, warmup_steps=0, max_grad_norm=1e30, save_every=1, max_steps=20)
    with pytest.raises(UserError, match="no checkpoint was within the budget yet; the last state before is kept in"):
        train(config)
    assert not (tmp_path / "out" / "model.safetensors").exists()
    assert not (tmp_path / "out" / "training.json").exists()
    assert list((tmp_path / "out" / "state").glob("step-*"))


def test_a_run_beyond_its_budget_stops_and_saves_the_best_within_it(
    make_config: Make, tmp_path: Path, learnt: Path, digits: Path
) -> None:
    options = {
        "model": str(learnt),
        "general_data": (str(digits),),
        "eval_every": 1,
        "max_steps": 30,
        "warmup_steps": 10,
    }
    facts = train(make_config(**options))
    found = evaluations(tmp_path / "out")
    within = [record for record in found[1:] if record["within_budget"]]
    assert facts["stopped_by"] == "max_perplexity_increase" and facts["steps"] == found[-1]["step"] < 30
    assert not found[-1]["within_budget"] and found[-1]["perplexity_increase"]["general"] > 0.02
    assert found[-1]["perplexity_increase"]["held_out"] < 0, "the domain's own perplexity fell: that is no rise"
    best = max(within, key=lambda record: (record["speedup_estimate"]["speedup_model"], record["step"]))
    assert facts["best_step"] == best["step"]
    assert facts["general_perplexity_after"] == best["general_perplexity"]
    assert facts["general_perplexity_before"] == found[0]["general_perplexity"]


def test_with_nothing_within_the_budget_nothing_is_saved(
    make_config: Make, tmp_path: Path, learnt: Path, digits: Path
) -> None:
    config = make_config(model=str(learnt), general_data=(str(digits),), learning_rate=1e-2, eval_every=3, max_steps=9)
    facts = train(config)
    assert facts["best_step"] is None and not facts["improved"]
    assert facts["stopped_by"] == "max_perplexity_increase" and facts["steps"] == 3
    assert not (tmp_path / "out" / "model.safetensors").exists()
    assert not (tmp_path / "out" / "training.json").exists()
    again = train(config)  # ends at once, from the state, with the same verdict
    assert {**again, "seconds": 0} == {**facts, "seconds": 0}


def test_over_budget_lower_goes_back_and_halves_the_exits_share(
    make_config: Make, tmp_path: Path, learnt: Path, digits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, Any]] = []
    # One step far too large, then none at all: what is measured after it are the weights that were gone back to.
    monkeypatch.setattr("selfspec_tune.train.loop.learning_rate", rates(1e-5, 1e-5, 1e-1, then=0.0))
    general = (str(digits),)
    config = make_config(model=str(learnt), general_data=general, over_budget="lower", eval_every=1, layer_dropout=0.0)
    facts = train(config, report=seen.append)
    _, *found = evaluations(tmp_path / "out")
    assert [record["within_budget"] for record in found] == [True, True, False, True, True, True]
    (notice,) = [record["notice"] for record in seen if "notice" in record]
    best = max(found[:2], key=lambda record: (record["speedup_estimate"]["speedup_model"], record["step"]))
    assert "step 3: perplexity rose beyond the budget" in notice and f"weights of step {best['step']}" in notice
    assert all(record["perplexity"] == best["perplexity"] for record in found[3:])
    assert facts["exit_share"] == 0.25 and facts["stopped_by"] == "max_steps"
    (loss,) = [record for record in seen if "loss" in record and record["step"] == 5]
    final, *exits = loss["losses"].values()
    assert loss["loss"] == pytest.approx(0.75 * final + 0.25 * sum(exits) / len(exits), rel=1e-5)


@pytest.mark.parametrize("stop_at", [3, 4], ids=["before going back", "after it"])
def test_going_back_is_the_same_in_a_resumed_run(
    make_config: Make, tmp_path: Path, learnt: Path, digits: Path, monkeypatch: pytest.MonkeyPatch, stop_at: int
) -> None:
    monkeypatch.setattr("selfspec_tune.train.loop.learning_rate", rates(1e-5, 1e-5, 1e-1, then=1e-5))
    options = {"general_data": (str(digits),), "over_budget": "lower", "eval_every": 1, "model": str(learnt)}
    train(make_config(output=tmp_path / "straight", **options))
    config = make_config(output=tmp_path / "resumed", **options)

    def stop(stage: str, done: int, total: int) -> None:
        if (stage, done) == ("train", stop_at):
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(config, stop)
    facts = train(config)
    assert facts["exit_share"] == 0.25
    assert evaluations(tmp_path / "resumed") == evaluations(tmp_path / "straight")
    one, other = weights(tmp_path / "resumed"), weights(tmp_path / "straight")
    assert all(torch.equal(one[name], other[name]) for name in other)


def test_lowering_has_an_end(make_config: Make, learnt: Path, digits: Path) -> None:
    seen: list[dict[str, Any]] = []
    config = make_config(model=str(learnt), general_data=(str(digits),), over_budget="lower", learning_rate=0.1)
    facts = train(replace(config, eval_every=1, max_steps=12, warmup_steps=0), report=seen.append)
    assert len([record for record in seen if "notice" in record]) == guard.MAX_LOWERED
    assert facts["stopped_by"] == "max_perplexity_increase" and facts["steps"] == guard.MAX_LOWERED + 1
    assert facts["best_step"] is None and facts["exit_share"] == 0.5 / 2**guard.MAX_LOWERED
