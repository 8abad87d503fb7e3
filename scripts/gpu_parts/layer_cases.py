"""Cases of the part "ops": what a decoder's layers are made of, and the cache that they share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from selfspec_kernels import (
    BLOCK,
    add_rms_norm,
    compact,
    few_row_linear,
    pack,
    ragged_attention,
    reference,
    rms_norm,
    rope_kv_write,
    silu_mul,
)
from torch import Tensor

from .case import Case, Inputs, Tensors, described, numbers, results

WIDTH, SIZE = 1024, 4096
"""N and K of products."""
HEADS, KV_HEADS, HEAD_SIZE = 8, 2, 128
KEPT_OF, ROWS_OF_CACHE = 5, 6
"""The cache's rows of which some are kept, the first of so many."""


def cases(device: torch.device) -> Iterator[Case]:
    """Yield every op of a layer with its inputs."""
    yield from products(device)
    for name, op, oracle in (
        ("rms_norm", rms_norm, norm_reference),
        ("add_rms_norm", add_rms_norm, add_norm_reference),
    ):
        for rows, size, dtype in ((9, SIZE, torch.bfloat16), (3, SIZE + 900, torch.float32)):
            inputs = partial(norm_inputs, rows=rows, size=size, dtype=dtype, adds=op is add_rms_norm)
            yield Case(f"{name} {described(rows, dtype)}", partial(results, op), oracle, inputs, "norm")
    for rows, dtype in ((9, torch.bfloat16), (3, torch.float32)):
        for activation in ("silu", "gelu_tanh"):
            yield Case(
                f"silu_mul {described(rows, dtype)}, {activation}",
                partial(results, silu_mul),
                gate_reference,
                partial(gate_inputs, rows=rows, dtype=dtype, activation=activation),
                "gating",
            )
    for rows, dtype, normed in (
        (1, torch.bfloat16, False),
        (9, torch.bfloat16, False),
        (4, torch.float32, False),
        (4, torch.float32, True),
    ):
        yield Case(
            f"rope_kv_write {described(rows, dtype)}{', norms of heads' * normed}",
            partial(rope, rope_kv_write),
            partial(rope, reference.rope_kv_write),
            partial(rope_inputs, rows=rows, dtype=dtype, normed=normed),
            "rotation",
        )
    for rows, dtype, window, capped in (
        (1, torch.bfloat16, None, False),
        (9, torch.bfloat16, None, False),
        (9, torch.float16, None, False),
        (9, torch.bfloat16, 100, False),
        (9, torch.bfloat16, None, True),
        (1, torch.float16, 100, True),
        (4, torch.float32, 100, True),
    ):
        extra = ", window" * (window is not None) + ", soft cap and sinks" * capped
        yield Case(
            f"ragged_attention {described(rows, dtype)}{extra}",
            partial(results, ragged_attention),
            attention_reference,
            partial(attention_inputs, rows=rows, dtype=dtype, window=window, capped=capped),
            "attention",
        )
    moves = (partial(moved, compact), partial(moved, reference.compact), cache_inputs, "whole numbers")
    yield Case("compact 3 of 5 rows of bfloat16", *moves)


def products(device: torch.device) -> Iterator[Case]:
    """Yield `few_row_linear` with weights of every kind and what may stand around it."""
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
        weight = f"{kind[0]} bits, groups of {kind[1]}" if kind else "unpacked"
        yield Case(
            f"few_row_linear {weight}, {described(rows, dtype)} {around}".rstrip(),
            partial(results, few_row_linear),
            product_reference,
            partial(product_inputs, rows=rows, dtype=dtype, kind=kind, around=around),
            "sum in low precision" if low else packed,
        )


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


def norm_inputs(device: torch.device, *, rows: int, size: int, dtype: torch.dtype, adds: bool) -> Inputs:
    """Return the inputs of `rms_norm` or, with `adds`, of `add_rms_norm`."""
    inputs: Inputs = {"inputs": numbers(device, rows, size, dtype=dtype)}
    if adds:
        inputs["residual"] = numbers(device, rows, size, dtype=dtype, seed=1)
    return inputs | {"norm": (numbers(device, size, dtype=dtype, seed=2), 1e-5)}


def norm_reference(x: Inputs) -> Tensors:
    """`rms_norm` in fp64."""
    return (reference.rms_norm(x["inputs"].double(), (x["norm"][0].double(), x["norm"][1])),)


def add_norm_reference(x: Inputs) -> Tensors:
    """`add_rms_norm`, the norm of the rounded sum in fp64."""
    total, _ = reference.add_rms_norm(**x)
    return total, *norm_reference({"inputs": total, "norm": x["norm"]})


def gate_inputs(device: torch.device, *, rows: int, dtype: torch.dtype, activation: str) -> Inputs:
    """Return the inputs of `silu_mul`."""
    return {"both": 2 * numbers(device, rows, 2 * SIZE + 600, dtype=dtype), "activation": activation}


def gate_reference(x: Inputs) -> Tensors:
    """`silu_mul` in fp64."""
    return (reference.silu_mul(x["both"].double(), x["activation"]),)


def rope_inputs(device: torch.device, *, rows: int, dtype: torch.dtype, normed: bool) -> Inputs:
    """Return the inputs of `rope_kv_write` for two sequences of their own lengths; the last row is padding."""
    norms = [(numbers(device, HEAD_SIZE, dtype=dtype, seed=seed), 1e-5) for seed in (1, 2)]
    size, slots = HEAD_SIZE, 256
    positions = torch.tensor([[3], [120]]) + torch.arange(rows)
    angles = torch.arange(slots)[:, None] * 1e4 ** (-torch.arange(size // 2) / (size // 2))
    tables = torch.cat((angles.cos(),) * 2, -1), torch.cat((-angles.sin(), angles.sin()), -1)
    keys, values = (torch.full((2, KV_HEADS, slots, size), 7.0).to(device, dtype) for _ in range(2))
    return {
        "heads": numbers(device, 2, rows, (HEADS + 2 * KV_HEADS) * size, dtype=dtype),
        "keys": keys,
        "values": values,
        "positions": positions.to(device),
        "written": max(1, rows - 1),
        "rotary": tuple(table.to(device) for table in tables),
        "num_heads": HEADS,
        "norms": tuple(norms) if normed else None,
    }


def rope(op: Callable[..., Tensor], x: Inputs) -> Tensors:
    """Run an implementation of `rope_kv_write`; what it wrote is a result too."""
    return op(**x), x["keys"], x["values"]


def attention_inputs(
    device: torch.device, *, rows: int, dtype: torch.dtype, window: int | None, capped: bool
) -> Inputs:
    """Return the inputs of `ragged_attention` for sequences around an edge of blocks; what no row sees is NaN."""
    positions = torch.tensor([[3], [BLOCK - 1], [BLOCK], [2 * BLOCK + 44]]) + torch.arange(rows)
    storage = numbers("cpu", 2, KV_HEADS, len(positions), 3 * BLOCK, HEAD_SIZE, dtype=dtype)
    for sequence, (first, *_, last) in enumerate(positions[:, [0, 0, -1]].tolist()):
        storage[:, :, sequence, last + 1 :] = float("nan")
        if window is not None:
            storage[:, :, sequence, : max(0, first - window + 1)] = float("nan")
    keys, values = storage.to(device).transpose(1, 2)
    return {
        "query": numbers(device, len(positions), rows, HEADS, HEAD_SIZE, seed=1),
        "keys": keys,
        "values": values,
        "positions": positions.to(device),
        "scale": HEAD_SIZE**-0.5,
        "window": window,
        "soft_cap": 2.0 if capped else None,
        "sinks": numbers(device, HEADS, seed=2) if capped else None,
    }


def attention_reference(x: Inputs) -> Tensors:
    """`ragged_attention` in fp32, as its oracle reads the cache."""
    return (reference.ragged_attention(**x, out_dtype=torch.float32),)


def cache_inputs(device: torch.device) -> Inputs:
    """Return the inputs of `compact` for the first rows of a larger cache."""
    return {
        "cache": numbers(device, 2, 2, KV_HEADS, ROWS_OF_CACHE, 256, HEAD_SIZE, dtype=torch.bfloat16),
        "rows": torch.tensor([1, 3, 4], device=device),
        "committed": torch.tensor([256, 100, 7, 256, 129], device=device),
    }


def moved(op: Callable[..., None], x: Inputs) -> Tensors:
    """Run an implementation of `compact`; return the bits that it shall have moved, and those it shall have left."""
    op(x["cache"][:, :, :, :KEPT_OF], x["rows"], x["committed"])
    bits = x["cache"].view(torch.int16)
    ends = x["committed"][x["rows"]].tolist()
    return *(bits[:, :, :, place, :end] for place, end in enumerate(ends)), bits[:, :, :, KEPT_OF:]
