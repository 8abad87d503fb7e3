"""Time a training step with exits, and one that drops layers too, against plain fine-tuning steps on the same batch.

One process, in turn, so that a busy machine slows all alike. A step is forward, backward, clipping and AdamW. The arms:

    plain         the final layer's cross entropy only, all layers: our own forward and fused loss
    transformers  the same by transformers: its forward, its logits, its loss
    exits         the exits of the step too, in rotation
    dropout       the exits of the step too, and layers dropped

The result is the median over rounds of an arm's time ÷ plain's in the same round, with quartiles; below 1 it is cheaper
than plain fine-tuning. `layers` counts the calls of layers, so that a dropped one is seen not to be run.

    python scripts/bench_train_step.py MODEL [--rounds 8] [--batch-size 4] [--length 512] [--counted 0.6] [--json]
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any

import torch
import transformers

from selfspec_tune.config import TrainConfig
from selfspec_tune.errors import UserError
from selfspec_tune.model.load import load_model
from selfspec_tune.train.environment import make_accelerator
from selfspec_tune.train.methods import LayerSkip, Start
from selfspec_tune.train.schedule import active_exits, draw_dropped, resolve_exits

Forward = Callable[[int], torch.Tensor]
"""Round → a loss with gradients."""
ARMS = ("plain", "transformers", "exits", "dropout")


class Steps:
    """Steps of one model on one batch, in every arm, with the trainer's own module, accelerator and optimiser."""

    def __init__(self, options: argparse.Namespace) -> None:
        config = TrainConfig(
            model=options.model,
            output=Path("unused"),
            device=options.device,
            mixed_precision=options.mixed_precision,
            layer_dropout=options.dropout,
            dropout_schedule=options.dropout_schedule,
            exit_loss=options.exit_loss,
            freeze_embeddings=options.freeze_embeddings,
            lora_rank=options.lora_rank,
            gradient_checkpointing=options.gradient_checkpointing,
        )
        model = load_model(options.model, device="cpu")
        self.exits = resolve_exits(options.exits, len(model.model.layers))
        self.exits_per_step, self.mixture = options.exits_per_step, options.exit_loss == "mixture"
        self.accelerator = make_accelerator(config)
        method = LayerSkip(Start(config, model, options.model, self.exits, model.dtype, self.accelerator))
        self.probabilities, self.generator = method.drop_probabilities, torch.Generator().manual_seed(0)
        trained = [weight for weight in method.module.parameters() if weight.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-6, betas=(0.9, 0.95), fused=True)
        self.module, self.optimizer = self.accelerator.prepare(method.module.train(), optimizer)
        self.model = self.accelerator.unwrap_model(self.module).model
        shape = (options.batch_size, options.length)
        self.ids = torch.randint(model.config.vocab_size, shape, device=self.accelerator.device)
        # As in a chat: the question first, and no loss on it.
        self.counted = torch.arange(options.length, device=self.ids.device) >= options.length * (1 - options.counted)
        self.counted = self.counted.expand_as(self.ids).contiguous()
        self.calls = 0
        for layer in self.model.model.layers:
            layer.register_forward_hook(self._count)

    def arms(self) -> dict[str, Forward]:
        """Return the arms' forward passes by name."""
        return {
            "plain": lambda _: self.loss((), frozenset()),
            "transformers": self._transformers,
            "exits": lambda turn: self.loss(self._active(turn), frozenset()),
            "dropout": lambda turn: self.loss(self._active(turn), draw_dropped(self.probabilities, self.generator)),
        }

    def loss(self, exits: tuple[int, ...], dropped: frozenset[int]) -> torch.Tensor:
        """Return the loss of our module."""
        mixture = (0.5,) * len(exits) if self.mixture else None
        loss: torch.Tensor = self.module(self.ids, self.counted, exits, dropped, mixture=mixture)[0]
        return loss

    def time(self, forward: Forward, turn: int) -> tuple[float, int]:
        """Do one step; return its seconds and the number of layers called in the forward pass."""
        self._synchronise()
        self.calls, begin = 0, time.perf_counter()
        loss = forward(turn)
        calls = self.calls
        self.accelerator.backward(loss)
        self.accelerator.clip_grad_norm_(self.module.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._synchronise()
        return time.perf_counter() - begin, calls

    def _transformers(self, _: int) -> torch.Tensor:
        with self.accelerator.autocast():
            labels = self.ids.masked_fill(~self.counted, -100)
            loss: torch.Tensor = self.model(input_ids=self.ids, labels=labels, use_cache=False).loss
        return loss

    def _active(self, turn: int) -> tuple[int, ...]:
        return active_exits(self.exits, self.exits_per_step, turn)

    def _count(self, *_: Any) -> None:
        self.calls += 1

    def _synchronise(self) -> None:
        if self.accelerator.device.type == "cuda":
            torch.cuda.synchronize()


def alternate(steps: Steps, rounds: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Return seconds per step of every arm, one per round, and the mean number of layers called. One round warms up."""
    arms = steps.arms()
    times: dict[str, list[float]] = {name: [] for name in ARMS}
    layers: dict[str, list[int]] = {name: [] for name in ARMS}
    for turn in range(-1, rounds):
        # Every other round runs backwards: what an arm leaves in the caches is not always found by the same one.
        for name in ARMS if turn % 2 else reversed(ARMS):
            seconds, calls = steps.time(arms[name], turn)
            if turn >= 0:
                times[name].append(seconds)
                layers[name].append(calls)
    return times, {name: mean(calls) for name, calls in layers.items()}


def summarise(times: dict[str, list[float]]) -> dict[str, Any]:
    """Return medians in seconds, and quartiles [lower, median, upper] of arm ÷ plain, paired by round."""
    ratios = {}
    for name in ARMS[1:]:
        paired = [mine / plain for mine, plain in zip(times[name], times["plain"], strict=True)]
        ratios[name] = quantiles(paired, n=4, method="inclusive") if len(paired) > 1 else paired * 3
    return {"seconds": {name: median(values) for name, values in times.items()}, "over_plain": ratios}


def bench(options: argparse.Namespace) -> dict[str, Any]:
    """Load, measure and summarise."""
    if min(options.rounds, options.batch_size, options.exits_per_step) < 1 or options.length < 2:
        raise UserError("rounds, batch-size and exits-per-step must be 1 or more, length 2 or more")
    if not 0 < options.counted <= 1:
        raise UserError(f"--counted is a share of the tokens, above 0 and at most 1; it was {options.counted}")
    steps = Steps(options)
    times, layers = alternate(steps, options.rounds)
    device = steps.accelerator.device
    return {
        **summarise(times),
        "layers": layers,
        "rounds": options.rounds,
        "exits": list(steps.exits),
        "measured_on": {
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
            "mixed_precision": steps.accelerator.mixed_precision,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        **{name: getattr(options, name) for name in ("batch_size", "length", "exits_per_step", "exit_loss", "dropout")},
        **{name: getattr(options, name) for name in ("dropout_schedule", "freeze_embeddings", "lora_rank", "counted")},
    }


def show(result: dict[str, Any]) -> None:
    """Print the result for people."""
    print(", ".join(f"{name} {value}" for name, value in result["measured_on"].items()))
    print(
        f"batch {result['batch_size']} x {result['length']}, loss on {result['counted']:.0%} of it, "
        f"exits {result['exits']}, {result['exits_per_step']} a step, {result['exit_loss']}, "
        f"dropout {result['dropout']} {result['dropout_schedule']}, "
        f"LoRA rank {result['lora_rank']}, embeddings {'frozen' if result['freeze_embeddings'] else 'trained'}"
    )
    for name, seconds in result["seconds"].items():
        line = f"{name:>12}: {seconds:8.3f} s a step, {result['layers'][name]:5.1f} layers"
        if name in result["over_plain"]:
            low, middle, high = result["over_plain"][name]
            line += f", {name} / plain {middle:.3f} (quartiles {low:.3f} to {high:.3f})"
        print(line)


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line and run; a UserError is exit code 2."""
    parser = argparse.ArgumentParser(description="Time training steps with exits against plain fine-tuning steps.")
    parser.add_argument("model", help="checkpoint directory or hub name")
    parser.add_argument("--rounds", type=int, default=8, help="[default: %(default)s]")
    parser.add_argument("--batch-size", type=int, default=4, help="[default: %(default)s]")
    parser.add_argument("--length", type=int, default=512, help="[default: %(default)s]")
    parser.add_argument(
        "--counted", type=float, default=1.0, help="share of the tokens with a loss, as in chats [default: %(default)s]"
    )
    parser.add_argument("--exits", type=exit_list, default=(0.2, 0.33, 0.5, 0.7), help="[default: %(default)s]")
    parser.add_argument("--exits-per-step", type=int, default=1, help="[default: %(default)s]")
    parser.add_argument("--exit-loss", default="kl", choices=["kl", "ce", "tv", "mixture"])
    parser.add_argument("--dropout", type=float, default=0.2, help="p_max [default: %(default)s]")
    parser.add_argument("--dropout-schedule", default="exponential", choices=["exponential", "uniform"])
    parser.add_argument("--freeze-embeddings", action="store_true")
    parser.add_argument("--lora-rank", type=int, default=0, help="0 trains the weights [default: %(default)s]")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--mixed-precision", default="auto", choices=["auto", "bf16", "no"])
    parser.add_argument("--device", default="auto", help="[default: %(default)s]")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    try:
        result = bench(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(result))
    else:
        show(result)
    return 0


def exit_list(text: str) -> tuple[float, ...]:
    """Read exits given with commas."""
    return tuple(float(part) for part in text.split(","))


if __name__ == "__main__":
    sys.exit(main())
