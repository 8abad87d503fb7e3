"""Time all matrix products of one decoding step by rows: through torch, compiled, and compiled over packed weights.

The ways are timed in turn in one process; the result is the median milliseconds of all products of the model (layers
and head), and torch ÷ compiled. CPU only.

    python scripts/bench_products.py MODEL [--dtype bfloat16] [--rows 1,2,4,8] [--repeats 9]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from statistics import median

import torch
import torch.nn.functional as F
from selfspec_kernels import few_row_linear, pack
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
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    decoder = load_decoder(options.model, dtype=options.dtype, device="cpu")
    weights = [weight for layer in range(decoder.num_layers) for weight, _ in decoder.products(layer)]
    weights.append(decoder.head[0])
    packed = {bits: [pack(weight, bits) for weight in weights] for bits in (8, 4)}
    print("| rows | torch | compiled | 8 bits | 4 bits | torch ÷ compiled |\n|---|---|---|---|---|---|")
    for rows in map(int, options.rows.split(",")):
        inputs = {size: torch.randn(rows, size).to(decoder.dtype) for size in {weight.shape[1] for weight in weights}}
        ways: dict[str, Callable[[], list[Tensor]]] = {
            "torch": lambda inputs=inputs: [F.linear(inputs[w.shape[1]], w) for w in weights],  # type: ignore[misc]
            "compiled": lambda inputs=inputs: [few_row_linear(inputs[w.shape[1]], w) for w in weights],  # type: ignore[misc]
            "8": lambda inputs=inputs: [few_row_linear(inputs[w.shape[1]], w) for w in packed[8]],  # type: ignore[misc]
            "4": lambda inputs=inputs: [few_row_linear(inputs[w.shape[1]], w) for w in packed[4]],  # type: ignore[misc]
        }
        times = sample_in_turn(ways, options.repeats)
        cells = " | ".join(f"{1000 * median(values):.1f}" for values in times.values())
        ratio = median(a / b for a, b in zip(times["torch"], times["compiled"], strict=True))
        print(f"| {rows} | {cells} | {ratio:.2f} |", flush=True)
    print(f"ms; {options.dtype}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
