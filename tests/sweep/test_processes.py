"""Two processes share a sweep's prompts and find what one finds; an error of the main one ends both."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from selfspec_tune.sweep.processes import Processes

ROOT = Path(__file__).parents[2]
OPTIONS = ["--num-prompts", "5", "--max-new-tokens", "12", "--max-draft-tokens", "2", "--context-lengths", "40"]
OPTIONS += ["--repeats", "2", "--confirm", "1", "--drafters", "layer-skip,copy", "--numerics", "fast", "--json"]


def run(processes: int, *arguments: object) -> subprocess.CompletedProcess[str]:
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m"]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    command = [sys.executable, "-m", *(launcher if processes > 1 else []), "selfspec_tune", "sweep-exit"]
    command += list(map(str, arguments))
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def test_two_processes_find_what_one_finds(own_checkpoint: Path, prompts: Path, kept_here: Path) -> None:
    runs = [run(count, own_checkpoint, "--prompts", prompts, *OPTIONS) for count in (1, 2)]
    assert [done.returncode for done in runs] == [0, 0], runs[1].stderr[-3000:]
    one, two = (json.loads(done.stdout) for done in runs)  # the main process alone prints
    assert two["alpha_by_exit"] == one["alpha_by_exit"]
    names = ("exit_layer", "num_draft_tokens", "alpha", "tokens_per_round")  # costs are measured anew
    cells = [[[cell[name] for name in names] for cell in found["cells"]] for found in (one, two)]
    assert len(cells[0]) == 6 and cells[1] == cells[0]
    assert two["artifact"]["eval_set"] == one["artifact"]["eval_set"]
    assert {c["label"] for c in two["candidates"]} >= {"copy"}
    assert list(kept_here.iterdir()) == []


def test_an_error_of_the_main_process_ends_all(own_checkpoint: Path, prompts: Path, tmp_path: Path) -> None:
    costs = tmp_path / "costs.json"
    costs.write_text('{"measured_for": {"numerics": "exact"}}')
    done = run(2, own_checkpoint, "--prompts", prompts, *OPTIONS, "--costs", costs)
    assert done.returncode != 0 and done.stdout == ""
    # Each process says so and leaves with 2 by itself; none waits until the launcher ends it.
    assert done.stderr.count(f"error: {costs} was measured for something else") == 2, done.stderr[-3000:]


class Alone(Processes):
    """A process as if it were number `rank` of `count`."""

    def __init__(self, rank: int, count: int) -> None:
        super().__init__()
        self.rank, self.count = rank, count


@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize("items", [0, 1, 5, 6])
def test_shares_come_back_in_order(count: int, items: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate import utils

    shares = [Alone(rank, count).share(range(items)) for rank in range(count)]
    assert sorted(item for share in shares for item in share) == list(range(items))
    monkeypatch.setattr(utils, "gather_object", lambda _own: shares)
    assert Alone(0, count).gather(shares[0]) == list(range(items))


def test_a_single_process_does_all_itself() -> None:
    alone = Processes()
    assert alone.main and alone.from_main(lambda: "made") == "made"
    assert alone.device("cpu") == "cpu" and alone.gather([1, 2]) == alone.share([1, 2]) == [1, 2]
    alone.leave()
