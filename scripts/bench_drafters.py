"""Compare drafters by domain: acceptance, costs, predicted and measured speed-up over plain decoding.

One process; every prompt is decoded with a drafter, plainly, and with another in turn, so that a busy machine slows all
alike. The speed-up is the median over prompts of plain ÷ drafted seconds per token, prefill left out, with its
quartiles; the prediction follows from what was drafted and accepted and from costs timed before, free of noise.
A file of prompts is a domain, named by its stem; the domains alternate, prompt by prompt. Greedy tokens are compared.

A drafter may be named with a policy of its own, as in low-precision-4:fixed-2; hybrid-8 copies, and drafts in 8 bits
where there is nothing to copy; low-precision-4-v8192 drafts the 8,192 most frequent tokens (`selfspec draft-vocab`).

    python scripts/bench_drafters.py MODEL --prompts code.jsonl --prompts chat.jsonl [--drafters copy,low-precision-4]
        [--k-policy cost] [--num-prompts 4] [--max-new-tokens 64] [--temperature 0] [--dtype auto] [--raw] [--json]

Exit code 1 if any greedy token differs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from statistics import quantiles
from typing import Any, get_args

import torch

from selfspec_tune.config import Drafter as DrafterName
from selfspec_tune.config import PromptConfig
from selfspec_tune.decode.drafters import Drafter
from selfspec_tune.decode.drafters.make import DraftSettings, make_drafter
from selfspec_tune.decode.engine import Engine
from selfspec_tune.decode.policy import CostPolicy, DraftCosts, DraftPolicy, Policy, WindowPolicy
from selfspec_tune.decode.price import draft_costs
from selfspec_tune.decode.prompts import read_requests
from selfspec_tune.decode.requests import Request
from selfspec_tune.decode.sampling import SamplingParams
from selfspec_tune.decode.stats import Stats
from selfspec_tune.errors import UserError
from selfspec_tune.model.decoder import load_decoder
from selfspec_tune.model.load import end_tokens, load_tokenizer
from selfspec_tune.sweep.candidates import of_rounds
from selfspec_tune.sweep.confirm import seconds_per_token

DRAFTERS = "copy,low-precision-8,low-precision-4,hybrid"


@dataclass
class Arm:
    """One drafter with its policy, which learns over all prompts, and what came of it by domain."""

    settings: DraftSettings
    drafter: Drafter
    costs: dict[str, DraftCosts]
    policy: Policy
    stats: dict[str, Stats] = field(default_factory=dict)
    ratios: dict[str, list[float]] = field(default_factory=dict)
    different: int = 0

    def add(self, domain: str, plain: Stats, drafted: Stats) -> None:
        """Count one prompt."""
        self.stats.setdefault(domain, Stats()).add(drafted)
        if plain.emitted > 1 and drafted.emitted > 1:
            self.ratios.setdefault(domain, []).append(seconds_per_token(plain) / seconds_per_token(drafted))

    def row(self, domain: str) -> dict[str, Any]:
        """Return the figures of a domain, or of all for ""."""
        stats, ratios = Stats(), []
        for name in self.stats:
            if domain in ("", name):
                stats.add(self.stats[name])
                ratios += self.ratios.get(name, [])
        found_quartiles: list[Any] = ratios * 3 if ratios else [None] * 3
        if len(ratios) > 1:
            found_quartiles = quantiles(ratios, n=4, method="inclusive")
        low, middle, high = found_quartiles
        found = of_rounds(self.settings, stats, self.costs)
        return {
            "alpha": found.alpha,
            "tokens_per_round": found.tokens_per_round,
            "k": stats.drafted / stats.rounds if stats.rounds else 0.0,
            "cost_ratio": found.cost_ratio,
            "verify_ratio": found.verify_ratio,
            "speedup_predicted": found.speedup_predicted,
            "speedup": middle,
            "quartiles": [low, high],
            "num_tokens": stats.emitted,
        }


def make_arm(name: str, engine: Engine, options: argparse.Namespace, known: dict[str, DraftCosts]) -> Arm:
    """Make an arm from its name; costs are timed once per drafter and kept in `known`, whatever its policy."""
    label, _, policy_name = name.partition(":")
    settings = read_settings(label, options.exit_layer)
    drafter = make_drafter(settings, engine.decoder, options.model)
    costs = {}
    for part, its in zip(drafter.parts(), settings.parts, strict=True):
        if its.label not in known:
            known[its.label] = draft_costs(engine, part, SamplingParams(options.temperature))
        costs[part.name] = known[its.label]
    return Arm(settings, drafter, costs, make_policy(policy_name or options.k_policy, costs, options.num_draft_tokens))


def read_settings(label: str, exit_layer: int | None) -> DraftSettings:
    """Turn a name such as low-precision-8, hybrid-8 or layer-skip-v4096 into settings."""
    label, _, vocab = label.partition("-v")
    drafter: Any = label.removesuffix("-8").removesuffix("-4")
    if drafter not in get_args(DrafterName) or not (vocab or "1").isdigit():
        raise UserError("unknown drafter", got=label, allowed=", ".join(get_args(DrafterName)), command="--help")
    bits = 8 if label.endswith("-8") else 4
    exit_layer = exit_layer if drafter == "layer-skip" else None
    return DraftSettings(drafter, exit_layer, draft_bits=bits, draft_vocab=int(vocab) if vocab else None)


def make_policy(name: str, costs: dict[str, DraftCosts], k: int) -> Policy:
    """Make the policy cost, window, fixed or fixed-K."""
    kind, _, number = name.partition("-")
    k = int(number) if number.isdigit() else k
    policies = {"cost": lambda: CostPolicy(costs), "window": lambda: WindowPolicy(k), "fixed": lambda: DraftPolicy(k)}
    if kind not in policies or (number and not number.isdigit()):
        raise UserError("unknown policy", got=name, allowed="cost, window, fixed, fixed-1 to fixed-8")
    return policies[kind]()


def main() -> int:
    """Read prompts, decode in turn, print one table or JSON."""
    options = parse()
    tokenizer = load_tokenizer(options.model)
    params = SamplingParams(options.temperature, seed=1)
    by_domain: dict[str, list[Request]] = {}
    limits = {"max_new_tokens": options.max_new_tokens, "limit": options.num_prompts}
    for path in options.prompts:
        _, requests = read_requests(path, tokenizer, PromptConfig(raw=options.raw), **limits)
        by_domain[path.stem] = requests
    turns = itertools.zip_longest(*([(domain, request) for request in found] for domain, found in by_domain.items()))
    prompts = [prompt for turn in turns for prompt in turn if prompt is not None]
    decoder = load_decoder(options.model, dtype=options.dtype)
    engine = Engine(decoder, tokenizer, end_tokens=end_tokens(decoder.model))
    known: dict[str, DraftCosts] = {}
    arms = {name: make_arm(name, engine, options, known) for name in options.drafters.split(",")}
    for number, (domain, request) in enumerate(prompts):
        print(f"{number + 1}/{len(prompts)} {domain}", file=sys.stderr, flush=True)
        # Two arms share the plain run between them, and change places from prompt to prompt.
        order = list(arms.values())[:: 1 - 2 * (number % 2)]
        for pair in (order[start : start + 2] for start in range(0, len(order), 2)):
            runs = [engine.generate([request], params, pair[0].drafter, pair[0].policy)]
            [plain], plain_stats = engine.generate([request], params)
            runs += [engine.generate([request], params, arm.drafter, arm.policy) for arm in pair[1:]]
            for arm, ([drafted], stats) in zip(pair, runs, strict=True):
                arm.different += params.greedy and plain.token_ids != drafted.token_ids
                arm.add(domain, plain_stats, stats)
    domains = [*dict.fromkeys(domain for domain, _ in prompts), ""]
    rows = {name: {domain or "all": arm.row(domain) for domain in domains} for name, arm in arms.items()}
    different = sum(arm.different for arm in arms.values())
    about = {"torch": torch.__version__, "threads": torch.get_num_threads(), "dtype": str(decoder.dtype)}
    if options.json:
        print(json.dumps({**about, "drafters": rows, "prompts_that_differ": different}))
    else:
        show(rows)
        print(f"{about}; prompts whose greedy tokens differ: {different}")
    return 1 if different else 0


def show(rows: dict[str, dict[str, dict[str, Any]]]) -> None:
    """Print the table as Markdown."""
    titles = ("drafter", "domain", "α", "k", "τ", "c", "v", "predicted", "measured (quartiles)")
    print(f"| {' | '.join(titles)} |")
    print("|---" * len(titles) + "|")
    for name, domains in rows.items():
        for domain, row in domains.items():
            names = ("alpha", "k", "tokens_per_round", "cost_ratio", "verify_ratio", "speedup_predicted", "speedup")
            cells = ["" if row[key] is None else f"{row[key]:.2f}" for key in names]
            low, high = row["quartiles"]
            spread = "" if low is None else f" ({low:.2f}–{high:.2f})"
            print(f"| {name} | {domain} | {' | '.join(cells)}{spread} |")


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Compare drafters by domain.")
    parser.add_argument("model")
    parser.add_argument("--prompts", type=Path, action="append", required=True, help="JSONL; may be repeated")
    parser.add_argument("--drafters", default=DRAFTERS, help=f"default: {DRAFTERS}; also layer-skip, exit-head")
    parser.add_argument("--k-policy", default="cost", help="cost, window, fixed or fixed-K [default: cost]")
    parser.add_argument("--num-draft-tokens", type=int, default=3, help="k of fixed, first k of window")
    parser.add_argument("--exit-layer", type=int, help="of layer-skip")
    parser.add_argument("--num-prompts", type=int, default=4, help="per file")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    parser.add_argument("--raw", action="store_true", help="no chat template")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
