"""Compare our plain greedy decoding with transformers' `generate(do_sample=False)`, token for token.

The two sum in different orders, so they may part where the two largest logits are all but equal: such a place is
printed with the gap and allowed, any other is a failure (exit code 1). After a place where they part the texts have
nothing to do with each other, so a prompt is compared up to its first difference.

    python scripts/compare_generate.py MODEL --prompts FILE [--num-prompts 20] [--max-new-tokens 64] [--dtype float32]
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from selfspec_tune.config import PromptConfig
from selfspec_tune.decode.engine import Engine
from selfspec_tune.decode.prompts import read_requests
from selfspec_tune.decode.requests import Request
from selfspec_tune.decode.sampling import SamplingParams
from selfspec_tune.errors import UserError
from selfspec_tune.model.decoder import LayeredDecoder
from selfspec_tune.model.load import end_tokens, load_model, load_tokenizer
from selfspec_tune.regress.lossless import TIE_TOLERANCE, top2_gap


@dataclass(frozen=True)
class Parting:
    """Where our text and `generate`'s part: token index, both tokens (None: ended), gap of our two largest logits."""

    position: int
    ours: int | None
    theirs: int | None
    gap: float | None

    def allowed(self, tolerance: float) -> bool:
        """Return whether both texts go on and our two largest logits are closer than `tolerance`."""
        return None not in (self.ours, self.theirs) and self.gap is not None and self.gap < tolerance


def generate(model: Any, request: Request, ends: tuple[int, ...]) -> list[int]:
    """Return what transformers generates greedily, without the prompt."""
    prompt = torch.tensor([request.prompt_ids], device=model.device)
    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),  # without it, prompt tokens that equal the padding token are masked
        do_sample=False,
        repetition_penalty=1.0,
        max_new_tokens=request.max_new_tokens,
        eos_token_id=list(ends) or None,
        pad_token_id=ends[0] if ends else 0,
    )
    tokens: list[int] = output[0, prompt.shape[1] :].tolist()
    return tokens


def first_parting(ours: list[int], theirs: list[int], logits: list[torch.Tensor]) -> Parting | None:
    """Return the first place where two texts differ, or None; `logits` are those our tokens were chosen from."""
    for position in range(max(len(ours), len(theirs))):
        pair = [tokens[position] if position < len(tokens) else None for tokens in (ours, theirs)]
        if pair[0] != pair[1]:
            gap = top2_gap(logits[position]) if position < len(logits) else None
            return Parting(position, pair[0], pair[1], gap)
    return None


def compare(options: argparse.Namespace) -> int:
    """Compare all prompts, print one line each, and return the exit code."""
    tokenizer = load_tokenizer(options.model)
    model = load_model(options.model, dtype=options.dtype, device=options.device)
    ends, tolerance = end_tokens(model), TIE_TOLERANCE[model.dtype]
    _, requests = read_requests(
        options.prompts,
        tokenizer,
        PromptConfig(raw=options.raw),
        max_new_tokens=options.max_new_tokens,
        limit=options.num_prompts,
    )
    engine = Engine(LayeredDecoder(model), end_tokens=ends, keep_logits=True)
    tokens, ties, failures = 0, 0, 0
    for request in requests:
        [ours], _ = engine.generate([request], SamplingParams())
        parting = first_parting(ours.token_ids, generate(model, request, ends), ours.logits)
        if parting is None:
            tokens += len(ours.token_ids)
            print(f"{request.id}: {len(ours.token_ids)} tokens equal", flush=True)
            continue
        tokens += parting.position
        is_tie = parting.allowed(tolerance)
        ties, failures = ties + is_tie, failures + (not is_tie)
        print(
            f"{request.id}: {parting.position} tokens equal, then {parting.ours} here and {parting.theirs} there, "
            f"top-2 gap {parting.gap}: {'a tie' if is_tie else 'DIFFERENT'}",
            flush=True,
        )
    verdict = "FAILED" if failures else "passed"
    print(
        f"{verdict}: {len(requests)} prompts, {tokens} tokens equal, {ties} ties below {tolerance}, {failures} failures"
    )
    return 1 if failures else 0


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line and run; a UserError is exit code 2."""
    parser = argparse.ArgumentParser(description="Compare our plain greedy decoding with transformers' generate.")
    parser.add_argument("model", help="checkpoint directory or hub name")
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL of prompts")
    parser.add_argument("--num-prompts", type=int, default=20, help="[default: %(default)s]")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="[default: %(default)s]")
    parser.add_argument("--dtype", default="float32", choices=["auto", "float32", "bfloat16", "float16"])
    parser.add_argument("--device", default="auto", help="[default: %(default)s]")
    parser.add_argument("--raw", action="store_true", help="give prompts as they are, without the chat template")
    options = parser.parse_args(arguments)
    try:
        return compare(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
