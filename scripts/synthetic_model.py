"""A synthetic benchmark model: any Llama-like shape, random weights, and an α that can be dialled. No download.

`dial` scales what the layers past exit E add (see `synthetic_weights`) until layer skip at E has a wanted α on the text
that the model itself writes. Quality of text is no subject here: there is none.

    python scripts/synthetic_model.py OUTPUT --preset tiny --exit-layer 2 --alpha 0.85
    python scripts/synthetic_model.py OUTPUT --preset 1b --dtype bfloat16 --exit-layer 4 --late-scale 0.05

The checkpoint gets a tokenizer of one word per token ("t17 t4 t0") and `prompts.jsonl`, for commands that want them:

    selfspec sweep-exit OUTPUT --prompts OUTPUT/prompts.jsonl --raw

Exit code 1: the wanted α was not reached; the checkpoint holds what came nearest.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from synthetic_weights import PRESETS, scale_late, synthetic_model  # type: ignore[import-not-found]  # beside this one

from selfspec_tune.config import MAX_DRAFT_TOKENS
from selfspec_tune.decode.engine import Engine
from selfspec_tune.decode.requests import Request
from selfspec_tune.decode.sampling import GREEDY
from selfspec_tune.errors import UserError
from selfspec_tune.files import atomic_writer
from selfspec_tune.model.decoder import LayeredDecoder
from selfspec_tune.sweep.profile import Prompt, profile_exits
from selfspec_tune.sweep.tally import Profile

NEAR = 0.03
"""How close a dialled α shall come."""
FIRST_SCALE, LARGEST_SCALE = 0.1, 6.4
"""The s tried first, and the one beyond which it does not grow in search of a small α."""
HALVINGS = 12
"""Times the bracket of s is halved at most."""
GRAM = 4
"""Tokens in a row that count as one place of a text in `distinct_share`."""
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 8, 32, 96
"""The command's prompts and how far each is continued: 768 tokens know α = 0.7 to 0.017."""


def random_prompts(vocab_size: int, count: int, length: int, new_tokens: int, *, seed: int = 0) -> list[Prompt]:
    """Make `count` prompts of `length` random tokens, to be continued by `new_tokens`."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocab_size, (count, length), generator=generator).tolist()
    return [Prompt(Request(f"synthetic-{number}", row, new_tokens)) for number, row in enumerate(ids)]


@dataclass(frozen=True)
class Dialled:
    """What dialling α found.

    Attributes:
        exit_layer: E.
        wanted: the α asked for.
        scale: s, set in the model.
        profile: of the model's own greedy text with this s, for k = 1..`MAX_DRAFT_TOKENS`.
        distinct: see `distinct_share`; near 0 the texts are loops and α says little.
    """

    exit_layer: int
    wanted: float
    scale: float
    profile: Profile
    distinct: float

    @property
    def alpha(self) -> float:
        """α at s."""
        return self.profile.alpha[self.exit_layer]

    @property
    def reached(self) -> bool:
        """Whether α came within `NEAR` of what was wanted."""
        return abs(self.alpha - self.wanted) <= NEAR

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON object; `alpha_by_prompt` shows that α is no mean of loops that always or never agree."""
        by_prompt = [tally.accepted[self.exit_layer - 1] / tally.positions for tally in self.profile.tallies]
        return {
            "exit_layer": self.exit_layer,
            "wanted": self.wanted,
            "alpha": self.alpha,
            "reached": self.reached,
            "late_scale": self.scale,
            "alpha_by_prompt": by_prompt,
            "distinct": self.distinct,
            "tokens": self.profile.num_tokens,
        }


def dial(
    engine: Engine,
    exit_layer: int,
    alpha: float,
    prompts: Sequence[Prompt],
    tried: dict[float, Profile] | None = None,
) -> Dialled:
    """Scale the late layers of a synthetic model until layer skip at an exit has a wanted α.

    Every s gives other weights and so another text: each is decoded and profiled anew, and α is that of the text which
    the model writes with this s. α falls with s but for the chance of texts, so the best s of all tried is kept.

    Args:
        engine: of a synthetic model, batch size 1; its numerics are those of the text.
        alpha: wanted, 0 to 1.
        tried: s → what was found before with the same model, exit and prompts; what is found here is added.

    Raises:
        UserError: an exit that the model does not have.
    """
    num_layers = engine.decoder.num_layers
    if not 1 <= exit_layer < num_layers:
        raise UserError("exit_layer is out of range", got=exit_layer, allowed=f"1..{num_layers - 1}")
    tried = {} if tried is None else tried

    def measured(scale: float) -> float:
        if scale not in tried:
            scale_late(engine.decoder.model, exit_layer, scale)
            tried[scale] = profile_exits(engine, prompts, GREEDY, MAX_DRAFT_TOKENS)
        return tried[scale].alpha[exit_layer]

    def off(scale: float) -> float:
        return abs(measured(scale) - alpha)

    low, high = 0.0, FIRST_SCALE
    while measured(high) > alpha and high < LARGEST_SCALE:
        low, high = high, 2 * high
    for _ in range(HALVINGS):
        if min(map(off, tried)) <= NEAR / 3:
            break
        middle = (low + high) / 2
        low, high = (middle, high) if measured(middle) > alpha else (low, middle)
    best = min(tried, key=off)
    scale_late(engine.decoder.model, exit_layer, best)
    texts = [engine.generate([prompt.request], GREEDY)[0][0].token_ids for prompt in prompts]
    return Dialled(exit_layer, alpha, best, tried[best], distinct_share(texts))


def distinct_share(texts: Sequence[Sequence[int]]) -> float:
    """Return of all places in the texts the share whose `GRAM` tokens stand nowhere before; a loop has nearly none."""
    grams = [tuple(text[at : at + GRAM]) for text in texts for at in range(len(text) - GRAM + 1)]
    return len(set(grams)) / max(1, len(grams))


def word_tokenizer(vocab_size: int) -> Any:
    """Return a tokenizer of one word per token, "t0" to "t<V − 1>"."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"t{index}": index for index in range(vocab_size)}
    backend = Tokenizer(models.WordLevel(words, unk_token="t0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="t0")


def write_checkpoint(model: Any, directory: Path, prompts: Sequence[Prompt]) -> None:
    """Write weights, tokenizer and prompts."""
    model.save_pretrained(directory)
    word_tokenizer(model.config.vocab_size).save_pretrained(directory)
    with atomic_writer(directory / "prompts.jsonl") as handle:
        for prompt in prompts:
            words = " ".join(f"t{token}" for token in prompt.request.prompt_ids)
            handle.write(json.dumps({"id": prompt.request.id, "prompt": words}) + "\n")


def main(arguments: list[str] | None = None) -> int:
    """Make, dial, write, and print one JSON object."""
    options = parse(arguments)
    if options.exit_layer is None and (options.alpha is not None or options.late_scale != 1.0):
        raise UserError("an α or a scale is one of an exit layer", command="--exit-layer E")
    model = synthetic_model(options.preset, seed=options.seed, dtype=options.dtype, device=options.device)
    prompts = random_prompts(model.config.vocab_size, PROMPTS, PROMPT_TOKENS, NEW_TOKENS, seed=options.seed)
    found: dict[str, Any] = {"exit_layer": options.exit_layer, "late_scale": options.late_scale}
    if options.alpha is not None:
        found = dial(Engine(LayeredDecoder(model)), options.exit_layer, options.alpha, prompts).to_dict()
    elif options.exit_layer is not None:
        scale_late(model, options.exit_layer, options.late_scale)
    write_checkpoint(model, options.output, prompts)
    print(json.dumps({"preset": options.preset, "seed": options.seed, "dtype": options.dtype, **found}))
    return 0 if found.get("reached", True) else 1


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n\n")[0], epilog=EXAMPLES, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("output", type=Path, help="directory of the checkpoint")
    parser.add_argument("--preset", default="tiny", choices=list(PRESETS), help="[default: %(default)s]")
    parser.add_argument("--seed", type=int, default=0, help="[default: %(default)s]")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--device", default="auto", help="where weights are drawn [default: %(default)s]")
    parser.add_argument("--exit-layer", type=int, help="E, from which on layers are scaled")
    scale = parser.add_mutually_exclusive_group()
    scale.add_argument("--late-scale", type=float, default=1.0, help="s, as it is [default: %(default)s]")
    scale.add_argument("--alpha", type=float, help="find the s of this α")
    return parser.parse_args(arguments)


EXAMPLES = """examples:
  python scripts/synthetic_model.py out --preset tiny --exit-layer 2 --alpha 0.85
  python scripts/synthetic_model.py out --preset 7b --dtype bfloat16 --exit-layer 8 --late-scale 0.05"""


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
