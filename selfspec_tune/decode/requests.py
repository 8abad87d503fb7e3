"""What is asked of the engine, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class Request:
    """One prompt to complete."""

    id: str
    prompt_ids: list[int]
    max_new_tokens: int
    stop: tuple[str, ...] = ()


@dataclass
class Completion:
    """What became of a request. `finish_reason`: eos, stop (a stop string) or length."""

    id: str
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    logits: list[Tensor] = field(default_factory=list)
    """With `Engine(keep_logits=True)`: the target's logits [V] each token was chosen from."""
