"""Cases of the part "ops": from hidden states and logits to tokens, and the losses of training.

A token is right or wrong. So no choice here is nearly a tie, but for those between equal logits, of which the first
wins: with a margin of a thousandth between the best two, or of a millionth of a uniform number, arithmetic in another
order decides the same. A test of the check measures these margins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from selfspec_kernels import (
    accept_greedy,
    accept_ratio,
    accept_reference,
    accept_shared,
    draw,
    draw_with_gumbel,
    exit_head,
    exit_loss,
    reference,
)
from torch import Tensor

from .case import Case, Inputs, Tensors, described, numbers, results

VOCAB, LARGE_VOCAB = 32000, 128256
SIZE = 1024
"""Of a hidden state."""
BATCH, K = 5, 4
"""Sequences, and drafted tokens of each."""


def cases(device: torch.device) -> Iterator[Case]:
    """Yield every op that chooses tokens, and `exit_loss`, with its inputs."""
    for rows, dtype, noisy in ((1, torch.bfloat16, False), (3, torch.float32, False), (5, torch.bfloat16, True)):
        yield Case(
            f"exit_head {described(rows, dtype)}, {'Gumbel' if noisy else 'argmax'}",
            partial(results, exit_head),
            head_reference,
            partial(head_inputs, rows=rows, dtype=dtype, noisy=noisy),
            "head",
        )
    yield from acceptance()
    for op, oracle, inputs in (
        (draw, accept_reference.draw, draw_inputs),
        (draw_with_gumbel, accept_reference.draw_with_gumbel, gumbel_inputs),
    ):
        name = f"{op.__name__} {described(64, torch.float32)}"
        yield Case(name, partial(results, op), partial(results, oracle), inputs, "whole numbers")
    for rows, dtype, teacher, parts in (
        (5, torch.bfloat16, True, (0.2, 0.3, 0.5)),
        (3, torch.float32, True, (0.0, 1.0, 0.0)),
        (2, torch.float32, False, (1.0, 0.0, 0.0)),
    ):
        yield Case(
            f"exit_loss {described(rows, dtype)}{', teacher' if teacher else ''}",
            loss,
            loss_reference,
            partial(loss_inputs, rows=rows, dtype=dtype, teacher=teacher, parts=parts),
            "loss",
        )


def acceptance() -> Iterator[Case]:
    """Yield the ops that accept drafted tokens."""
    greedy, shared, ratio = (
        (partial(results, op), partial(accepted_reference, oracle))
        for op, oracle in (
            (accept_greedy, accept_reference.accept_greedy),
            (accept_shared, accept_reference.accept_shared),
            (accept_ratio, accept_reference.accept_ratio),
        )
    )
    for name, both, inputs in (
        ("accept_greedy float32", greedy, partial(greedy_inputs, dtype=torch.float32)),
        ("accept_greedy bfloat16, equal logits", greedy, partial(greedy_inputs, dtype=torch.bfloat16)),
        (
            "accept_greedy float32, nothing drafted",
            greedy,
            partial(greedy_inputs, dtype=torch.float32, k=0),
        ),
        ("accept_shared", shared, shared_inputs),
        ("accept_ratio", ratio, partial(ratio_inputs, vocab=VOCAB, certain=False)),
        ("accept_ratio, q certain", ratio, partial(ratio_inputs, vocab=VOCAB, certain=True)),
        (f"accept_ratio, {LARGE_VOCAB} tokens", ratio, partial(ratio_inputs, vocab=LARGE_VOCAB, certain=False)),
    ):
        yield Case(name, *both, inputs, "whole numbers")


def head_inputs(device: torch.device, *, rows: int, dtype: torch.dtype, noisy: bool) -> Inputs:
    """Return the inputs of `exit_head`; with noise all that it takes."""
    inputs: Inputs = {
        "hidden": numbers(device, rows, SIZE, dtype=dtype),
        "norm": (numbers(device, SIZE, dtype=dtype, seed=1), 1e-5),
        "weight": numbers(device, VOCAB, SIZE, dtype=dtype, seed=2) / 8,
    }
    if noisy:
        inputs["bias"] = numbers(device, VOCAB, dtype=dtype, seed=3)
        inputs["token_ids"] = torch.arange(VOCAB, device=device) * 3 + 1
        inputs |= {"gumbel": gumbel(device, rows, VOCAB), "temperature": 0.7}
    return inputs


def head_reference(x: Inputs) -> Tensors:
    """`exit_head` in fp32, as its oracle computes logits."""
    names = ("hidden", "norm", "weight", "bias", "token_ids", "gumbel")
    oracle: Callable[..., Tensors] = reference.exit_head
    return oracle(*(x.get(name) for name in names), x.get("temperature", 1.0))


def probabilities(*shape: int, seed: int) -> Tensor:
    """Return peaked ones on the CPU, about a third of them zero, as top-k and top-p leave them."""
    hidden = torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) < 0.3
    return (6 * numbers("cpu", *shape, seed=seed)).masked_fill(hidden, float("-inf")).softmax(-1)


def uniform(*shape: int, seed: int = 7) -> Tensor:
    """Return uniform numbers in fp64 on the CPU."""
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gumbel(device: torch.device | str, *shape: int) -> Tensor:
    """Return Gumbel noise in fp64, the same on every device."""
    return (-(-uniform(*shape).log()).log()).to(device)


def near(chosen: Tensor, vocab: int) -> Tensor:
    """Return drafted tokens [B, k]: the target's own choices [B, k + 1], but for a wrong one at b in sequence b."""
    batch, k = chosen.shape[0], chosen.shape[1] - 1
    wrong = torch.arange(batch)[:, None] == torch.arange(k)
    return torch.where(wrong, (chosen[:, :-1] + 1) % vocab, chosen[:, :-1])


def on_device(device: torch.device, inputs: Inputs) -> Inputs:
    """Return the inputs of an acceptance on a device, and which sequences commit what they accept."""
    commit = 10 * torch.arange(BATCH, device=device), torch.arange(BATCH, device=device) % 3 != 1
    moved = {name: None if each is None else each.to(device) for name, each in inputs.items()}
    return moved | {"commit": commit}


def greedy_inputs(device: torch.device, *, dtype: torch.dtype, k: int = K) -> Inputs:
    """Return the inputs of `accept_greedy`, in bf16 with equal largest logits: the first of them is the choice."""
    logits = numbers("cpu", BATCH, k + 1, VOCAB, dtype=dtype)
    if dtype == torch.bfloat16:
        logits = logits.clamp_max(3.0)
    return on_device(device, {"drafted": near(logits.argmax(-1), VOCAB), "logits": logits})


def shared_inputs(device: torch.device) -> Inputs:
    """Return the inputs of `accept_shared`."""
    target, noise = probabilities(BATCH, K + 1, VOCAB, seed=0), gumbel("cpu", BATCH, K + 1, VOCAB)
    drafted = near(accept_reference.draw_with_gumbel(target, noise), VOCAB)
    return on_device(device, {"drafted": drafted, "target": target, "gumbel": noise})


def ratio_inputs(device: torch.device, *, vocab: int, certain: bool) -> Inputs:
    """Return the inputs of `accept_ratio`; without q the draft is certain of the most probable tokens."""
    target = probabilities(BATCH, K + 1, vocab, seed=0)
    draft = 0.7 * target[:, :-1] + 0.3 * probabilities(BATCH, K, vocab, seed=1)
    drafted = target[:, :-1].argmax(-1) if certain else accept_reference.draw(draft, uniform(BATCH, K, seed=8))
    uniforms = uniform(BATCH, K + 1)
    inputs = {"drafted": drafted, "draft": None if certain else draft, "target": target, "uniforms": uniforms}
    return on_device(device, inputs)


def accepted_reference(oracle: Callable[..., Tensors], x: Inputs) -> Tensors:
    """Run the oracle of an op that accepts, and that of the commit."""
    commit = x.pop("commit")
    found = oracle(**x)
    return *found, accept_reference.committed_after(found[0], *commit)


def draw_inputs(device: torch.device) -> Inputs:
    """Return the inputs of `draw`."""
    return {"probabilities": probabilities(8, 8, VOCAB, seed=2).to(device), "uniform": uniform(8, 8).to(device)}


def gumbel_inputs(device: torch.device) -> Inputs:
    """Return the inputs of `draw_with_gumbel`."""
    return {"probabilities": probabilities(8, 8, VOCAB, seed=2).to(device), "gumbel": gumbel(device, 8, 8, VOCAB)}


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
