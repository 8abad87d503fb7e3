"""Two processes train the model that one process trains on the same batches, copied on each or sharded over both."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor  # forks need not load what is loaded here
from forked import fork, needs_fork, run_ranks, wait

from selfspec_tune.config import TrainConfig
from selfspec_tune.train.loop import train

Make = Callable[..., TrainConfig]
ROOT = Path(__file__).parents[2]
SHARDED = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
HARD: dict[str, Any] = {
    "layer_dropout": 0.5,
    "gradient_accumulation": 2,
    "gradient_checkpointing": True,
    "exits": (1, 3),
    "exits_per_step": 1,
    "dtype": "bfloat16",  # so that evaluations round the weights for a while
    "max_steps": 6,
    "eval_every": 2,
    "eval_sequences": 4,
    "save_every": 100,
    "max_perplexity_increase": "1000%",
}


def metrics(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def values(output: Path, name: str) -> list[Any]:
    return [record[name] for record in metrics(output) if name in record]


def logs(directory: Path) -> str:
    return "\n".join(path.read_text()[-3000:] for path in sorted(directory.glob("*.log")))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, tiny: Path, corpus: Path) -> Path:
    """The output of one process that reads whole batches of 4."""
    directory = tmp_path_factory.mktemp("alone")
    config = TrainConfig(
        model=str(tiny),
        output=directory / "out",
        train_data=(str(corpus / "train.jsonl"),),
        eval_data=(str(corpus / "heldout.jsonl"),),
        device="cpu",
        sequence_length=48,
        batch_size=4,
        anchor_data=(str(corpus / "train.jsonl"),),
        anchor_batch_size=2,
        warmup_steps=2,
        learning_rate=1e-3,
        **HARD,
    )
    codes = wait([fork(lambda: train(config), directory / "rank.log")])
    assert codes == [0], logs(directory)
    return directory / "out"


@needs_fork
@pytest.mark.parametrize("environment", [{}, SHARDED], ids=["ddp", "fsdp2"])
def test_two_processes_stopped_and_resumed_train_as_one(
    make_config: Make, tmp_path: Path, corpus: Path, alone: Path, environment: dict[str, str]
) -> None:
    config = make_config(batch_size=2, anchor_data=(str(corpus / "train.jsonl"),), **HARD)
    output = Path(str(config.output))

    def stopped(rank: int) -> None:
        def progress(stage: str, done: int, total: int) -> None:
            if (stage, done, rank) == ("train", 3, 1):  # one rank alone hears of it
                os.kill(os.getpid(), signal.SIGTERM)

        train(config, progress)

    assert run_ranks(stopped, 2, tmp_path, environment) == [143, 143], logs(tmp_path)
    (state,) = (output / "state").glob("step-*")
    assert state.name == "step-00000003"
    assert (state / "pytorch_model_fsdp_0").is_dir() == bool(environment)  # sharded indeed
    assert run_ranks(lambda rank: train(config), 2, tmp_path, environment) == [0, 0], logs(tmp_path)

    # fp32 sums of gradients in another order, which differ by some 1e-7; Adam makes more of it at every step. Other
    # layers dropped, a lost moment or a weight left rounded to bf16 show from 1e-3 on.
    assert values(output, "loss") == pytest.approx(values(alone, "loss"), rel=1e-5)
    assert values(output, "gradient_norm") == pytest.approx(values(alone, "gradient_norm"), rel=1e-4)
    assert values(output, "layers_dropped") == values(alone, "layers_dropped")
    assert any(values(output, "layers_dropped"))
    # A weight on the border between two bf16 numbers may be rounded to either.
    assert values(output, "perplexity") == pytest.approx(values(alone, "perplexity"), rel=1e-4)
    one, two = (json.loads((path / "training.json").read_text()) for path in (alone, output))
    assert (two["tokens"], two["steps"], two["best_step"]) == (one["tokens"], one["steps"], one["best_step"])
    assert_same_checkpoint(output, alone)


@needs_fork
def test_two_processes_train_adapters_and_scale_them_back_as_one(
    make_config: Make, tmp_path: Path, corpus: Path, learnt: Path, digits: Path
) -> None:
    """With the base in the same weights, an anchor's pass, and a budget that the last weights are beyond."""
    kinds = {"alone": (1, {}), "ddp": (2, {}), "fsdp2": (2, SHARDED)}
    changes: dict[str, Any] = {
        "model": str(learnt),
        "lora_rank": 4,
        "anchor_data": (str(corpus / "train.jsonl"),),
        "general_data": (str(digits),),
        "learning_rate": 3e-2,
        "over_budget": "shrink",
        "max_perplexity_increase": "10%",
        "layer_dropout": 0.2,
        "eval_every": 100,
    }
    outputs = {name: tmp_path / name / "out" for name in kinds}
    for name, (ranks, environment) in kinds.items():
        sizes = {"batch_size": 4 // ranks, "anchor_batch_size": 2 // ranks, "output": outputs[name]}
        config = make_config(**{**HARD, **changes, **sizes})
        outputs[name].parent.mkdir()
        codes = run_ranks(lambda rank, config=config: train(config), ranks, tmp_path / name, environment)
        assert codes == [0] * ranks, logs(tmp_path / name)
    for name in ("ddp", "fsdp2"):
        assert values(outputs[name], "loss") == pytest.approx(values(outputs["alone"], "loss"), rel=1e-5)
        assert values(outputs[name], "share_kept") == values(outputs["alone"], "share_kept") != []
        assert_same_checkpoint(outputs[name], outputs["alone"])


def assert_same_checkpoint(output: Path, other: Path) -> None:
    from safetensors.torch import load_file

    left, right = load_file(output / "model.safetensors"), load_file(other / "model.safetensors")
    assert left.keys() == right.keys()  # tied weights are written once
    for name, weight in left.items():
        assert weight.dtype == torch.bfloat16 and weight.shape == right[name].shape
        torch.testing.assert_close(weight.float(), right[name].float(), rtol=2**-7, atol=1e-4, msg=name)


@needs_fork
def test_the_state_of_another_kind_of_run_is_refused_by_name(make_config: Make, tmp_path: Path) -> None:
    config = make_config(max_steps=2, eval_sequences=2)

    def stop(stage: str, done: int, total: int) -> None:
        if (stage, done) == ("train", 1):
            os.kill(os.getpid(), signal.SIGTERM)

    assert wait([fork(lambda: train(config, stop), tmp_path / "rank.log")]) == [143], logs(tmp_path)
    assert run_ranks(lambda rank: train(config), 2, tmp_path, SHARDED) == [70, 70]
    text = (tmp_path / "rank0.log").read_text()
    assert "distribution, processes" in text and "'FSDP'" in text, text


@needs_fork
@pytest.mark.parametrize(
    ("environment", "options", "named"),
    [
        ({**SHARDED, "FSDP_VERSION": "1"}, {}, "--fsdp_version 2"),
        (
            SHARDED,
            {"method": "exit-head", "exits": (1,), "exits_per_step": 1, "layer_dropout": 0.1},
            "nothing to shard",
        ),
    ],
)
def test_kinds_of_sharding_that_cannot_be_done_are_user_errors(
    make_config: Make, tmp_path: Path, environment: dict[str, str], options: dict[str, Any], named: str
) -> None:
    assert run_ranks(lambda rank: train(make_config(**options)), 2, tmp_path, environment) == [70, 70]
    assert "UserError" in logs(tmp_path) and named in logs(tmp_path)


def test_accelerate_launch_shards_on_the_cpu_and_one_rank_speaks(tiny: Path, corpus: Path, tmp_path: Path) -> None:
    launch = "-m accelerate.commands.launch --use_fsdp --fsdp_version 2 --num_processes 2 --main_process_port 0"
    options = "--device cpu --sequence-length 48 --batch-size 2 --max-steps 2 --exits 1,3 --eval-sequences 2"
    files = ["--model", tiny, "--output", tmp_path / "o", "--train-data", corpus / "train.jsonl"]
    budget = ["--eval-data", corpus / "heldout.jsonl", "--max-perplexity-increase", "1000%", "--json"]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [
            sys.executable,
            *launch.split(),
            "-m",
            "selfspec_tune",
            "train",
            *map(str, [*files, *budget]),
            *options.split(),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert (tmp_path / "o" / "training.json").is_file(), done.stderr[-3000:]
    facts = json.loads(done.stdout)
    assert facts == json.loads((tmp_path / "o" / "training.json").read_text())
    assert facts["tokens"] == 2 * 2 * 2 * 48
    assert (tmp_path / "o" / "model.safetensors").is_file()
