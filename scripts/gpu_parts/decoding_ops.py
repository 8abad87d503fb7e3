"""Cases of the ops of a decoding step besides products: attention, norms, gating, acceptance, the exit head."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from selfspec_kernels import (
    BLOCK,
    accept_greedy,
    accept_ratio,
    accept_reference,
    accept_shared,
    add_rms_norm,
    compact,
    exit_head,
    ragged_attention,
    reference,
    rms_norm,
    silu_mul,
)

from .case import Case, Inputs, Tensors, numbers

HEADS, KV_HEADS, HEAD_SIZE, SLOTS = 8, 2, 128, 3 * BLOCK
LARGE_VOCAB = 128256
SIZE, WIDTH, ROWS = 2048, 1000, 3
"""K, N and rows of norms, gates and exit heads."""


def decoding_cases(device: torch.device) -> Iterator[Case]:
    """Yield every op with its inputs."""
    yield from attention_cases(device)
    yield from row_cases(device)
    yield from accept_cases(device)


def attention_cases(device: torch.device) -> Iterator[Case]:
    """Yield attention over a cache of ragged lengths, and the moving of its rows."""
    sinks = numbers(device, HEADS, seed=9)
    for rows, dtype, kind in (
        (1, torch.bfloat16, {}),
        (9, torch.bfloat16, {}),
        (4, torch.float16, {"window": 100}),
        (9, torch.float32, {"soft_cap": 5.0, "sinks": sinks}),
    ):
        yield Case(
            f"ragged_attention {rows} rows of {str(dtype).removeprefix('torch.')} {' '.join(kind)}".rstrip(),
            lambda x: (ragged_attention(**x),),
            attention_reference,
            partial(attention_inputs, rows=rows, dtype=dtype, kind=kind),
            "attention",
        )
    yield Case("compact", partial(moved, compact), partial(moved, reference.compact), compact_inputs, "the same")


def attention_inputs(device: torch.device, *, rows: int, dtype: torch.dtype, kind: Inputs) -> Inputs:
    """Return three sequences, one of them over a block's edge; slots that no row sees hold NaN."""
    first = torch.tensor([[0], [BLOCK - 3], [2 * BLOCK + 40]], device=device)
    positions = first + torch.arange(rows, device=device)
    keys, values = (numbers(device, 3, KV_HEADS, SLOTS, HEAD_SIZE, dtype=dtype, seed=seed) for seed in (1, 2))
    for row, end in enumerate(positions[:, -1].tolist()):
        keys[row, :, end + 1 :] = values[row, :, end + 1 :] = float("nan")
    query = numbers(device, 3, rows, HEADS, HEAD_SIZE)
    scale = HEAD_SIZE**-0.5
    return {"query": query, "keys": keys, "values": values, "positions": positions, "scale": scale, **kind}


def attention_reference(x: Inputs) -> Tensors:
    """Run the reference, whose arguments all stand in order."""
    names = ("query", "keys", "values", "positions", "scale", "window", "soft_cap", "sinks")
    oracle: Callable[..., torch.Tensor] = reference.ragged_attention
    return (oracle(*(x.get(name) for name in names), torch.float32),)


def compact_inputs(device: torch.device) -> Inputs:
    """Return a cache of five rows of which three stay."""
    storage = numbers(device, 2, 2, KV_HEADS, 5, SLOTS, HEAD_SIZE, dtype=torch.bfloat16)
    committed = torch.tensor([7, 300, 1, 129, 250], device=device)
    return {"storage": storage, "rows": torch.tensor([1, 3, 4], device=device), "committed": committed}


def moved(op: Callable[..., None], x: Inputs) -> Tensors:
    """Move rows, and return what is worth keeping of each."""
    op(**x)
    ends = x["committed"][x["rows"]].tolist()
    return tuple(x["storage"][:, :, :, place, :end] for place, end in enumerate(ends))


def row_cases(device: torch.device) -> Iterator[Case]:
    """Yield norms, gates and the exit head."""
    for dtype, kind in ((torch.float32, "norm or gate"), (torch.bfloat16, "sum in low precision")):
        name = str(dtype).removeprefix("torch.")
        yield Case(
            f"rms_norm of {name}",
            lambda x: (rms_norm(x["inputs"], x["norm"]),),
            lambda x: (reference.rms_norm(x["inputs"].double(), wide_norm(x)),),
            partial(norm_inputs, dtype=dtype),
            kind,
        )
        yield Case(
            f"add_rms_norm of {name}",
            lambda x: tuple(add_rms_norm(x["inputs"], x["residual"], x["norm"])),
            lambda x: tuple(reference.add_rms_norm(x["inputs"].double(), x["residual"].double(), wide_norm(x))),
            partial(norm_inputs, dtype=dtype),
            kind,
        )
        for activation in ("silu", "gelu_tanh"):
            yield Case(
                f"silu_mul {activation} of {name}",
                partial(gated, silu_mul, activation),
                partial(gated, lambda both, kind: reference.silu_mul(both.double(), kind), activation),
                partial(norm_inputs, dtype=dtype),
                kind,
            )
    for noise in (False, True):
        yield Case(
            f"exit_head {'with noise' if noise else 'argmax'}",
            lambda x: exit_head(**x),
            exit_head_reference,
            partial(exit_head_inputs, noise=noise),
            "norm or gate",
        )


def norm_inputs(device: torch.device, *, dtype: torch.dtype) -> Inputs:
    """Return rows, others to add, and a norm."""
    inputs, residual = (numbers(device, ROWS, SIZE, dtype=dtype, seed=seed) for seed in (0, 1))
    return {"inputs": inputs, "residual": residual, "norm": (numbers(device, SIZE, dtype=dtype, seed=2), 1e-5)}


def wide_norm(x: Inputs) -> Any:
    """Return a norm in fp64."""
    weight, eps = x["norm"]
    return weight.double(), eps


def gated(op: Callable[..., torch.Tensor], activation: str, x: Inputs) -> Tensors:
    """Gate the rows with the others."""
    return (op(torch.cat((x["inputs"], x["residual"]), -1), activation),)


def exit_head_inputs(device: torch.device, *, noise: bool) -> Inputs:
    """Return a head in fp32 over some tokens, in another order than theirs."""
    inputs: Inputs = {
        "hidden": numbers(device, ROWS, SIZE),
        "norm": (numbers(device, SIZE, seed=1), 1e-5),
        "weight": numbers(device, WIDTH, SIZE, seed=2) / SIZE**0.5,
        "token_ids": torch.arange(WIDTH, device=device).flip(0) * 3,
    }
    if noise:
        inputs |= {"gumbel": numbers(device, ROWS, WIDTH, seed=3), "temperature": 0.7}
    return inputs


def exit_head_reference(x: Inputs) -> Tensors:
    """Run the reference, whose arguments all stand in order."""
    oracle: Callable[..., Tensors] = reference.exit_head
    names = ("hidden", "norm", "weight", "bias", "token_ids", "gumbel")
    return tuple(oracle(*(x.get(name) for name in names), x.get("temperature", 1.0)))


def accept_cases(device: torch.device) -> Iterator[Case]:
    """Yield the three ways to accept, for a batch whose rows accept unlike numbers of tokens."""
    for k, vocab in ((0, 320), (4, 1000), (8, LARGE_VOCAB)):
        inputs = partial(accept_inputs, k=k, vocab=vocab)
        ways: list[tuple[str, Callable[..., Any], Callable[..., Any]]] = [
            ("accept_greedy", accept_greedy, accept_reference.accept_greedy),
            ("accept_shared", accept_shared, accept_reference.accept_shared),
            ("accept_ratio", accept_ratio, accept_reference.accept_ratio),
            ("accept_ratio of given tokens", accept_ratio, accept_reference.accept_ratio),
        ]
        for name, op, oracle in ways:
            ours, wanted = partial(accepted, op, name), partial(accepted, oracle, name)
            yield Case(f"{name}, k = {k}, V = {vocab}", ours, wanted, inputs, "the same")


def accepted(op: Callable[..., Any], name: str, x: Inputs) -> Tensors:
    """Accept in one way; returns how many tokens stand, and the one after them."""
    if name == "accept_greedy":
        found = op(x["drafted"], x["logits"])
    elif name == "accept_shared":
        found = op(x["drafted"], x["target"], x["gumbel"])
    else:
        found = op(x["drafted"], x["draft"] if name == "accept_ratio" else None, x["target"], x["uniforms"])
    return tuple(found[:2])


def accept_inputs(device: torch.device, *, k: int, vocab: int) -> Inputs:
    """Return a batch of four; row r's first r drafted tokens are the target's choice, and some tokens cannot be had."""
    logits = 3 * numbers(device, 4, k + 1, vocab)
    logits[..., 5:9] = float("-inf")
    drafted = logits[:, :k].argmax(-1)
    for row in range(min(4, k)):
        drafted[row, row] = (drafted[row, row] + 11) % vocab
    draft = (logits[:, :k] + numbers(device, 4, k, vocab, seed=1)).softmax(-1)
    uniforms = torch.rand(4, k + 1, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(device)
    gumbel = -(
        -torch.rand(4, k + 1, vocab, generator=torch.Generator().manual_seed(3), dtype=torch.float64).log()
    ).log()
    target = logits.softmax(-1)
    made = {"drafted": drafted, "logits": logits, "draft": draft, "target": target}
    return {**made, "uniforms": uniforms, "gumbel": gumbel.to(device)}
