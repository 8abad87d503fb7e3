"""How one decoding command will run: what `selfspec.json` says, what flags override, and the notices that say so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from selfspec_tune.artifact import Artifact
from selfspec_tune.config import MAX_DRAFT_TOKENS, DecodeConfig
from selfspec_tune.decode.drafters import Drafter
from selfspec_tune.decode.drafters.layer_skip import LayerSkipDrafter
from selfspec_tune.decode.engine import Completion, Engine, Request
from selfspec_tune.decode.policy import DraftPolicy
from selfspec_tune.decode.sampling import SamplingParams
from selfspec_tune.decode.stats import Stats
from selfspec_tune.errors import UserError
from selfspec_tune.model.decoder import load_decoder
from selfspec_tune.model.load import end_tokens

DEFAULT_NUM_DRAFT_TOKENS = 3
"""k when only an exit layer was given."""


@dataclass(frozen=True)
class Choice:
    """What to speculate with, before a model is loaded. `exit_layer` None decodes plainly."""

    exit_layer: int | None
    num_draft_tokens: int
    numerics: str
    round_cost: float | None
    reason: str
    notices: list[str] = field(default_factory=list)


@dataclass
class Plan:
    """A loaded engine, its drafter, and why."""

    engine: Engine
    drafter: Drafter | None
    choice: Choice
    policy: DraftPolicy
    """Shared by all requests of a run: drafting that was seen not to pay stays off."""

    @property
    def notices(self) -> list[str]:
        """Lines for the user, before decoding starts."""
        return self.choice.notices

    def generate(
        self,
        requests: list[Request],
        params: SamplingParams,
        *,
        on_text: Callable[[int, str], None] | None = None,
    ) -> tuple[list[Completion], Stats]:
        """Complete up to a batch of requests the way this plan says."""
        completions, stats = self.engine.generate(requests, params, self.drafter, self.policy, on_text=on_text)
        stats.reason = stats.reason or self.choice.reason
        return completions, stats


def choose(artifact: Artifact | None, options: DecodeConfig, model: str) -> Choice:
    """Merge `selfspec.json` and flags: flags win, and every override is said."""
    notices: list[str] = []
    numerics = options.numerics or (artifact.numerics if artifact else "exact")
    if artifact:
        overridable: dict[str, tuple[object, object]] = {
            "numerics": (options.numerics, artifact.numerics),
            "dtype": (None if options.dtype == "auto" else options.dtype, artifact.measured_on.get("dtype")),
            "batch_size": (options.batch_size, artifact.batch_size),
        }
        for name, (asked, known) in overridable.items():
            if asked is not None and known is not None and asked != known:
                notices.append(f"{name} {asked} overrides selfspec.json's {known}")

    def plain(reason: str) -> Choice:
        return Choice(None, 0, numerics, None, reason, notices)

    if options.no_speculation:
        if options.exit_layer is not None or options.num_draft_tokens is not None:
            raise UserError("--no-speculation and a draft were both asked for", allowed="one of them")
        return plain("speculation switched off by --no-speculation")
    if options.num_draft_tokens is not None and not 1 <= options.num_draft_tokens <= MAX_DRAFT_TOKENS:
        raise UserError(
            "num_draft_tokens is out of range", got=options.num_draft_tokens, allowed=f"1..{MAX_DRAFT_TOKENS}"
        )
    exit_layer, k, round_cost = options.exit_layer, options.num_draft_tokens, None
    if exit_layer is None and (artifact is None or not artifact.enabled):
        advice = f"selfspec sweep-exit {model} --prompts PROMPTS.jsonl"
        if k is not None:
            raise UserError("--num-draft-tokens needs an exit layer", command=f"--exit-layer E, or {advice}")
        if artifact is None:
            notices.append(f"decoding plainly: no selfspec.json beside the checkpoint. To get one: {advice}")
            return plain("no selfspec.json")
        notices.append(f"decoding plainly: {artifact.reason}. To measure again: {advice}")
        return plain(artifact.reason)
    if artifact and artifact.enabled:
        asked = {"exit_layer": exit_layer, "num_draft_tokens": k}
        for name, value in asked.items():
            if value is not None and value != getattr(artifact, name):
                notices.append(f"{name} {value} overrides selfspec.json's {getattr(artifact, name)}")
        exit_layer = artifact.exit_layer if exit_layer is None else exit_layer
        k = artifact.num_draft_tokens if k is None else k
        measured = (artifact.exit_layer, artifact.num_draft_tokens, artifact.numerics, artifact.batch_size)
        as_measured = (exit_layer, k, numerics, options.batch_size) == measured
        if as_measured and artifact.cost_ratio is not None and artifact.verify_ratio is not None:
            round_cost = artifact.cost_ratio * int(k or 0) + artifact.verify_ratio
    elif artifact:
        notices.append(f"speculating because of --exit-layer, although selfspec.json says: {artifact.reason}")
    return Choice(exit_layer, k or DEFAULT_NUM_DRAFT_TOKENS, numerics, round_cost, "", notices)


def make_plan(model: str, tokenizer: Any, artifact: Artifact | None, options: DecodeConfig) -> Plan:
    """Load the model and prepare to decode with it as `choose` decides."""
    choice = choose(artifact, options, model)
    decoder = load_decoder(model, dtype=options.dtype, device=options.device)
    drafter = LayerSkipDrafter(decoder, choice.exit_layer) if choice.exit_layer is not None else None
    engine = Engine(
        decoder,
        tokenizer,
        end_tokens=end_tokens(decoder.model),
        numerics=choice.numerics,
        batch_size=options.batch_size,
    )
    policy = DraftPolicy(choice.num_draft_tokens if drafter else 0, choice.round_cost)
    return Plan(engine, drafter, choice, policy)
