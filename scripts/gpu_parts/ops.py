"""Part: every op on the device against its reference, on the same inputs.

`cases` here and `decoding_cases` are the whole list: a new op gets a line there, and its tolerance one in `TOLERANCES`.
It is called as the library calls it, so on a GPU it is Triton's where there is one; the reference runs in fp64 where it
can.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from selfspec_kernels import exit_loss, few_row_linear, pack, reference, rope_kv_write
from torch import Tensor

from .case import TOLERANCES, Case, Inputs, Tensors, error_of, numbers
from .decoding_ops import decoding_cases
from .part import Bench, Result

WIDTH, SIZE, VOCAB = 1024, 4096, 32000
"""N and K of products, and the logits of a loss."""


def product_inputs(device: torch.device, *, rows: int, dtype: torch.dtype, kind: Any, around: str) -> Inputs:
    """Return the inputs of `few_row_linear`; `kind` is None or (bits, group) of a packed weight."""
    weight: Any = numbers(device, WIDTH, SIZE, dtype=torch.float32 if kind else dtype)
    inputs: Inputs = {"weight": pack(weight, *kind) if kind else weight, "out_dtype": torch.float32}
    inputs["inputs"] = numbers(device, rows, SIZE * (2 if around == "gated" else 1), dtype=dtype, seed=1)
    if around == "norm":
        inputs["norm"] = (numbers(device, SIZE, dtype=dtype, seed=2), 1e-5)
    elif around == "gated":
        inputs |= {"gated": True, "residual": numbers(device, rows, WIDTH, dtype=dtype, seed=3)}
    return inputs


def product_reference(x: Inputs) -> Tensors:
    """`few_row_linear` in fp64."""
    norm, residual, weight = x.get("norm"), x.get("residual"), x["weight"]
    wide = reference.few_row_linear(
        x["inputs"].double(),
        weight.double() if isinstance(weight, Tensor) else weight.dequantised().double(),
        None,
        None if norm is None else (norm[0].double(), norm[1]),
        x.get("gated", False),
        None if residual is None else residual.double(),
        torch.float64,
    )
    return (wide,)


def rope_inputs(device: torch.device, *, rows: int, dtype: torch.dtype) -> Inputs:
    """Return the inputs of `rope_kv_write` for two sequences of their own lengths; the last row is padding."""
    size, heads, kv_heads, slots = 128, 8, 2, 256
    positions = torch.tensor([[3], [120]]) + torch.arange(rows)
    angles = torch.arange(slots)[:, None] * 1e4 ** (-torch.arange(size // 2) / (size // 2))
    tables = torch.cat((angles.cos(),) * 2, -1), torch.cat((-angles.sin(), angles.sin()), -1)
    keys, values = (torch.full((2, kv_heads, slots, size), 7.0).to(device, dtype) for _ in range(2))
    return {
        "heads": numbers(device, 2, rows, (heads + 2 * kv_heads) * size, dtype=dtype),
        "keys": keys,
        "values": values,
        "positions": positions.to(device),
        "written": max(1, rows - 1),
        "rotary": tuple(table.to(device) for table in tables),
        "num_heads": heads,
    }


def rope(op: Callable[..., Tensor], x: Inputs) -> Tensors:
    """Run an implementation of `rope_kv_write`; what it wrote is a result too."""
    return op(**x), x["keys"], x["values"]


def loss_inputs(device: torch.device, *, rows: int, dtype: torch.dtype, teacher: bool, parts: Any) -> Inputs:
    """Return the inputs of `exit_loss`."""
    logits, other = (4 * numbers(device, rows, VOCAB, dtype=dtype, seed=seed) for seed in (0, 1))
    targets = (torch.arange(rows, device=device) * 7919) % VOCAB
    return {"logits": logits, "targets": targets, "teacher": other if teacher else None, "parts": parts}


def loss(x: Inputs) -> Tensors:
    """Run `exit_loss`; the gradient takes the logits' place."""
    return exit_loss(**x), x["logits"]


def loss_reference(x: Inputs) -> Tensors:
    """`exit_loss` in fp64."""
    logits, teacher = x["logits"].double(), x["teacher"]
    args = (x["targets"], None if teacher is None else teacher.double(), x["parts"])
    return reference.exit_loss(logits, *args), logits


def cases(device: torch.device) -> Iterator[Case]:
    """Yield every op with its inputs."""
    half = torch.float16 if device.type == "cuda" else torch.bfloat16  # nothing is compiled for fp16 on a CPU
    for kind, rows, dtype, around in (
        (None, 1, torch.bfloat16, ""),
        (None, 9, torch.bfloat16, "norm"),
        (None, 3, torch.bfloat16, "gated"),
        (None, 3, torch.float32, "norm"),
        ((8, 32), 1, torch.bfloat16, ""),
        ((8, 32), 9, half, ""),
        ((4, 32), 1, torch.bfloat16, ""),
        ((4, 64), 5, torch.bfloat16, ""),
        ((4, 64), 3, torch.float32, "gated"),
    ):
        low = dtype != torch.float32 and (around or not kind)
        packed = "packed on a CPU" if kind and device.type == "cpu" else "sum"
        yield Case(
            f"few_row_linear {f'{kind[0]} bits, groups of {kind[1]}' if kind else 'unpacked'}, {rows} rows of "
            f"{str(dtype).removeprefix('torch.')} {around}".rstrip(),
            lambda x: (few_row_linear(**x),),
            product_reference,
            partial(product_inputs, rows=rows, dtype=dtype, kind=kind, around=around),
            "sum in low precision" if low else packed,
        )
    for rows, dtype in ((1, torch.bfloat16), (9, torch.bfloat16), (4, torch.float32)):
        yield Case(
            f"rope_kv_write {rows} rows of {str(dtype).removeprefix('torch.')}",
            partial(rope, rope_kv_write),
            partial(rope, partial(reference.rope_kv_write, norms=None)),
            partial(rope_inputs, rows=rows, dtype=dtype),
            "rotation",
        )
    for rows, dtype, teacher, parts in (
        (5, torch.bfloat16, True, (0.2, 0.3, 0.5)),
        (3, torch.float32, True, (0.0, 1.0, 0.0)),
        (2, torch.float32, False, (1.0, 0.0, 0.0)),
    ):
        yield Case(
            f"exit_loss {rows} rows of {str(dtype).removeprefix('torch.')}{', teacher' if teacher else ''}",
            loss,
            loss_reference,
            partial(loss_inputs, rows=rows, dtype=dtype, teacher=teacher, parts=parts),
            "loss",
        )


@torch.inference_mode()
def check_ops(bench: Bench, result: Result) -> None:
    """Run every case and hold its error against its tolerance; one that does not run is beyond any."""
    result.values["cases"] = found = []
    for case in [*cases(bench.device), *decoding_cases(bench.device)]:
        entry: dict[str, Any] = {"name": case.name, "tolerance": TOLERANCES[case.tolerance], "why": case.tolerance}
        try:
            entry["error"] = error_of(case, bench.device)
        except Exception as error:  # an op that does not run is a finding, and the next one is to be tried
            entry |= {"error": None, "failed": f"{type(error).__name__}: {error}"}
        found.append(entry)
    bad = [each["name"] for each in found if each["error"] is None or each["error"] > each["tolerance"]]
    result.values["beyond_tolerance"] = bad
    result.aim("ops beyond their tolerance", float(len(bad)))
