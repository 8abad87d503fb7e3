"""A frozen target's hidden states on disk, so that training a head runs neither its early nor its late layers.

    DIR/<key>.states       [N, 2, T, d] in the model's dtype, memory-mapped; there only when complete
    DIR/<key>.json         what the key stands for: checkpoint, data, exit layer, shape, dtype
    DIR/<key>.partial      whole batches so far; an interrupted build goes on from there

That is 2·d numbers a token: 2.3 KB for a hidden size of 576 in bf16, 16 KB for 4096.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch

from selfspec_tune.errors import UserError
from selfspec_tune.files import write_json
from selfspec_tune.progress import Progress, silent
from selfspec_tune.train.data import Sequences


def cached_states(
    directory: Path,
    sequences: Sequences,
    target_states: Callable[[torch.Tensor], torch.Tensor],
    about: dict[str, Any],
    *,
    hidden_size: int,
    dtype: torch.dtype,
    batch_size: int,
    device: torch.device,
    progress: Progress = silent,
) -> torch.Tensor:
    """Return the states of all sequences as a memory-mapped [N, 2, T, d]; build the file first where it is missing.

    Processes that want the same file wait for the one that builds it.

    Args:
        directory: where the files are; other runs' files may be there too.
        sequences: whose states.
        target_states: [B, T] ids → [B, 2, T, d], called with exactly `batch_size` rows.
        about: what the states depend on besides the tokens: checkpoint fingerprint, exit layer.
        hidden_size: d.
        dtype: of the states.
        batch_size: B, sequences per call; the same as in training, so that the bits are the same too.
        device: of the target.
        progress: called with ("target states", sequences done, N).

    Raises:
        UserError: the disk is too full.
    """
    shape = (len(sequences), 2, sequences.ids.shape[1], hidden_size)
    key = {
        **about,
        "data": sequences.digest(),
        "shape": list(shape),
        "dtype": str(dtype).removeprefix("torch."),
        "device": device.type,
    }
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    complete, partial = directory / f"{name}.states", directory / f"{name}.partial"
    directory.mkdir(parents=True, exist_ok=True)
    if not complete.is_file():
        with partial.open("ab") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            if complete.is_file():  # built while this process waited
                if partial.exists() and partial.stat().st_size == 0:
                    partial.unlink()
            else:
                write_json(directory / f"{name}.json", key)
                _build(handle, sequences, target_states, shape, dtype, batch_size, device, progress)
                partial.replace(complete)
    return _open(complete, shape, dtype)


def _build(
    handle: BinaryIO,
    sequences: Sequences,
    target_states: Callable[[torch.Tensor], torch.Tensor],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    batch_size: int,
    device: torch.device,
    progress: Progress,
) -> None:
    """Append to a partial file what is missing, a batch at a time."""
    each = _num_bytes(shape[1:], dtype)
    total = shape[0]
    # Calls always begin at a multiple of the batch size, resumed or not.
    done = os.fstat(handle.fileno()).st_size // (each * batch_size) * batch_size
    handle.truncate(done * each)
    directory = Path(handle.name).parent
    needed, free = (total - done) * each, shutil.disk_usage(directory).free
    if needed > free:
        raise UserError(
            f"{directory} has no room for the target's hidden states",
            got=f"{free / 1e9:.1f} GB free",
            allowed=f"{needed / 1e9:.1f} GB: {each // shape[2]:,} bytes a token for {total * shape[2]:,} tokens",
            command="--cache-targets OTHER_DIR, or none",
        )
    for start in range(done, total, batch_size):
        # The last batch is filled up with its last sequence: calls of one size give one arithmetic.
        rows = [min(row, total - 1) for row in range(start, start + batch_size)]
        states = target_states(sequences.ids[rows].long().to(device))[: total - start]
        handle.write(states.cpu().contiguous().view(torch.uint8).numpy().tobytes())
        handle.flush()
        progress("target states", min(start + batch_size, total), total)
    os.fsync(handle.fileno())


def _open(path: Path, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    expected, got = _num_bytes(shape, dtype), path.stat().st_size
    if got != expected:
        raise UserError(f"{path} is damaged", got=f"{got} bytes", allowed=expected, command=f"rm {path}")
    size = expected // dtype.itemsize
    return torch.from_file(str(path), shared=False, size=size, dtype=dtype).view(shape)


def _num_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize
