"""Measure the peak memory of the loss over exits against that of the final layer's loss alone.

Each is run forward and backward in a process of its own. Counted is every tensor alive at once: the LM head, its
gradient, the hidden states, their gradients and all that the loss makes on its way. On a CPU every allocation and
release of PyTorch's allocator is counted, those inside of its operations too, and the process's resident peak is shown
beside it; on a GPU `torch.cuda.max_memory_allocated` is read.

The exits' hidden states are inputs of the layers after them, which keep them for their own backward pass whether or
not there is a loss on them. So both runs hold them; the ratio with a final layer that stands alone is printed too.

A step over all tokens of the default size is 65 TFLOP. With `--counted N` only N tokens have a target. Everything has
the same size then and a chunk is computed as before, but there are fewer of them, so the peak is the same.
`--unfused` adds the same loss written out with whole logits: for small sizes only.

    python scripts/bench_exit_loss.py [--counted 390] [--kind kl] [--dtype float32] [--device cuda] [--json]

Exit code 1: the ratio is above `--most`.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from selfspec_tune.train.loss import IGNORED, Kind, chunk_size, early_exit_loss

RUNS = ("final", "exits", "unfused")


@dataclass(frozen=True)
class Size:
    """What is measured; see the options of the command."""

    exits: int = 4
    tokens: int = 8192
    vocabulary: int = 128256
    hidden_size: int = 2048
    kind: Kind = "kl"
    dtype: str = "float32"
    device: str = "cpu"
    autocast: bool = False
    frozen_head: bool = False
    counted: int | None = None
    chunk: int | None = None

    @property
    def layer_bytes(self) -> int:
        """Of the hidden states of a layer."""
        return self.tokens * self.hidden_size * getattr(torch, self.dtype).itemsize


def step(size: Size, run: str) -> None:
    """Make the inputs of a loss, all layers' hidden states included, and run it forward and backward."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"dtype": getattr(torch, size.dtype), "device": size.device}
    shape = (size.tokens, size.hidden_size)
    hidden = [torch.randn(shape, **options).requires_grad_() for _ in range(1 + size.exits)]
    head = torch.randn(size.vocabulary, size.hidden_size, **options).mul_(size.hidden_size**-0.5)
    head.requires_grad_(not size.frozen_head)
    norm = nn.RMSNorm(size.hidden_size, eps=1e-5, **options)
    targets = torch.randint(0, size.vocabulary, shape[:1], device=size.device)
    if size.counted is not None:
        targets[size.counted :] = IGNORED
    layers = hidden[:1] if run == "final" else hidden
    shares = [1.0] if run == "final" else [0.5, *[0.5 / size.exits] * size.exits]
    loss = unfused if run == "unfused" else fused
    with torch.autocast(size.device, dtype=torch.bfloat16, enabled=size.autocast):
        total = loss(layers, head, targets, shares, norm, size)
    total.backward()


def fused(
    layers: list[Tensor], head: Tensor, targets: Tensor, shares: list[float], norm: nn.Module, size: Size
) -> Tensor:
    """The loss of the trainer."""
    mixture = [0.5] * size.exits
    options: dict[str, Any] = {"kind": size.kind, "mixture": mixture[: len(layers) - 1], "chunk": size.chunk}
    return early_exit_loss(layers, head, targets, shares=shares, norm=norm, **options)[0]


def unfused(
    layers: list[Tensor], head: Tensor, targets: Tensor, shares: list[float], norm: nn.Module, size: Size
) -> Tensor:
    """The loss of kind kl with the logits [tokens, V] of every layer, through autograd."""
    counted = targets != IGNORED
    log_q = [(norm(each[counted]) @ head.t()).log_softmax(-1) for each in layers]
    losses = [nn.functional.nll_loss(log_q[0], targets[counted])]
    losses += [
        nn.functional.kl_div(each, log_q[0].detach(), log_target=True, reduction="batchmean") for each in log_q[1:]
    ]
    return torch.stack([share * loss for share, loss in zip(shares, losses, strict=True)]).sum()


def peak_bytes(work: Callable[[], None], device: str) -> int:
    """Return the most bytes alive at once of what `work` allocates."""
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    from torch.profiler import ProfilerActivity, profile

    # What was allocated before must not be released meanwhile.
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    assert profiler.profiler is not None
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def measure(size: Size, run: str) -> dict[str, Any]:
    """Measure one run in this process."""
    resident, seconds = resident_peak(), 0.0

    def timed() -> None:
        nonlocal seconds
        begin = time.perf_counter()
        step(size, run)
        seconds = time.perf_counter() - begin

    peak = peak_bytes(timed, size.device)
    return {
        "peak_bytes": peak,
        "resident_bytes": resident_peak() - resident if size.device == "cpu" else None,
        "seconds": seconds,
    }


def resident_peak() -> int:
    """Return the peak of this process's resident memory in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def ratios(size: Size, final: int, exits: int) -> dict[str, float]:
    """Return peaks of a run with exits over those of the final layer, with and without the exits' hidden states."""
    return {"ratio": exits / final, "ratio_to_final_alone": exits / (final - size.exits * size.layer_bytes)}


def show(size: Size, result: dict[str, Any]) -> None:
    """Print the result for people."""
    print(
        f"{size.exits} exits, {size.tokens} tokens, V = {size.vocabulary}, d = {size.hidden_size}, kind {size.kind}, "
        f"{size.dtype}{', bf16 autocast' if size.autocast else ''}{', frozen head' if size.frozen_head else ''}, "
        f"{result['measured_on']}, torch {torch.__version__}"
    )
    counted, chunk = size.counted or size.tokens, result["chunk"]
    if counted < size.tokens:
        part = f"{-(-counted // chunk)} of {-(-size.tokens // chunk)} chunks were computed, all of one size"
        print(f"{counted} tokens have a target: {part}; every tensor of all tokens exists")
    head = size.vocabulary * size.hidden_size * getattr(torch, size.dtype).itemsize
    print(f"head {head / 1e6:.0f} MB, its gradient as much; hidden states of a layer {size.layer_bytes / 1e6:.0f} MB")
    for name, values in result["runs"].items():
        resident = values["resident_bytes"]
        beside = "" if resident is None else f", resident {resident / 1e6:7.0f} MB"
        print(f"{name:>8}: peak {values['peak_bytes'] / 1e6:7.0f} MB{beside}, {values['seconds']:.0f} s")
    print(f"ratio {result['ratio']:.3f}; hidden states of {1 + size.exits} layers in both")
    print(f"ratio {result['ratio_to_final_alone']:.3f} to a final layer alone, without the exits' hidden states")


def main(arguments: list[str] | None = None) -> int:
    """Measure every run in a fresh process and print the ratio."""
    parser = argparse.ArgumentParser(description="Measure the peak memory of the loss over exits.")
    parser.add_argument("--exits", type=int, default=Size.exits, help="[default: %(default)s]")
    parser.add_argument("--tokens", type=int, default=Size.tokens, help="[default: %(default)s]")
    parser.add_argument("--vocabulary", type=int, default=Size.vocabulary, help="[default: %(default)s]")
    parser.add_argument("--hidden-size", type=int, default=Size.hidden_size, help="[default: %(default)s]")
    parser.add_argument("--kind", default=Size.kind, choices=["kl", "ce", "tv", "mixture"])
    parser.add_argument("--dtype", default=Size.dtype, choices=["float32", "bfloat16"])
    parser.add_argument("--device", default=Size.device, help="[default: %(default)s]")
    parser.add_argument("--autocast", action="store_true", help="products in bf16")
    parser.add_argument("--frozen-head", action="store_true", help="no gradient of the LM head")
    parser.add_argument("--counted", type=int, help="how many tokens have a target [default: all]")
    parser.add_argument("--chunk", type=int, help="tokens per chunk [default: the trainer's]")
    parser.add_argument("--unfused", action="store_true", help="measure whole logits too; small sizes only")
    parser.add_argument("--most", type=float, default=1.15, help="largest ratio that passes [default: %(default)s]")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--run", choices=RUNS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    size = Size(**{name: getattr(options, name) for name in Size.__dataclass_fields__})
    if options.run:
        print(json.dumps(measure(size, options.run)))
        return 0
    result = bench(size, RUNS if options.unfused else RUNS[:2], sys.argv[1:] if arguments is None else arguments)
    if options.json:
        print(json.dumps(result))
    else:
        show(size, result)
    return 0 if result["ratio"] <= options.most else 1


def bench(size: Size, runs: tuple[str, ...], arguments: list[str]) -> dict[str, Any]:
    """Measure each run in a process of its own."""
    measured = {}
    # The profiler says that it starts and stops.
    environment = {**os.environ, "KINETO_LOG_LEVEL": "99"}
    for run in runs:
        command = [sys.executable, __file__, *arguments, "--run", run]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
        measured[run] = json.loads(done.stdout.splitlines()[-1])
    device = torch.cuda.get_device_name(size.device) if size.device != "cpu" else "CPU"
    return {
        **ratios(size, measured["final"]["peak_bytes"], measured["exits"]["peak_bytes"]),
        "runs": measured,
        "chunk": size.chunk or chunk_size(torch.empty(size.vocabulary, 0)),
        "measured_on": device,
    }


if __name__ == "__main__":
    sys.exit(main())
