"""Interpolation with the base: the weights between, the search, and a whole run that comes back into its budget."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from selfspec_tune.config import TrainConfig
from selfspec_tune.train.loop import train
from selfspec_tune.train.shrink import HALVINGS, interpolated, largest_share

Make = Callable[..., TrainConfig]


def weights(output: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    loaded: dict[str, torch.Tensor] = load_file(output / "model.safetensors")
    return loaded


def test_weights_lie_on_the_line_from_the_base_to_those_trained() -> None:
    base, trained = {"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([3.0, -2.0])}
    assert interpolated(base, trained, 0.25)["w"].tolist() == [1.5, 1.0]
    assert torch.equal(interpolated(base, trained, 1.0)["w"], trained["w"])


def test_what_adapters_add_is_scaled_once_not_twice() -> None:
    a, b = torch.randn(2, 3), torch.randn(4, 2)
    names = {"x.lora_A.default.weight": a, "x.lora_B.default.weight": b}
    names |= {"y.lora_embedding_A.default": b.T, "y.lora_embedding_B.default": a.T}
    found = interpolated(None, names, 0.5)
    one = found["x.lora_B.default.weight"] @ found["x.lora_A.default.weight"]
    other = found["y.lora_embedding_B.default"] @ found["y.lora_embedding_A.default"]
    assert torch.allclose(one, b @ a / 2) and torch.allclose(other, a.T @ b.T / 2)


@pytest.mark.parametrize("limit", [0.04, 0.3, 0.77, 0.999])
def test_the_search_finds_the_largest_share_within_the_budget(limit: float) -> None:
    asked: list[float] = []

    def measure(share: float) -> dict[str, Any]:
        asked.append(share)
        return {"rise": share}

    found = largest_share(measure, lambda record: record["rise"] <= limit)
    assert found is not None and found[1] == {"rise": found[0]}
    assert limit - 2**-HALVINGS <= found[0] <= limit and len(asked) == HALVINGS
    assert largest_share(measure, lambda record: False) is None


@pytest.mark.parametrize("extra", [{}, {"lora_rank": 4}], ids=["full weights", "adapters"])
def test_a_run_beyond_its_budget_ends_within_it(
    make_config: Make, tmp_path: Path, learnt: Path, digits: Path, extra: dict[str, Any]
) -> None:
    from selfspec_tune.model.load import load_model

    rate = 3e-2 if extra else 3e-3
    options: dict[str, Any] = {"over_budget": "shrink", "layer_dropout": 0.0, "eval_every": 100, "learning_rate": rate}
    config = make_config(
        model=str(learnt), general_data=(str(digits),), max_perplexity_increase="10%", max_steps=8, **options, **extra
    )
    facts = train(config)
    records = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    whole = next(record for record in records if record["step"] == 8 and "within_budget" in record)
    tried = [record for record in records if "share_kept" in record and "within_budget" in record]
    assert not whole["within_budget"] and len(tried) == HALVINGS
    share = facts["share_kept"]
    assert share == max(record["share_kept"] for record in tried if record["within_budget"])
    assert facts["best_step"] == 8 and facts["stopped_by"] == "max_steps"
    assert facts["perplexity_increase"]["general"] <= 0.1 + 1e-6 < whole["perplexity_increase"]["general"]
    base, saved = load_model(str(learnt)).state_dict(), load_model(str(tmp_path / "out")).state_dict()
    assert any(not torch.equal(base[name], saved[name]) for name in base)
    # The same run with nothing taken back shows where the line leads.
    far = train(make_config(**{**vars(config), "output": tmp_path / "far", "max_perplexity_increase": "100000%"}))
    end = load_model(str(tmp_path / "far")).state_dict()
    assert far["best_step"] == 8 and "share_kept" not in far
    for name, weight in saved.items():
        assert torch.allclose(weight, torch.lerp(base[name], end[name], share), atol=1e-6), name
