"""Training a head on a frozen model: it learns, the model does not, and nothing is ever half written."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file, save_file

from selfspec_tune.artifact import EXIT_HEAD_FILE, fingerprint
from selfspec_tune.config import TrainConfig
from selfspec_tune.decode.drafters.exit_head import ExitHeadDrafter
from selfspec_tune.decode.engine import Engine
from selfspec_tune.decode.policy import DraftPolicy
from selfspec_tune.decode.requests import Request
from selfspec_tune.decode.sampling import SamplingParams
from selfspec_tune.errors import UserError
from selfspec_tune.model.decoder import LayeredDecoder
from selfspec_tune.model.exit_head import ExitHead, load_exit_head, read_facts
from selfspec_tune.train import targets
from selfspec_tune.train.loop import train
from selfspec_tune.train.module import EarlyExitModule, ExitHeadModule

Make = Callable[..., TrainConfig]
OUTPUT = ["exit_head.json", "exit_head.metrics.jsonl", EXIT_HEAD_FILE, "trained_on.npy"]


class Killed(Exception):
    """Stands for the process dying."""


@pytest.fixture
def make(make_config: Make) -> Make:
    """Build the config of a short head run; keyword arguments override it."""

    def build(**options: Any) -> TrainConfig:
        defaults = {"method": "exit-head", "exits": (2,), "exits_per_step": 1, "layer_dropout": 0.1}
        return make_config(**{**defaults, **options})

    return build


@pytest.fixture
def own(tmp_path: Path, model_maker: Callable[..., Any], tokenizer_maker: Callable[..., Any]) -> Callable[..., Path]:
    """Save a tiny checkpoint of a test's own."""

    def save(name: str = "own", *, dtype: torch.dtype = torch.float32, **settings: Any) -> Path:
        model_maker(tmp_path / name, **settings).to(dtype).save_pretrained(tmp_path / name)
        tokenizer_maker(tmp_path / name)
        return tmp_path / name

    return save


def load(directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory).eval()


def head_of(output: Path) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = load_file(output / EXIT_HEAD_FILE)
    return weights


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def at(stage: str, number: int, act: Callable[[], None]) -> Callable[[str, int, int], None]:
    def progress(name: str, done: int, total: int) -> None:
        if name == stage and done == number:
            act()

    return progress


def kill() -> None:
    raise Killed


def steps(output: Path) -> list[dict[str, Any]]:
    lines = (output / "exit_head.metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if "loss" in record]


def accepted_fraction(directory: Path, head: Callable[[Any], ExitHead]) -> float:
    """Decode some prompts and return accepted / drafted."""
    decoder = LayeredDecoder(load(directory))
    engine, drafter = Engine(decoder, numerics="fast"), ExitHeadDrafter(decoder, head(decoder.model))
    drafted = accepted = 0
    for text in ("the cat sees", "a big red house and", "old bird likes the", "dog hears a small"):
        request = Request(text, list(text.encode()), 40)
        stats = engine.generate([request], SamplingParams(), drafter, DraftPolicy(3))[1]
        drafted, accepted = drafted + stats.drafted, accepted + stats.accepted
    return accepted / drafted


@pytest.mark.parametrize("loss", ["kl", "ce"])
def test_the_head_learns_and_the_target_does_not(make: Make, own: Callable[..., Path], loss: str) -> None:
    # A target that knows the data: what a random one says is nothing that a layer could learn in a second.
    base = own()
    layer_skip = make(
        model=str(base), output=base.with_name("base"), method="layer-skip", max_steps=60, learning_rate=3e-3
    )
    train(replace(layer_skip, batch_size=4, exits=(3,), layer_dropout=0.0, exit_loss_weight=0.0))
    base = base.with_name("base")
    before = load_file(base / "model.safetensors")
    config = make(model=str(base), exits=(1,), max_steps=60, learning_rate=3e-3, batch_size=4, exit_loss=loss)
    facts = train(config)
    output = Path(str(config.output))
    assert facts["alpha_after"]["1"] > facts["alpha_before"]["1"] + 0.08
    assert facts["perplexity_after"] == facts["perplexity_before"]
    losses = [record["losses"]["1"] for record in steps(output)]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    assert all(record["loss"] == record["losses"]["1"] for record in steps(output))
    for directory in (base, output):
        assert_same(load_file(directory / "model.safetensors"), before)
    untrained = accepted_fraction(output, lambda model: ExitHead(model, 1, torch.float32))
    assert accepted_fraction(output, lambda model: load_exit_head(output, model)) > untrained + 0.1
    assert read_facts(output).loss == loss and read_facts(output).steps == facts["best_step"]


def test_no_weight_of_the_target_changes_in_memory(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    targets_seen: list[EarlyExitModule] = []
    genuine = ExitHeadModule.__init__

    def spy(self: ExitHeadModule, target: EarlyExitModule, *rest: Any, **options: Any) -> None:
        targets_seen.append(target)
        genuine(self, target, *rest, **options)

    monkeypatch.setattr(ExitHeadModule, "__init__", spy)
    config = make(max_steps=3, learning_rate=1e-2)
    train(config)
    (target,) = targets_seen
    assert_same(dict(target.model.state_dict()), dict(load(Path(str(config.model))).state_dict()))
    assert all(parameter.grad is None for parameter in target.parameters())


@pytest.mark.parametrize("exit_layer", [1, 3])
@pytest.mark.parametrize("family", [{}, {"model_type": "qwen3"}, {"model_type": "mistral", "sliding_window": 3}])
def test_an_untrained_head_is_the_next_layer(
    tmp_path: Path, model_maker: Callable[..., Any], exit_layer: int, family: dict[str, Any]
) -> None:
    model = model_maker(tmp_path / "m", **family)
    target = EarlyExitModule(model).eval()
    module = ExitHeadModule(target, ExitHead(model, exit_layer, torch.float32), states_dtype=torch.float32).eval()
    ids = torch.randint(0, 288, (2, 20), generator=torch.Generator().manual_seed(2))
    counted = torch.ones_like(ids, dtype=torch.bool)
    with torch.no_grad():
        # Tokens, likelihood under the whole model, agreement: that of the next exit. The last layer's always agrees.
        expected = target(ids, counted, (exit_layer + 1,) if exit_layer < 3 else ())[0].tolist()
        counts = module(ids, counted, (exit_layer,))[0].tolist()
    assert counts[:2] == expected[:2]
    assert counts[2] == (expected[2] if exit_layer < 3 else 38)


def test_a_head_copies_weights_and_shares_none(tmp_path: Path, model_maker: Callable[..., Any]) -> None:
    model = model_maker(tmp_path / "m")
    LayeredDecoder(model)  # its weights are views of fused ones now
    head = ExitHead(model, 2, torch.float32)
    assert_same(dict(head.block.state_dict()), dict(model.model.layers[2].state_dict()))
    own = {parameter.untyped_storage().data_ptr() for parameter in head.parameters()}
    assert not own & {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    assert all(p.requires_grad and p.untyped_storage().nbytes() == 4 * p.numel() for p in head.parameters())


@pytest.mark.parametrize("cached", [False, True])
def test_a_resumed_run_ends_in_the_same_bits(make: Make, tmp_path: Path, cached: bool) -> None:
    keep = tmp_path / "cache" if cached else None
    train(make(output=tmp_path / "straight"))
    config = make(output=tmp_path / "resumed", save_every=3, cache_targets=keep)
    with pytest.raises(Killed):
        train(config, at("train", 5, kill))
    assert [p.name for p in (tmp_path / "resumed" / "exit_head.state").glob("step-*")] == ["step-00000003"]
    assert not (tmp_path / "resumed" / EXIT_HEAD_FILE).exists()
    train(config)
    assert_same(head_of(tmp_path / "straight"), head_of(tmp_path / "resumed"))
    assert [record["step"] for record in steps(tmp_path / "resumed")] == [1, 2, 3, 4, 5, 6]
    assert not (tmp_path / "resumed" / "exit_head.state").exists()


def test_a_state_holds_the_head_alone(make: Make, tiny: Path, tmp_path: Path) -> None:
    config = make(save_every=2)
    with pytest.raises(Killed):
        train(config, at("train", 3, kill))
    size = sum(path.stat().st_size for path in (tmp_path / "out").rglob("*.bin"))
    head = sum(p.numel() for p in ExitHead(load(tiny), 2, torch.float32).parameters())
    assert 12 * head <= size < 14 * head + 20_000  # fp32 weights and two moments


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_from_disk_train_the_same_weights(
    make: Make, own: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    base = str(own(dtype=dtype))
    train(make(model=base, output=tmp_path / "straight"))
    cached = make(model=base, output=tmp_path / "first", cache_targets=tmp_path / "cache")
    train(cached)
    assert_same(head_of(tmp_path / "straight"), head_of(tmp_path / "first"))
    assert head_of(tmp_path / "first")["norm.weight"].dtype == dtype
    # From now on the target is not run at all, whatever else of the run changes.
    monkeypatch.setattr(ExitHeadModule, "target_states", lambda self, ids: kill())
    train(replace(cached, output=tmp_path / "second"))
    assert_same(head_of(tmp_path / "straight"), head_of(tmp_path / "second"))
    train(replace(cached, output=tmp_path / "third", learning_rate=5e-3, max_minutes=10.0))
    for other in ({"exits": (1,)}, {"sequence_length": 24}, {"seed": 4}):
        with pytest.raises(Killed):
            train(replace(cached, output=tmp_path / "other", **other))


def test_an_interrupted_cache_is_completed_and_never_read_before(make: Make, tmp_path: Path) -> None:
    def files(directory: Path, suffix: str) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in directory.glob(f"*.{suffix}")}

    config = make(cache_targets=tmp_path / "cache", max_steps=5)
    train(replace(config, output=tmp_path / "straight", cache_targets=tmp_path / "whole"))
    # A shell that starts the tests in the background has them ignore the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            train(config, at("target states", 4, lambda: os.kill(os.getpid(), signal.SIGINT)))
    finally:
        signal.signal(signal.SIGINT, before)
    assert not files(tmp_path / "cache", "states")
    (half,) = (tmp_path / "cache").glob("*.partial")
    half.write_bytes(half.read_bytes()[:-5])  # torn in the middle of a batch
    seen: list[int] = []

    def progress(stage: str, done: int, total: int) -> None:
        if stage == "target states":
            seen.append(done)

    train(config, progress)
    assert seen == [4, 6, 8, 10, 2, 4, 6]  # ten training sequences, of which two were kept, and six held out
    assert files(tmp_path / "cache", "states") == files(tmp_path / "whole", "states")
    assert not files(tmp_path / "cache", "partial")
    assert_same(head_of(tmp_path / "straight"), head_of(tmp_path / "out"))
    about = [json.loads(text) for text in files(tmp_path / "cache", "json").values()]
    assert sorted(entry["shape"] for entry in about) == [[6, 2, 48, 32], [10, 2, 48, 32]]


def test_a_last_batch_that_is_not_full_has_the_same_bits(make: Make, tmp_path: Path) -> None:
    config = make(cache_targets=tmp_path / "cache", max_steps=3, batch_size=3, eval_sequences=5)
    train(config)
    seen = {}
    for path in (tmp_path / "cache").glob("*.json"):
        shape = json.loads(path.read_text())["shape"]
        seen[shape[0]] = torch.from_file(
            str(path.with_suffix(".states")), size=torch.Size(shape).numel(), dtype=torch.float32
        )
    assert set(seen) == {5, 9} and all(states.isfinite().all() for states in seen.values())


def test_a_disk_without_room_is_a_user_error(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    with pytest.raises(UserError, match="no room") as caught:
        train(make(cache_targets=tmp_path / "cache"))
    # Two fp32 hidden states of 32 numbers.
    assert "256 bytes a token" in str(caught.value) and "--cache-targets" in str(caught.value)


def test_a_damaged_cache_is_named(make: Make, tmp_path: Path) -> None:
    config = make(cache_targets=tmp_path / "cache")
    train(config)
    for path in (tmp_path / "cache").glob("*.states"):
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match="damaged"):
        train(replace(config, output=tmp_path / "again"))


def test_ctrl_c_leaves_a_state_and_no_head(make: Make, tmp_path: Path) -> None:
    config = make()
    with pytest.raises(KeyboardInterrupt):
        train(config, at("train", 4, lambda: os.kill(os.getpid(), signal.SIGINT)))
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["exit_head.metrics.jsonl", "exit_head.state"]
    train(config)
    train(make(output=tmp_path / "straight"))
    assert_same(head_of(tmp_path / "straight"), head_of(tmp_path / "out"))


def test_ctrl_c_while_the_head_is_written_leaves_no_half_of_it(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    genuine = safetensors.torch.save_file

    def interrupted(tensors: Any, filename: Any, metadata: Any = None) -> None:
        genuine(tensors, filename, metadata)
        content = Path(filename).read_bytes()
        Path(filename).write_bytes(content[: len(content) // 2])
        raise KeyboardInterrupt

    config = make()
    with monkeypatch.context() as patched:
        patched.setattr(safetensors.torch, "save_file", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(config)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert not [name for name in names if name.startswith((EXIT_HEAD_FILE, ".")) or name.endswith(".tmp")]
    train(config)
    train(make(output=tmp_path / "straight"))
    assert_same(head_of(tmp_path / "straight"), head_of(tmp_path / "out"))


def test_a_head_may_live_in_the_models_own_directory(make: Make, own: Callable[..., Path]) -> None:
    base = own()
    before = {path.name: path.read_bytes() for path in base.iterdir()}
    mark = fingerprint(base)
    facts = train(make(model=str(base), output=base))
    after = {path.name: path.read_bytes() for path in base.iterdir()}
    assert sorted(set(after) - set(before)) == sorted(OUTPUT)
    assert {name: after[name] for name in before} == before
    assert fingerprint(base) == mark == read_facts(base).checkpoint_fingerprint
    assert json.loads(after["exit_head.json"]) == facts
    assert load_exit_head(base, load(base)).exit_layer == 2
    assert train(make(model=str(base), output=base), at("train", 1, kill)) == facts


def test_another_output_becomes_a_complete_checkpoint(make: Make, own: Callable[..., Path], tmp_path: Path) -> None:
    base = own()
    (base / "notes").mkdir()
    train(make(model=str(base)))
    output = tmp_path / "out"
    names = {path.name for path in base.iterdir() if path.is_file()}
    assert {path.name for path in output.iterdir()} == names | set(OUTPUT)
    for name in names:
        assert (output / name).read_bytes() == (base / name).read_bytes()
    assert (output / "model.safetensors").samefile(base / "model.safetensors")  # no second copy of the weights
    assert not (output / "config.json").samefile(base / "config.json")
    assert load_exit_head(output, load(output)).exit_layer == 2


def test_weights_are_copied_where_they_cannot_be_linked(
    make: Make, own: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(18, "Invalid cross-device link")

    base = own()
    monkeypatch.setattr(os, "link", refuse)
    train(make(model=str(base)))
    output = tmp_path / "out"
    assert (output / "model.safetensors").read_bytes() == (base / "model.safetensors").read_bytes()
    assert not (output / "model.safetensors").samefile(base / "model.safetensors")
    assert fingerprint(output) == fingerprint(base)


def test_a_checkpoint_of_other_weights_is_not_overwritten(make: Make, own: Callable[..., Path]) -> None:
    other = own("other", tied=False)
    before = {path.name: path.read_bytes() for path in other.iterdir()}
    with pytest.raises(UserError, match="not ours"):
        train(make(output=other))
    assert {path.name: path.read_bytes() for path in other.iterdir()} == before


def change_weights(directory: Path) -> None:
    weights = load_file(directory / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] * 1.5
    (directory / "model.safetensors").unlink()  # not into the hard link
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("finish", [True, False])
def test_a_run_on_weights_that_changed_since_is_refused(make: Make, own: Callable[..., Path], finish: bool) -> None:
    base = own()
    config = make(model=str(base), output=base, save_every=2)
    if finish:
        train(config)
    else:
        with pytest.raises(Killed):
            train(config, at("train", 3, kill))
    change_weights(base)
    with pytest.raises(UserError, match="checkpoint") as caught:
        train(config)
    # Never the model itself.
    assert f"rm -r {base}/exit_head.*" in str(caught.value)


def test_a_finished_head_of_other_options_is_refused(make: Make, tmp_path: Path) -> None:
    train(make())
    with pytest.raises(UserError, match="learning_rate"):
        train(make(learning_rate=5e-3))
    train(make(save_every=1, max_minutes=60.0, cache_targets=tmp_path / "elsewhere"))


def test_a_head_on_a_trained_checkpoint_keeps_the_facts_of_both_runs(make: Make, make_config: Make) -> None:
    first = make_config(max_steps=2)
    output = Path(str(first.output))
    facts = train(first)
    train(make(model=str(output), output=output, max_steps=2))
    assert json.loads((output / "training.json").read_text()) == facts
    assert train(first) == facts
    assert len(steps(output)) == 2 and len((output / "metrics.jsonl").read_text().splitlines()) == 4


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"exits": (1, 2)}, "--exits"),
        ({"exits": (4,)}, "exit 4"),
        ({"layer_dropout": 0.3}, "layer_dropout"),
        ({"exit_loss_weight": 0.2, "freeze_embeddings": True}, "exit_loss_weight, freeze_embeddings"),
        ({"method": "layer-skip", "cache_targets": Path("cache")}, "cache_targets"),
    ],
)
def test_options_of_the_other_method_are_user_errors(make: Make, options: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError) as caught:
        train(make(**options))
    assert named in str(caught.value)


def test_the_default_exit_is_a_third_of_the_depth(make: Make) -> None:
    assert make(exits=None).chosen_exits == (0.33,)
    assert make(exits=None, method="layer-skip").chosen_exits == (0.2, 0.33, 0.5, 0.7)
    assert train(make(exits=None, max_steps=1))["exits"] == [1]
