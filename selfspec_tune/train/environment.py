"""Where a run happens: the accelerate setup, the device, what `mixed_precision: auto` means, and signals to stop."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from selfspec_tune.config import TrainConfig
from selfspec_tune.errors import UserError
from selfspec_tune.model.load import resolve_device
from selfspec_tune.train.sharding import check_sharding, shard_on_cpu
from selfspec_tune.train.trackers import tracker_folder


def make_accelerator(config: TrainConfig) -> Any:
    """Return the Accelerator of a run, with Python's, NumPy's and torch's generators seeded.

    Raises:
        UserError: `accelerate launch` asked for a kind of sharding that this training cannot do.
    """
    from accelerate import Accelerator, DistributedDataParallelKwargs
    from accelerate.utils import GradientAccumulationPlugin, ProjectConfiguration, set_seed

    device = training_device(config.device)
    drops_layers = config.method == "layer-skip" and config.layer_dropout > 0
    if "FSDP_CPU_RAM_EFFICIENT_LOADING" in os.environ:
        # All ranks read the whole model: what a rank keeps outside the sharded module must not be empty on the others.
        os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    events = str(tracker_folder(Path(str(config.output)), config.method)) if config.tracker == "tensorboard" else None
    accelerator = Accelerator(
        cpu=device.type == "cpu",
        mixed_precision=mixed_precision(config.mixed_precision, device),
        # Shards accumulate in shards: without a reduction after every pass each rank would hold all gradients whole.
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=num_passes(config), sync_each_batch=os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
        ),
        log_with=None if config.tracker == "none" else config.tracker,
        project_config=ProjectConfiguration(project_dir=events, logging_dir=events),
        # A dropped layer has no gradient, and the reducer must not wait for one.
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=drops_layers)],
    )
    shard_on_cpu(accelerator)
    check_sharding(accelerator, config)
    set_seed(config.seed)
    return accelerator


def num_passes(config: TrainConfig) -> int:
    """Return how many forward passes one optimiser step takes."""
    return config.gradient_accumulation + bool(config.anchor_data)


def tear_down() -> None:
    """Leave the process group, if there is one. Nothing may be left to write or to print: gloo may abort here."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def training_device(device: str) -> torch.device:
    """Return the device to train on; accelerate assigns cards to processes itself, so cuda:N is refused."""
    resolved = resolve_device(device)
    if resolved.type == "cuda" and resolved.index:
        raise UserError(
            "training takes the first card it sees",
            got=device,
            allowed="auto, cpu, cuda",
            command=f"CUDA_VISIBLE_DEVICES={resolved.index} selfspec train --device cuda ...",
        )
    return resolved


def mixed_precision(choice: str, device: torch.device) -> str:
    """Return bf16 or no. auto is bf16 where the device has such arithmetic: emulated, it is slower than fp32."""
    if choice != "auto":
        return choice
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "no"
    capabilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    return "bf16" if any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16")) else "no"


class Interruption:
    """Whether this process was told to stop, and by which signal: 130 is the exit code of SIGINT, 143 of SIGTERM."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def is_set(self) -> bool:
        """Whether a signal came."""
        return self.signal is not None

    @staticmethod
    def leave(*, terminated: bool) -> None:
        """Raise what ends the process: SystemExit(143) where SIGTERM came to any rank, else KeyboardInterrupt."""
        if terminated:
            raise SystemExit(128 + signal.SIGTERM)
        raise KeyboardInterrupt


@contextmanager
def interruption() -> Iterator[Interruption]:
    """Turn the first SIGINT or SIGTERM into a flag, so that no step is cut in half; the second one acts as usual."""
    flag = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield flag
        return
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    def on_signal(number: int, frame: Any) -> None:
        flag.signal = number
        restore()

    for number in previous:
        signal.signal(number, on_signal)
    try:
        yield flag
    finally:
        restore()
