"""Where a run happens: the accelerate setup, the device, what `mixed_precision: auto` means, and Ctrl-C."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from selfspec_tune.config import TrainConfig
from selfspec_tune.errors import UserError
from selfspec_tune.model.load import resolve_device
from selfspec_tune.train import checkpoint


def make_accelerator(config: TrainConfig) -> Any:
    """Return the Accelerator of a run, with Python's, NumPy's and torch's generators seeded."""
    from accelerate import Accelerator, DistributedDataParallelKwargs
    from accelerate.utils import set_seed

    device = training_device(config.device)
    drops_layers = config.method == "layer-skip" and config.layer_dropout > 0
    accelerator = Accelerator(
        cpu=device.type == "cpu",
        mixed_precision=mixed_precision(config.mixed_precision, device),
        gradient_accumulation_steps=config.gradient_accumulation,
        log_with=None if config.tracker == "none" else config.tracker,
        # A dropped layer has no gradient, and the reducer must not wait for one.
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=drops_layers)],
    )
    set_seed(config.seed)
    if config.tracker != "none":
        accelerator.init_trackers("selfspec", config=checkpoint.identity(config))
    return accelerator


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


@contextmanager
def interruption() -> Iterator[threading.Event]:
    """Turn the first SIGINT into a flag, so that no step is cut in half; the second one interrupts as usual."""
    flag = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield flag
        return
    previous = signal.getsignal(signal.SIGINT)

    def on_signal(number: int, frame: Any) -> None:
        flag.set()
        signal.signal(signal.SIGINT, previous)

    signal.signal(signal.SIGINT, on_signal)
    try:
        yield flag
    finally:
        signal.signal(signal.SIGINT, previous)
