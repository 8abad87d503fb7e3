"""Exactness with forced acceptance on a real model: every row index of every verification gets emitted.

One text is decoded plainly, then speculatively with an oracle that knows it and lets 0..k draft tokens stand in turn,
with layer skip's early passes and without. Tokens and logits must be equal bit for bit. `--broken` breaks the engine
in a way that must turn this red.

    python scripts/check_exact.py MODEL --prompts FILE [--dtype bfloat16] [--start 120] [--stop 700] [--broken ...]

Exit code 0 if equal, 1 if not.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from selfspec_kernels import compiled, cpu

from selfspec_tune.config import PromptConfig
from selfspec_tune.decode.drafters import Drafter
from selfspec_tune.decode.engine import Engine
from selfspec_tune.decode.policy import DraftPolicy
from selfspec_tune.decode.prompts import read_requests
from selfspec_tune.decode.requests import Completion, Request
from selfspec_tune.decode.sampling import SamplingParams
from selfspec_tune.errors import UserError
from selfspec_tune.model.decoder import load_decoder
from selfspec_tune.model.load import load_tokenizer
from selfspec_tune.model.rows import ANY_ROWS
from selfspec_tune.regress.oracle import OracleDrafter, in_turn

GREEDY = SamplingParams()


def main() -> int:
    """Parse, run both kinds of verification, print one line each."""
    options = parse()
    tokenizer = load_tokenizer(options.model)
    _, requests = read_requests(options.prompts, tokenizer, PromptConfig(raw=True), max_new_tokens=1)
    ids = [token for request in requests for token in request.prompt_ids][: options.start]
    request = Request("0", ids, options.stop - options.start)
    # The ways to break an engine are those of the reference: compiled ops have no span and need no padding.
    cpu.enabled = not (options.reference or options.broken)
    decoder = load_decoder(options.model, dtype=options.dtype)
    engine = Engine(decoder, keep_logits=True)
    ops = "compiled ops" if compiled(decoder.head[0]) else "reference ops"
    print(
        f"{options.dtype}, {torch.get_num_threads()} threads, row counts certified: {engine.rows.counts}, {ops}",
        flush=True,
    )
    if options.broken == "live-span":
        engine.numerics = "fast"
    elif options.broken == "unpadded":
        engine.rows = ANY_ROWS
    plain = decode(engine, request, None, 0)
    print(f"live lengths {options.start} to {options.start + len(plain.token_ids)}", flush=True)
    equal = True
    for exit_layer in (options.exit_layer, None):
        oracle = OracleDrafter(decoder, [ids + plain.token_ids], in_turn, exit_layer)
        other = decode(engine, request, oracle, options.num_draft_tokens)
        pairs = zip(plain.token_ids, other.token_ids, plain.logits, other.logits, strict=False)
        tokens, bits, largest = 0, 0, 0.0
        for mine, theirs, p, q in pairs:
            tokens += mine != theirs
            bits += not torch.equal(p, q)
            largest = max(largest, float((p - q).abs().max()))
        kind = f"layer skip, E = {exit_layer}" if exit_layer else "verification from layer 0"
        print(
            f"{kind}, k = {options.num_draft_tokens}: {oracle.rounds} rounds, {len(other.token_ids)} tokens, "
            f"{tokens} tokens differ, {bits} positions with other logits (by up to {largest:.3g})",
            flush=True,
        )
        equal &= not bits and plain.token_ids == other.token_ids
    return 0 if equal else 1


def decode(engine: Engine, request: Request, drafter: Drafter | None, k: int) -> Completion:
    """Decode one request greedily."""
    return engine.generate([request], GREEDY, drafter, DraftPolicy(k))[0][0]


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Exactness with forced acceptance on a real model.")
    parser.add_argument("model")
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL; its prompts make the first tokens")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32", "float16"])
    parser.add_argument("--start", type=int, default=120, help="prompt tokens")
    parser.add_argument("--stop", type=int, default=700, help="live length reached")
    parser.add_argument("--exit-layer", type=int, default=10)
    parser.add_argument("--num-draft-tokens", type=int, default=8)
    parser.add_argument("--reference", action="store_true", help="run the PyTorch reference instead of compiled ops")
    parser.add_argument("--broken", choices=["live-span", "unpadded"], help="break the engine; must be seen")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
