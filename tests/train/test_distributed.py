"""Two processes over half batches train the model that one process over whole batches trains."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
from pathlib import Path
from selfspec_tune.config import TrainConfig
from selfspec_tune.train.loop import train
model, data, output, batch_size = sys.argv[1:]
train(TrainConfig(
    model=model, output=Path(output), train_data=(data + "/train.jsonl",), eval_data=(data + "/heldout.jsonl",),
    device="cpu", sequence_length=48, batch_size=int(batch_size), max_steps=4, exits=(1, 3), layer_dropout=0.5,
    eval_sequences=4, save_every=2,
))
"""


def run(program: Path, processes: int, *arguments: str) -> None:
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)] if processes > 1 else []
    )
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    command = [sys.executable, *launcher, str(program), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


def losses(output: Path) -> list[float]:
    records: list[dict[str, Any]] = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if "loss" in record]


def test_two_processes_train_as_one_with_dropped_layers(tiny: Path, corpus: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    run(program, 1, str(tiny), str(corpus), str(tmp_path / "one"), "4")
    run(program, 2, str(tiny), str(corpus), str(tmp_path / "two"), "2")
    # fp32 gradients averaged in another order; Adam makes more of it at every step.
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)
    one, two = (json.loads((tmp_path / name / "training.json").read_text()) for name in ("one", "two"))
    assert two["perplexity_after"] == pytest.approx(one["perplexity_after"], rel=1e-3)
    assert two["tokens"] == one["tokens"]
