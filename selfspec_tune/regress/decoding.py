"""The tests of decoding: the trained model with the drafters it would be used with, greedily and sampled."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from selfspec_tune.artifact import Artifact
from selfspec_tune.config import RegressConfig
from selfspec_tune.decode.drafters.make import DraftSettings, make_drafter
from selfspec_tune.decode.engine import Engine
from selfspec_tune.decode.sampling import SamplingParams
from selfspec_tune.model.decoder import LayeredDecoder
from selfspec_tune.model.load import end_tokens
from selfspec_tune.progress import Progress
from selfspec_tune.regress import lossless, sampling
from selfspec_tune.regress.inputs import Inputs
from selfspec_tune.regress.lossless import Lossless
from selfspec_tune.regress.sampling import Sampling


@dataclass(frozen=True)
class Decoded:
    """What was found; `sampling` is None with --sampling-texts 0."""

    lossless: Lossless
    sampling: Sampling | None


def check_decoding(model: str, loaded: Any, config: RegressConfig, inputs: Inputs, progress: Progress) -> Decoded:
    """Decode the prompts of `inputs` with a loaded model, plainly and with its drafters, and compare.

    Raises:
        UserError: an impossible exit layer, draft length or temperature, or exact numerics that cannot be certified.
    """
    decoder, swept = LayeredDecoder(loaded), inputs.artifact
    lengths = list(dict.fromkeys(config.num_draft_tokens)) or list(lossless.DEFAULT_NUM_DRAFT_TOKENS)
    if not config.num_draft_tokens and swept and swept.enabled and swept.num_draft_tokens:
        # The policy drafts up to k_max tokens.
        lengths = sorted({1, swept.num_draft_tokens, swept.k_max})
    settings = _tested(config, swept, decoder.num_layers)
    drafters = {each.label: make_drafter(each, decoder, model) for each in settings}
    engine = Engine(
        decoder,
        end_tokens=end_tokens(loaded),
        numerics=config.numerics or (swept.numerics if swept else "exact"),
        keep_logits=True,
    )
    greedy = lossless.check_lossless(engine, inputs.requests, drafters, lengths, progress=progress)
    sampled = None
    if config.sampling_texts:
        params = SamplingParams(config.sampling_temperature, 0, config.sampling_top_p)
        sampled = sampling.check_sampling(
            engine,
            inputs.requests,
            drafters,
            lengths,
            params,
            texts_per_prompt=config.sampling_texts,
            progress=progress,
        )
    return Decoded(greedy, sampled)


def _tested(config: RegressConfig, swept: Artifact | None, num_layers: int) -> list[DraftSettings]:
    """Return layer skip at the exits asked for, else what `selfspec.json` uses at any length, else four exits."""
    if not config.exit_layers and swept is not None and swept.enabled:
        chosen = DraftSettings.of(swept)
        moved = [entry["exit_layer"] for entry in swept.by_context if entry["exit_layer"] and entry["num_draft_tokens"]]
        return list(dict.fromkeys([chosen, *(replace(chosen, exit_layer=exit_layer) for exit_layer in moved)]))
    exits = list(dict.fromkeys(config.exit_layers)) or lossless.default_exit_layers(num_layers)
    return [DraftSettings("layer-skip", exit_layer) for exit_layer in exits]
