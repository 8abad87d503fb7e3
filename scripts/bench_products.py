"""Time all matrix products of one decoding step, by number format of the weights and by rows.

Every cell is timed in turn in one process, repeat by repeat: the median milliseconds of all products of the model
(layers and head), and in brackets the median ratio to one row of the model's own weights: what a draft step of that
format, or a verification of so many rows, costs in plain steps, attention and bookkeeping left out. All matrices are
read between two uses of one, as in decoding. CPU only.

    python scripts/bench_products.py MODEL [--dtype bfloat16] [--rows 1,2,4,8] [--threads 2] [--repeats 9]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import torch
import torch.nn.functional as F
from selfspec_kernels import GROUPS, PackedWeight, few_row_linear, pack
from torch import Tensor

from selfspec_tune.errors import UserError
from selfspec_tune.model.decoder import load_decoder
from selfspec_tune.sweep.timing import sample_in_turn


def main() -> int:
    """Measure and print one Markdown table."""
    parser = argparse.ArgumentParser(description="Time the matrix products of a decoding step.")
    parser.add_argument("model")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--rows", default="1,2,4,8")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    decoder = load_decoder(options.model, dtype=options.dtype, device="cpu")
    full = [weight for layer in range(decoder.num_layers) for weight, _ in decoder.products(layer)]
    full.append(decoder.head[0])
    formats: dict[str, Sequence[Tensor | PackedWeight]] = {options.dtype: full, "8 bits": [pack(w, 8) for w in full]}
    formats |= {f"4 bits, groups of {group}": [pack(w, 4, group) for w in full] for group in GROUPS}
    counts = [int(count) for count in options.rows.split(",")]
    sizes = {weight.shape[1] for weight in full}
    inputs = {count: {size: torch.randn(count, size).to(decoder.dtype) for size in sizes} for count in counts}

    one_row = {size: x[:1] for size, x in inputs[counts[0]].items()}
    pieces: dict[str, Callable[[], object]] = {"unit": partial(multiply, full, one_row)}
    for count in counts:
        pieces[f"torch {count}"] = partial(multiply_by_torch, full, inputs[count])
        for name, weights in formats.items():
            pieces[f"{name} {count}"] = partial(multiply, weights, inputs[count])
    times = sample_in_turn(pieces, options.repeats)

    print(f"| weights | MB | {' | '.join(f'rows: {count}' for count in counts)} |\n|{'---|' * (len(counts) + 2)}")
    for name in ("torch", *formats):
        bytes_read = sum(w.num_bytes if isinstance(w, PackedWeight) else w.nbytes for w in formats.get(name, full))
        cells = [cell(times[f"{name} {count}"], times["unit"]) for count in counts]
        print(f"| {name} | {bytes_read / 1e6:.0f} | {' | '.join(cells)} |")
    print(f"ms; {options.dtype}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    return 0


def multiply(weights: Sequence[Tensor | PackedWeight], inputs: dict[int, Tensor]) -> None:
    """Run all products, compiled, on inputs [rows, K] by K."""
    for weight in weights:
        few_row_linear(inputs[weight.shape[1]], weight)


def multiply_by_torch(weights: Sequence[Tensor], inputs: dict[int, Tensor]) -> None:
    """Run all products as PyTorch has them."""
    for weight in weights:
        F.linear(inputs[weight.shape[1]], weight)


def cell(seconds: list[float], unit: list[float]) -> str:
    """Return median milliseconds and the median ratio to `unit`, repeat by repeat."""
    ratio = median(mine / other for mine, other in zip(seconds, unit, strict=True))
    return f"{1000 * median(seconds):.1f} (×{ratio:.2f})"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
