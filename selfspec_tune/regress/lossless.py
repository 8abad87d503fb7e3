"""Is decoding with speculation the same as decoding without? Token by token and, in exact numerics, bit by bit.

Every prompt is decoded once plainly, then with every drafter and draft length, by one engine. What is compared is
the emitted tokens and the logits each was chosen from. Only one prompt's logits are held at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from selfspec_tune.decode.drafters import Drafter
from selfspec_tune.decode.engine import Engine
from selfspec_tune.decode.policy import DraftPolicy
from selfspec_tune.decode.requests import Completion, Request
from selfspec_tune.decode.sampling import SamplingParams
from selfspec_tune.errors import UserError
from selfspec_tune.progress import Progress, silent

TIE_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.5, torch.float16: 0.0625}
"""Gap of the two largest logits below which another order of summation may change the winner, per weight dtype.

fp32: what the project demands of itself. bf16: between two orders of summation the two largest logits of a 135M model
(about 34) were seen to move by up to 0.375 each. fp16: an eighth of that, as its steps are.
"""

DEFAULT_NUM_DRAFT_TOKENS = (1, 3, 7)


@dataclass(frozen=True)
class Difference:
    """The first place where speculative and plain decoding of one prompt part.

    Attributes:
        prompt: the request's id.
        drafter: its label.
        position: index of the emitted token, 0 for the first after the prompt.
        plain_token, speculative_token: the tokens there; None where one of the texts had ended.
        plain_gap, speculative_gap: distance of the two largest logits there.
        largest_logit_difference: over the vocabulary at that position.
        tie: whether the tokens differ and the gap of plain decoding is below `TIE_TOLERANCE`.
    """

    prompt: str
    drafter: str
    num_draft_tokens: int
    position: int
    plain_token: int | None
    speculative_token: int | None
    plain_gap: float | None
    speculative_gap: float | None
    largest_logit_difference: float | None
    tie: bool


@dataclass
class Lossless:
    """What the comparison found, over `cases` pairs of a plain and a speculative text."""

    numerics: str
    dtype: str
    prompts: int
    drafters: list[str]
    """Labels."""
    num_draft_tokens: list[int]
    cases: int = 0
    tokens: int = 0
    """Tokens of plain decoding compared."""
    drafted: int = 0
    accepted: int = 0
    """Draft tokens accepted. With none, only the first row of every verify pass has been tested."""
    differing_tokens: int = 0
    differing_cases: int = 0
    ties: int = 0
    """Cases that differ, but at a tie first."""
    bitwise_logits: bool = True
    first_difference: Difference | None = None

    @property
    def passed(self) -> bool:
        """exact: not a bit differs. fast: texts differ at ties only."""
        if self.numerics == "exact":
            return self.differing_tokens == 0 and self.bitwise_logits
        return self.differing_cases == self.ties

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {"status": "passed" if self.passed else "failed", "passed": self.passed, **asdict(self)}

    def count(self, plain: Completion, speculative: Completion, difference: Difference | None) -> None:
        """Add one case."""
        self.cases += 1
        self.tokens += len(plain.token_ids)
        differing = count_differing(plain.token_ids, speculative.token_ids)
        self.differing_tokens += differing
        self.differing_cases += differing > 0
        self.bitwise_logits &= len(plain.logits) == len(speculative.logits) and all(
            torch.equal(ours, theirs) for ours, theirs in zip(plain.logits, speculative.logits, strict=True)
        )
        if difference is None:
            return
        self.ties += difference.tie
        if self.first_difference is None or (self.first_difference.tie and not difference.tie):
            self.first_difference = difference


def default_exit_layers(num_layers: int) -> list[int]:
    """Return up to four exits spread over the depth: L/10, L/3, L/2 and 9L/10."""
    exits = (num_layers // 10, num_layers // 3, num_layers // 2, num_layers * 9 // 10)
    return sorted({min(max(exit_layer, 1), num_layers - 1) for exit_layer in exits})


def check_lossless(
    engine: Engine,
    requests: Sequence[Request],
    drafters: Mapping[str, Drafter],
    num_draft_tokens: Sequence[int],
    *,
    progress: Progress = silent,
) -> Lossless:
    """Decode every request greedily without and with speculation, and compare.

    Args:
        engine: made with `keep_logits=True`.
        requests: prompts; each is a batch of its own. Memory: max_new_tokens · V fp32 numbers, twice.
        drafters: label → what drafts.
        num_draft_tokens: draft lengths, each tested with every drafter.
        progress: told after every case.

    Raises:
        UserError: an impossible draft length, or a request the engine refuses.
    """
    if not engine.keep_logits:
        raise ValueError("the engine must keep the logits")
    for k in num_draft_tokens:
        if k < 1:
            raise UserError("num_draft_tokens is out of range", got=k, allowed="1 or more")
    dtype = str(engine.decoder.dtype).removeprefix("torch.")
    result = Lossless(engine.numerics, dtype, len(requests), list(drafters), list(num_draft_tokens))
    cells = [(label, k) for label in drafters for k in num_draft_tokens]
    greedy = SamplingParams()
    for request in requests:
        [plain], _ = engine.generate([request], greedy)
        for label, k in cells:
            [speculative], stats = engine.generate([request], greedy, drafters[label], DraftPolicy(k))
            result.drafted += stats.drafted
            result.accepted += stats.accepted
            result.count(plain, speculative, find_difference(engine, plain, speculative, label, k))
            progress("losslessness", result.cases, len(requests) * len(cells))
    return result


def find_difference(
    engine: Engine, plain: Completion, speculative: Completion, drafter: str, k: int
) -> Difference | None:
    """Return the first place where two completions part; None where they agree.

    In exact numerics that is the first token or logit that differs, in fast numerics the first token.
    """
    position = _first_place(plain, speculative, bitwise=engine.numerics == "exact")
    if position is None:
        return None
    tokens = [c.token_ids[position] if position < len(c.token_ids) else None for c in (plain, speculative)]
    logits = [c.logits[position] if position < len(c.logits) else None for c in (plain, speculative)]
    gaps = [top2_gap(row) if row is not None else None for row in logits]
    ours, theirs = logits
    largest = float((ours - theirs).abs().max()) if ours is not None and theirs is not None else None
    tie = None not in tokens and tokens[0] != tokens[1] and is_tie(gaps[0], engine.decoder.dtype)
    return Difference(plain.id, drafter, k, position, tokens[0], tokens[1], gaps[0], gaps[1], largest, tie)


def top2_gap(logits: Tensor) -> float:
    """Return the distance of the two largest of the logits [V]."""
    first, second = logits.topk(2).values.tolist()
    return float(first - second)


def is_tie(gap: float | None, dtype: torch.dtype) -> bool:
    """Return whether a gap of plain decoding is so small that another order of summation may decide."""
    return gap is not None and gap < TIE_TOLERANCE[dtype]


def count_differing(plain: Sequence[int], speculative: Sequence[int]) -> int:
    """Return in how many places two texts differ; the excess of the longer one counts."""
    differing = sum(ours != theirs for ours, theirs in zip(plain, speculative, strict=False))
    return differing + abs(len(plain) - len(speculative))


def _first_place(plain: Completion, speculative: Completion, *, bitwise: bool) -> int | None:
    common = min(len(plain.token_ids), len(speculative.token_ids))
    for position in range(common):
        if plain.token_ids[position] != speculative.token_ids[position]:
            return position
        if bitwise and not torch.equal(plain.logits[position], speculative.logits[position]):
            return position
    return common if len(plain.token_ids) != len(speculative.token_ids) else None
