"""What the check measures and how much of it: on a GPU, and on any machine to see that the check itself works."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """What is measured and how much of it.

    Attributes:
        exits, alphas: E at which rounds are timed (the first also dials α), and the α dialled.
        context: live cache length of plain decoding and of rounds.
        exact_tokens, text_tokens: tokens compared bit by bit at each batch size, in texts of so many.
        timed_tokens, repeats: tokens of a timed text, and repeats of a timed piece.
        round_tokens: tokens of two texts whose difference is timed rounds, with neither beginning nor end.
        prompts, prompt_tokens, new_tokens: texts on which α is dialled and speed-ups are measured.
        copy_bytes: bytes copied to measure the bandwidth.
    """

    preset: str
    dtype: str
    exits: tuple[int, ...]
    alphas: tuple[float, ...]
    draft_lengths: tuple[int, ...]
    context: int
    contexts: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    exact_batch_sizes: tuple[int, ...]
    exact_tokens: int
    text_tokens: int
    timed_tokens: int
    round_tokens: tuple[int, int]
    repeats: int
    prompts: int
    prompt_tokens: int
    new_tokens: int
    copy_bytes: int


FULL = Sizes(
    preset="7b",
    dtype="bfloat16",
    exits=(8, 16),
    alphas=(0.7, 0.85, 0.95),
    draft_lengths=tuple(range(1, 9)),
    context=512,
    contexts=(512, 4096, 16384),
    batch_sizes=(1, 4, 16),
    exact_batch_sizes=(1, 8),
    exact_tokens=2000,
    text_tokens=250,
    timed_tokens=96,
    round_tokens=(32, 160),
    repeats=9,
    prompts=2,
    prompt_tokens=64,
    new_tokens=256,
    copy_bytes=1 << 32,
)
TINY = Sizes(
    preset="tiny",
    dtype="bfloat16",
    exits=(2, 4),
    alphas=(0.7, 0.85, 0.95),
    draft_lengths=(1, 4, 8),
    context=128,
    contexts=(64, 256, 1024),
    batch_sizes=(1, 4, 16),
    exact_batch_sizes=(1, 8),
    exact_tokens=256,
    text_tokens=32,
    timed_tokens=24,
    round_tokens=(8, 32),
    repeats=5,
    prompts=4,
    prompt_tokens=32,
    new_tokens=64,
    copy_bytes=1 << 24,
)
