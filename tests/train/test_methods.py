"""What each method trains and how it sets its module up; the step's benchmark, which does the same."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from selfspec_tune.config import TrainConfig
from selfspec_tune.errors import UserError
from selfspec_tune.model.load import load_model
from selfspec_tune.train.loop import train
from selfspec_tune.train.methods import LayerSkip, Start
from selfspec_tune.train.module import EarlyExitModule

Make = Callable[..., TrainConfig]
SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench_train_step.py"


def method(config: TrainConfig, *, precision: str = "no", dtype: torch.dtype = torch.float32) -> LayerSkip:
    model = load_model(str(config.model), device="cpu").to(dtype)
    accelerator = SimpleNamespace(mixed_precision=precision, device=torch.device("cpu"))
    return LayerSkip(Start(config, model, str(config.model), (1, 2), dtype, accelerator))


def trained(of: LayerSkip) -> set[str]:
    return {name for name, weight in of.module.named_parameters() if weight.requires_grad}


def test_what_is_trained(make_config: Make) -> None:
    everything, frozen = trained(method(make_config())), trained(method(make_config(freeze_embeddings=True)))
    assert everything - frozen == {"model.model.embed_tokens.weight"}
    adapters = trained(method(make_config(lora_rank=2, lora_targets=("q_proj", "up_proj"))))
    assert len(adapters) == 4 * 2 * 2 and all(".lora_" in name for name in adapters)


def test_dropout_follows_its_schedule(make_config: Make) -> None:
    assert method(make_config(layer_dropout=0.2, dropout_schedule="uniform")).drop_probabilities == [0.2] * 4
    exponential = method(make_config(layer_dropout=0.2)).drop_probabilities
    assert exponential[0] == 0 and exponential[-1] == pytest.approx(0.2) and exponential[1] < 0.1
    assert method(make_config(layer_dropout=0.0)).drop_probabilities == [0.0] * 4


def test_the_base_of_an_anchor_is_kept_only_where_it_is_needed(make_config: Make) -> None:
    def base(**options: Any) -> Any:
        module = method(make_config(**options)).module
        assert isinstance(module, EarlyExitModule)
        return module.outside[0]

    assert base() is None
    assert base(anchor_weight=0.5, lora_rank=2) is None
    whole, shared = base(anchor_weight=0.5), base(anchor_weight=0.5, freeze_embeddings=True)
    assert whole.lm_head is not None and shared.lm_head is None


@pytest.mark.parametrize(
    ("precision", "dtype", "kept"),
    [("bf16", torch.bfloat16, True), ("bf16", torch.float32, False), ("no", torch.bfloat16, False)],
)
def test_frozen_matrices_stay_in_bf16_only_where_nothing_is_lost(
    make_config: Make, precision: str, dtype: torch.dtype, kept: bool
) -> None:
    of = method(make_config(lora_rank=2), precision=precision, dtype=dtype)
    matrix = of.module.get_parameter("model.model.layers.0.mlp.up_proj.base_layer.weight")
    assert matrix.dtype == (torch.bfloat16 if kept else torch.float32)
    assert all(weight.dtype == torch.float32 for weight in of.module.parameters() if weight.requires_grad)
    assert of.module.get_parameter("model.model.norm.weight").dtype == torch.float32


def test_the_frozen_copy_has_its_matrices_in_the_dtype_of_the_products(make_config: Make) -> None:
    for precision, expected in (("bf16", torch.bfloat16), ("no", torch.float32)):
        module = method(make_config(anchor_weight=0.5), precision=precision).module
        assert isinstance(module, EarlyExitModule)
        base = module.outside[0]
        assert base.model.layers[0].mlp.up_proj.weight.dtype == expected
        assert {base.model.norm.weight.dtype, base.lm_head.weight.dtype} == {torch.float32}


def test_an_unknown_target_stops_the_run_before_it_starts(make_config: Make) -> None:
    with pytest.raises(UserError, match="did you mean 'gate_proj'"):
        train(make_config(lora_rank=2, lora_targets=("gate_prj",)))


@pytest.mark.parametrize("options", [{}, {"freeze_embeddings": True}, {"lora_rank": 4, "learning_rate": 1e-2}])
def test_an_anchor_keeps_the_model_nearer_to_its_base(
    make_config: Make, tmp_path: Path, options: dict[str, Any]
) -> None:
    """With all of the final layer's loss on the anchor nothing is learnt from the data, so perplexity moves less."""
    options = {"exit_loss_weight": 0.2, "layer_dropout": 0.0, "max_steps": 12, **options}
    moved = []
    for anchor in (0.0, 1.0):
        facts = train(make_config(output=tmp_path / f"a{anchor}", anchor_weight=anchor, **options))
        moved.append(abs(facts["perplexity_after"] / facts["perplexity_before"] - 1))
    assert moved[1] < 0.25 * moved[0]


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("script_bench_train_step", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_steps_are_compared_in_pairs() -> None:
    # The machine is ten times slower in the last round, for all.
    times = {"plain": [1.0, 2.0, 10.0], "transformers": [1.5, 3.0, 15.0], "exits": [1.2, 2.2, 13.0]}
    found = load_script().summarise({**times, "dropout": [0.9, 1.8, 9.0]})
    assert found["over_plain"]["exits"] == pytest.approx([1.15, 1.2, 1.25])
    assert found["over_plain"]["dropout"][1] == pytest.approx(0.9)
    assert found["seconds"]["plain"] == 2.0


def test_the_step_benchmark_counts_the_layers_that_are_run(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = load_script()
    small = [str(tiny), "--rounds", "3", "--batch-size", "2", "--length", "16", "--exits", "1,2", "--device", "cpu"]
    assert script.main([*small, "--dropout", "0.9", "--dropout-schedule", "uniform", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["layers"]["plain"] == found["layers"]["transformers"] == found["layers"]["exits"] == 4
    # 12 draws at 0.9: that none of them drops a layer has probability 1e-12; the seed is fixed.
    assert found["layers"]["dropout"] < 4
    assert set(found["over_plain"]) == {"transformers", "exits", "dropout"} and found["exits"] == [1, 2]
    for wrong in (["--rounds", "0"], ["--counted", "0"]):
        assert script.main([*small, *wrong]) == 2
        assert "error: " in capsys.readouterr().err


def test_the_step_benchmark_has_a_loss_on_the_end_of_each_sequence(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script, counted = load_script(), []

    def kept(steps: Any, rounds: int) -> Any:
        counted.append(steps.counted.tolist())
        return alternate(steps, rounds)

    alternate = script.alternate
    monkeypatch.setattr(script, "alternate", kept)
    small = ["--rounds", "1", "--batch-size", "2", "--length", "8", "--exits", "1", "--device", "cpu"]
    assert script.main([str(tiny), *small, "--counted", "0.25"]) == 0
    assert counted == [[[False] * 6 + [True] * 2] * 2]
    assert "loss on 25% of it" in capsys.readouterr().out
