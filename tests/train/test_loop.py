"""Whole runs of the tiny model: learning, resuming to the bit, interruption, and what stops a run from starting."""

from __future__ import annotations

import json
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
from selfspec_tune.train.environment import mixed_precision, training_device
from selfspec_tune.train.loop import train

Make = Callable[..., TrainConfig]


class Killed(Exception):
    """Stands for the process dying."""


def weights(output: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    loaded: dict[str, torch.Tensor] = load_file(output / "model.safetensors")
    return loaded


def metrics(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def at_step(number: int, act: Callable[[], None]) -> Callable[[str, int, int], None]:
    def progress(stage: str, done: int, total: int) -> None:
        if stage == "train" and done == number:
            act()

    return progress


def kill() -> None:
    raise Killed


def assert_same_weights(one: Path, other: Path) -> None:
    left, right = weights(one), weights(other)
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name


def test_training_lifts_alpha_and_lowers_perplexity(make_config: Make) -> None:
    config = make_config(max_steps=40, learning_rate=3e-3, batch_size=4, layer_dropout=0.1, eval_every=15)
    facts = train(config)
    assert facts["perplexity_after"] < 0.5 * facts["perplexity_before"]
    assert all(facts["alpha_after"][e] > facts["alpha_before"][e] + 0.2 for e in ("1", "2"))
    assert facts["steps"] == 40 and facts["tokens"] == 40 * 4 * 48 and facts["stopped_by"] == "max_steps"
    assert facts["exits"] == [1, 2, 3] and facts["base"] == config.model
    assert json.loads((Path(str(config.output)) / "training.json").read_text()) == facts


def test_metrics_hold_every_step_and_evaluation(make_config: Make) -> None:
    config = make_config()
    train(config)
    records = metrics(Path(str(config.output)))
    steps = [r for r in records if "loss" in r]
    evaluations = [r for r in records if "perplexity" in r]
    assert [r["step"] for r in steps] == [1, 2, 3, 4, 5, 6]
    assert [r["step"] for r in evaluations] == [0, 4, 6]
    assert [sorted(r["losses"]) for r in steps[:3]] == [["1", "2", "final"], ["1", "3", "final"], ["2", "3", "final"]]
    assert all(r["tokens_per_second"] > 0 and r["seconds"] > 0 and r["learning_rate"] > 0 for r in steps)
    for r in steps:
        exits = [value for name, value in r["losses"].items() if name != "final"]
        assert r["loss"] == pytest.approx(0.5 * r["losses"]["final"] + 0.5 * sum(exits) / 2, rel=1e-5)
    assert all(set(r["alpha"]) == {"1", "2", "3"} for r in evaluations)


@pytest.mark.parametrize("freeze", [True, False])
def test_embeddings_stay_as_they_are_only_if_frozen(make_config: Make, tiny: Path, freeze: bool) -> None:
    config = make_config(freeze_embeddings=freeze, max_steps=2)
    train(config)
    before, after = weights(tiny), weights(Path(str(config.output)))
    name = "model.embed_tokens.weight"
    assert torch.equal(before[name], after[name]) == freeze
    assert not torch.equal(before["model.layers.0.mlp.up_proj.weight"], after["model.layers.0.mlp.up_proj.weight"])


@pytest.mark.parametrize(
    "options", [{}, {"no_packing": True, "assistant_only": True}, {"eval_data": ()}], ids=["packed", "padded", "split"]
)
def test_a_resumed_stream_ends_in_the_same_bits(
    make_config: Make, tmp_path: Path, corpus: Path, options: dict[str, Any]
) -> None:
    # 20 steps read the 120 records more than once; the file is read in blocks of its 120 rows.
    config = {"streaming": True, "max_steps": 20, "batch_size": 16, "save_every": 10, "eval_every": 100, **options}
    straight = train(make_config(output=tmp_path / "straight", **config))
    with pytest.raises(Killed):
        train(make_config(**config), at_step(13, kill))
    resumed = train(make_config(**config))
    assert resumed["perplexity_after"] == straight["perplexity_after"]
    for name in ("model.safetensors", "trained_on.npy"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "straight" / name).read_bytes()
    from selfspec_tune.trained_on import Overlap, overlap

    texts = [json.loads(line)["text"] for line in (corpus / "train.jsonl").read_text().splitlines()]
    seen = overlap(tmp_path / "out", texts)
    assert seen is not None and seen.total == 120
    assert seen == Overlap(120, 120) if options.get("eval_data") is None else seen.found < 120


@pytest.mark.parametrize("streaming", [False, True])
def test_bad_records_are_reported(make_config: Make, tmp_path: Path, corpus: Path, streaming: bool) -> None:
    file = tmp_path / "some.jsonl"
    file.write_text("{\n" + (corpus / "train.jsonl").read_text())
    said: list[Any] = []
    with pytest.raises(UserError, match=r"some\.jsonl:1 is not valid JSON"):
        train(make_config(train_data=(str(file),), streaming=streaming, batch_size=40, max_steps=8))
    config = make_config(
        train_data=(str(file),),
        streaming=streaming,
        batch_size=40,
        max_steps=8,
        skip_bad_records=True,
        output=tmp_path / "other",
    )
    train(config, report=said.append)
    notices = [record["notice"] for record in said if "notice" in record]
    assert "1 bad record was skipped:" in notices and any("some.jsonl:1" in line for line in notices)


@pytest.mark.parametrize("gradient_accumulation", [1, 2])
def test_a_resumed_run_ends_in_the_same_bits(make_config: Make, tmp_path: Path, gradient_accumulation: int) -> None:
    options = {"gradient_accumulation": gradient_accumulation}
    train(make_config(output=tmp_path / "straight", **options))
    config = make_config(output=tmp_path / "resumed", save_every=3, **options)
    with pytest.raises(Killed):
        train(config, at_step(5, kill))
    assert [p.name for p in (tmp_path / "resumed" / "state").glob("step-*")] == ["step-00000003"]
    facts = train(config)
    assert_same_weights(tmp_path / "straight", tmp_path / "resumed")
    records = metrics(tmp_path / "resumed")
    # Steps 4 and 5 were done twice, but are recorded once; so is the evaluation before the first step.
    assert [r["step"] for r in records if "loss" in r] == [1, 2, 3, 4, 5, 6]
    assert [r["step"] for r in records if "perplexity" in r] == [0, 4, 6]
    straight = {r["step"]: r["losses"] for r in metrics(tmp_path / "straight") if "loss" in r}
    assert {r["step"]: r["losses"] for r in records if "loss" in r} == straight
    assert facts["tokens"] == 6 * 2 * 48 * gradient_accumulation
    assert not (tmp_path / "resumed" / "state").exists()


TIMINGS = ("seconds", "tokens_per_second")


def untimed(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in record.items() if name not in TIMINGS} for record in records]


@pytest.mark.parametrize(
    "options",
    [
        {"exit_loss": "mixture", "exit_curriculum": "gradual", "exits_per_step": 1, "dropout_schedule": "uniform"},
        {"lora_rank": 2, "lora_alpha": 4.0, "anchor_weight": 0.5, "exit_weights": "quadratic"},
    ],
    ids=["mixture", "lora"],
)
@pytest.mark.parametrize("at", [4, 5], ids=["at an evaluation", "between two"])
def test_schedules_running_alpha_and_best_weights_survive_ctrl_c(
    make_config: Make, tmp_path: Path, options: dict[str, Any], at: int
) -> None:
    facts = train(make_config(output=tmp_path / "straight", eval_every=2, **options))
    config = make_config(output=tmp_path / "resumed", eval_every=2, **options)
    with pytest.raises(KeyboardInterrupt):
        train(config, at_step(at, lambda: os.kill(os.getpid(), signal.SIGINT)))
    again = train(config)
    assert_same_weights(tmp_path / "straight", tmp_path / "resumed")
    assert untimed([again]) == untimed([facts])
    assert untimed(metrics(tmp_path / "resumed")) == untimed(metrics(tmp_path / "straight"))
    assert {len(record["running_alpha"]) for record in metrics(tmp_path / "resumed")[-4:] if "loss" in record} == {3}


def test_the_best_weights_that_a_state_names_stay_until_a_later_state(
    make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The run gets worse at its end, so that what is saved are weights of an earlier step than the state's.
    monkeypatch.setattr("selfspec_tune.train.loop.learning_rate", lambda step, **_: 3e-3 if step < 5 else 10.0)
    options = {"eval_every": 1}
    facts = train(make_config(output=tmp_path / "straight", **options))
    config = make_config(output=tmp_path / "resumed", save_every=4, **options)
    with pytest.raises(Killed):
        train(config, at_step(6, kill))
    kept = sorted(path.name for path in (tmp_path / "resumed" / "state").glob("best-*"))
    again = train(config)
    assert facts["best_step"] < 6 and untimed([again]) == untimed([facts])
    assert kept and len(kept) <= 2
    assert_same_weights(tmp_path / "straight", tmp_path / "resumed")


def test_ctrl_c_finishes_the_step_saves_a_state_and_resumes(make_config: Make, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    config = make_config(output=tmp_path / "stopped")
    with pytest.raises(KeyboardInterrupt):
        train(config, at_step(4, lambda: os.kill(os.getpid(), signal.SIGINT)))
    assert signal.getsignal(signal.SIGINT) is before
    assert [p.name for p in (tmp_path / "stopped" / "state").glob("step-*")] == ["step-00000004"]
    assert not (tmp_path / "stopped" / "training.json").exists()
    train(config)
    train(make_config(output=tmp_path / "straight"))
    assert_same_weights(tmp_path / "straight", tmp_path / "stopped")


def test_a_state_being_written_when_the_process_died_is_not_used(make_config: Make, tmp_path: Path) -> None:
    config = make_config(save_every=2)
    with pytest.raises(Killed):
        train(config, at_step(3, kill))
    state = tmp_path / "out" / "state"
    (state / "incomplete").mkdir()
    (state / "incomplete" / "pytorch_model.bin").write_bytes(b"half")
    train(config)
    train(make_config(output=tmp_path / "straight"))
    assert_same_weights(tmp_path / "straight", tmp_path / "out")


def test_a_finished_run_is_not_repeated(make_config: Make, tmp_path: Path) -> None:
    config = make_config()
    facts = train(config)
    stamp = (tmp_path / "out" / "model.safetensors").stat().st_mtime_ns
    assert train(config, at_step(1, kill)) == facts
    assert (tmp_path / "out" / "model.safetensors").stat().st_mtime_ns == stamp


@pytest.mark.parametrize("finish", [True, False])
def test_another_run_in_the_same_output_is_refused_by_name(make_config: Make, finish: bool) -> None:
    config = make_config(save_every=2)
    if finish:
        train(config)
    else:
        with pytest.raises(Killed):
            train(config, at_step(3, kill))
    with pytest.raises(UserError) as caught:
        train(replace(config, learning_rate=5e-3, seed=4))
    text = str(caught.value)
    assert "learning_rate, seed" in text and "0.005" in text and "--output" in text
    train(replace(config, save_every=1, json=True, max_minutes=60.0))


def test_a_run_recorded_before_an_option_was_known_is_the_same_run(make_config: Make, tmp_path: Path) -> None:
    config = make_config(max_steps=1)
    facts = train(config)
    for name in ("method", "lora_rank", "lora_targets", "over_budget", "general_data"):
        del facts["config"][name]
    (tmp_path / "out" / "training.json").write_text(json.dumps(facts))
    assert train(config, at_step(1, kill)) == facts
    with pytest.raises(UserError, match="other options: over_budget"):
        train(replace(config, over_budget="lower"))


def test_changed_data_are_refused_on_resume(make_config: Make, tmp_path: Path, jsonl: Callable[..., Path]) -> None:
    file = jsonl(tmp_path / "t.jsonl", [{"text": f"sentence number {n} of the text"} for n in range(60)])
    config = make_config(train_data=(str(file),), save_every=2)
    with pytest.raises(Killed):
        train(config, at_step(3, kill))
    jsonl(file, [{"text": f"another sentence {n} of the text"} for n in range(60)])
    with pytest.raises(UserError, match="data"):
        train(config)


def test_a_checkpoint_of_someone_else_is_not_overwritten(make_config: Make, tiny: Path) -> None:
    with pytest.raises(UserError, match="not ours"):
        train(make_config(output=tiny))


def test_max_minutes_ends_the_run_with_a_checkpoint(make_config: Make, tmp_path: Path) -> None:
    facts = train(make_config(max_minutes=1e-9, max_steps=1000))
    assert (facts["steps"], facts["stopped_by"]) == (1, "max_minutes")
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_max_minutes_counts_the_time_before_a_resume(make_config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    def monotonic() -> float:
        clock[0] += 1e-3
        return clock[0]

    def a_minute(stage: str, done: int, total: int) -> None:
        clock[0] += 60.0 if stage == "train" else 0.0
        if done == 2 and stage == "train":
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr("selfspec_tune.train.loop.time.monotonic", monotonic)
    config = make_config(max_minutes=3.5)
    with pytest.raises(KeyboardInterrupt):
        train(config, a_minute)
    clock[0] = 100_000.0
    facts = train(config, a_minute)
    # A step is timed before its minute passes: 0, 1, 2, 3 and 4 minutes are seen after steps 1 to 5.
    assert (facts["steps"], facts["stopped_by"]) == (5, "max_minutes")


def test_a_diverging_run_stops(make_config: Make) -> None:
    with pytest.raises(UserError, match="at step"):
        train(make_config(learning_rate=1e30, warmup_steps=0, max_grad_norm=1e30, max_steps=20))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"model": None}, "--model"),
        ({"output": None}, "--output"),
        ({"train_data": ()}, "--train-data"),
        ({"batch_size": 0}, "batch_size"),
        ({"sequence_length": 1}, "sequence_length"),
        ({"sequence_length": 1000}, "sequence_length"),
        ({"exit_loss_weight": 1.5}, "exit_loss_weight"),
        ({"layer_dropout": 1.0}, "layer_dropout"),
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"max_minutes": 0.0}, "max_minutes"),
        ({"exits": (4,)}, "exit 4"),
        ({"device": "gpu"}, "device"),
    ],
)
def test_options_that_cannot_work_are_user_errors(make_config: Make, options: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError) as caught:
        train(make_config(**options))
    assert named in str(caught.value)


def test_wandb_without_the_package_is_a_user_error(make_config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selfspec_tune.train.options.importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="wandb"):
        train(make_config(tracker="wandb"))


def test_mixed_precision_auto_is_bf16_only_where_the_cpu_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, "avx512_bf16": False}, raising=False)
    assert mixed_precision("auto", cpu) == "no"
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True}, raising=False)
    assert mixed_precision("auto", cpu) == "bf16"
    assert mixed_precision("no", cpu) == "no" and mixed_precision("bf16", cpu) == "bf16"


def test_a_second_card_is_left_to_cuda_visible_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selfspec_tune.train.environment.resolve_device", torch.device)
    with pytest.raises(UserError, match="CUDA_VISIBLE_DEVICES=1"):
        training_device("cuda:1")
    assert training_device("cuda").type == "cuda"


def test_every_step_reads_the_next_sequences(make_config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    from selfspec_tune.train.data import Sequences

    read: list[tuple[int, int]] = []
    batch = Sequences.batch

    def spy(self: Sequences, first: int, count: int, *, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        read.append((first, count))
        return batch(self, first, count, seed=seed)

    monkeypatch.setattr(Sequences, "batch", spy)
    train(make_config(max_steps=2, gradient_accumulation=2))
    assert read == [(0, 2), (2, 2), (4, 2), (6, 2)]
