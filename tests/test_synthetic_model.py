"""The synthetic benchmark model: the same bits every time, α exactly 1 at s = 0, and an α that can be dialled."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from selfspec_tune.decode.engine import Engine
from selfspec_tune.decode.sampling import GREEDY
from selfspec_tune.model.decoder import LayeredDecoder, load_decoder
from selfspec_tune.model.load import load_tokenizer
from selfspec_tune.sweep.profile import profile_exits

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
EXIT, PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 2, 4, 16, 64


@pytest.fixture(scope="module")
def synthetic() -> Iterator[ModuleType]:
    """`synthetic_model`, its folder on the path as when it is run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPTS)
        import synthetic_model

        yield synthetic_model
        for name in ("synthetic_model", "synthetic_weights"):
            del sys.modules[name]


@pytest.fixture
def engine(synthetic: ModuleType) -> Engine:
    return Engine(LayeredDecoder(synthetic.synthetic_model("tiny")), numerics="fast")


def prompts(synthetic: ModuleType, count: int = PROMPTS) -> Any:
    return synthetic.random_prompts(512, count, PROMPT_TOKENS, NEW_TOKENS)


def bits(model: Any) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in model.state_dict().items()}


def differing(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> set[str]:
    assert set(ours) == set(theirs)
    return {name for name, weight in ours.items() if not torch.equal(weight, theirs[name])}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_depend_on_the_seed_and_the_tensors_name_alone(synthetic: ModuleType, dtype: str) -> None:
    torch.manual_seed(1)
    first = synthetic.synthetic_model("tiny", dtype=dtype)
    torch.manual_seed(2)
    torch.randn(5)
    assert differing(bits(first), bits(synthetic.synthetic_model("tiny", dtype=dtype))) == set()
    other = differing(bits(first), bits(synthetic.synthetic_model("tiny", dtype=dtype, seed=1)))
    assert other == {name for name in first.state_dict() if "norm" not in name}
    assert not torch.equal(first.model.layers[0].mlp.up_proj.weight, first.model.layers[1].mlp.up_proj.weight)
    alone = torch.empty_like(first.model.layers[5].mlp.up_proj.weight)
    sys.modules["synthetic_weights"].fill(alone, "model.layers.5.mlp.up_proj.weight", first.config)
    assert torch.equal(alone, first.model.layers[5].mlp.up_proj.weight)


def test_the_large_presets_have_the_size_they_are_named_for(synthetic: ModuleType) -> None:
    from transformers import AutoModelForCausalLM

    for preset, billions, layers in (("7b", 6.738, 32), ("1b", 1.236, 16)):
        config = sys.modules["synthetic_weights"].synthetic_config(preset)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        assert round(sum(weight.numel() for weight in model.parameters()) / 1e9, 3) == billions
        assert len(model.model.layers) == layers and config.max_position_embeddings >= 16384 + 128


def test_a_scale_leaves_no_trace_of_the_one_before(synthetic: ModuleType) -> None:
    model = synthetic.synthetic_model("tiny", dtype="bfloat16")
    before = bits(model)
    for exit_layer, scale in ((2, 0.0), (5, 0.3)):
        synthetic.scale_late(model, exit_layer, scale)
    late = {
        name for index in (5, 6, 7) for name in before if f".{index}." in name and ("o_proj" in name or "down" in name)
    }
    assert differing(before, bits(model)) == late
    synthetic.scale_late(model, 5, 1.0)
    assert differing(before, bits(model)) == set()


def test_alpha_is_one_where_nothing_is_added_and_falls_as_more_is(synthetic: ModuleType, engine: Engine) -> None:
    alphas = []
    for scale in (0.0, 0.05, 0.2, 0.8):
        synthetic.scale_late(engine.decoder.model, EXIT, scale)
        alphas.append(profile_exits(engine, prompts(synthetic), GREEDY, 1).alpha[EXIT])
    assert alphas[0] == 1
    assert alphas == sorted(alphas, reverse=True) and len(set(alphas)) == 4 and alphas[-1] < 0.3


def test_alphas_are_dialled_on_texts_that_are_no_loops(synthetic: ModuleType, engine: Engine) -> None:
    tried: dict[float, Any] = {}
    scales = []
    for alpha in (0.5, 0.7, 0.85, 0.95):
        dialled = synthetic.dial(engine, EXIT, alpha, prompts(synthetic), tried)
        assert dialled.reached and abs(dialled.alpha - alpha) <= 0.03
        # The weights are those it speaks of, on prompts that it did not see too, as far as these say.
        again = profile_exits(engine, prompts(synthetic), GREEDY, 1).alpha[EXIT]
        assert again == dialled.alpha
        unseen = synthetic.random_prompts(512, PROMPTS, PROMPT_TOKENS, NEW_TOKENS, seed=7)
        assert abs(profile_exits(engine, unseen, GREEDY, 1).alpha[EXIT] - alpha) < 0.15
        found = dialled.to_dict()
        assert found["distinct"] > 0.95
        assert all(0.3 < each < 1 for each in found["alpha_by_prompt"])
        scales.append(dialled.scale)
    assert scales == sorted(scales, reverse=True)


def test_an_alpha_out_of_reach_is_said(synthetic: ModuleType, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthetic, "LARGEST_SCALE", 0.1)
    monkeypatch.setattr(synthetic, "HALVINGS", 1)
    dialled = synthetic.dial(engine, EXIT, 0.1, prompts(synthetic, 1))
    assert not dialled.reached and not dialled.to_dict()["reached"] and 0.1 < dialled.alpha < 1
    with pytest.raises(synthetic.UserError, match="exit_layer"):
        synthetic.dial(engine, 8, 0.5, prompts(synthetic, 1))


def test_a_tied_head_does_not_repeat_its_token(synthetic: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    presets = synthetic.PRESETS
    monkeypatch.setitem(presets, "tied", {**presets["tiny"], "tie_word_embeddings": True})
    engine = Engine(LayeredDecoder(synthetic.synthetic_model("tied")), numerics="fast")
    texts = [engine.generate([each.request], GREEDY)[0][0].token_ids for each in prompts(synthetic)]
    assert synthetic.distinct_share(texts) > 0.95


def test_loops_are_seen(synthetic: ModuleType) -> None:
    assert synthetic.distinct_share([[5] * 100]) < 0.02
    assert synthetic.distinct_share([list(range(7)) * 20, list(range(7)) * 20]) < 0.05
    assert synthetic.distinct_share([list(range(50)), list(range(25, 75))]) == 1 - 22 / 94


def test_the_command_writes_a_checkpoint_that_others_read(
    synthetic: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--dtype", "bfloat16", "--seed", "3", "--exit-layer", "2", "--late-scale", "0.25"]
    assert synthetic.main([str(tmp_path / "model"), *arguments]) == 0
    assert json.loads(capsys.readouterr().out)["late_scale"] == 0.25
    wanted = synthetic.synthetic_model("tiny", seed=3, dtype="bfloat16")
    synthetic.scale_late(wanted, 2, 0.25)
    read = load_decoder(str(tmp_path / "model"), device="cpu")
    assert read.dtype == torch.bfloat16 and differing(bits(wanted), bits(read.model)) == set()
    tokenizer = load_tokenizer(str(tmp_path / "model"))
    records = [json.loads(line) for line in (tmp_path / "model" / "prompts.jsonl").read_text().splitlines()]
    ids = tokenizer(records[0]["prompt"])["input_ids"]
    assert ids == synthetic.random_prompts(512, 1, 32, 1, seed=3)[0].request.prompt_ids
    assert tokenizer.decode([17, 4, 511]) == "t17 t4 t511"
    with pytest.raises(synthetic.UserError, match="exit layer"):
        synthetic.main([str(tmp_path / "other"), "--alpha", "0.9"])
    with pytest.raises(synthetic.UserError, match="preset"):
        synthetic.synthetic_model("8b")
