"""How one decoding command will run: what `selfspec.json` says, what flags override, and the notices that say so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from selfspec_tune.artifact import Artifact
from selfspec_tune.config import MAX_DRAFT_TOKENS, DecodeConfig
from selfspec_tune.decode.drafters import Drafter
from selfspec_tune.decode.drafters.draft_head import check_draft_vocab, read_vocab
from selfspec_tune.decode.drafters.exit_head import ExitHeadDrafter
from selfspec_tune.decode.drafters.hybrid import HybridDrafter
from selfspec_tune.decode.drafters.layer_skip import LayerSkipDrafter
from selfspec_tune.decode.drafters.low_precision import LowPrecisionDrafter
from selfspec_tune.decode.drafters.prompt_lookup import PromptLookupDrafter
from selfspec_tune.decode.engine import Completion, Engine, Request
from selfspec_tune.decode.policy import CostPolicy, DraftPolicy, Policy, WindowPolicy
from selfspec_tune.decode.price import draft_costs
from selfspec_tune.decode.sampling import SamplingParams
from selfspec_tune.decode.stats import Stats
from selfspec_tune.errors import UserError
from selfspec_tune.model.decoder import LayeredDecoder, load_decoder
from selfspec_tune.model.load import checkpoint_dir, end_tokens
from selfspec_tune.progress import Progress, silent

DEFAULT_NUM_DRAFT_TOKENS = 3
"""k when only an exit layer was given."""


@dataclass(frozen=True)
class Choice:
    """What to speculate with, before a model is loaded. `drafter` None decodes plainly."""

    drafter: str | None
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
    policy: Policy
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
        return Choice(None, None, 0, numerics, None, reason, notices)

    if options.no_speculation:
        asked_for = (options.drafter, options.exit_layer, options.num_draft_tokens, options.draft_vocab)
        if any(x is not None for x in asked_for):
            raise UserError("--no-speculation and a draft were both asked for", allowed="one of them")
        return plain("speculation switched off by --no-speculation")
    if options.num_draft_tokens is not None and not 1 <= options.num_draft_tokens <= MAX_DRAFT_TOKENS:
        raise UserError(
            "num_draft_tokens is out of range", got=options.num_draft_tokens, allowed=f"1..{MAX_DRAFT_TOKENS}"
        )
    check_draft_vocab(options.draft_vocab, options.drafter)
    if options.drafter not in (None, "layer-skip"):
        return _choose_drafter(artifact, options, numerics, notices)
    exit_layer, k, round_cost = options.exit_layer, options.num_draft_tokens, None
    if exit_layer is None and (artifact is None or not artifact.enabled):
        advice = f"selfspec sweep-exit {model} --prompts PROMPTS.jsonl"
        if k is not None:
            raise UserError("--num-draft-tokens needs a draft", command=f"--exit-layer E, --drafter D, or {advice}")
        if options.draft_vocab is not None:
            raise UserError("--draft-vocab needs a draft", command=f"--exit-layer E, --drafter D, or {advice}")
        if options.drafter is not None:
            raise UserError("--drafter layer-skip needs an exit layer", command=f"--exit-layer E, or {advice}")
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
        as_measured = (exit_layer, k, numerics, options.batch_size) == measured and options.draft_vocab is None
        if as_measured and artifact.cost_ratio is not None and artifact.verify_ratio is not None:
            round_cost = artifact.cost_ratio * int(k or 0) + artifact.verify_ratio
    elif artifact:
        notices.append(f"speculating because of --exit-layer, although selfspec.json says: {artifact.reason}")
    return Choice("layer-skip", exit_layer, _draft_tokens(options, k), numerics, round_cost, "", notices)


def _choose_drafter(artifact: Artifact | None, options: DecodeConfig, numerics: str, notices: list[str]) -> Choice:
    """Take a drafter asked for by name that is not what sweep-exit measures."""
    drafter, exit_layer = str(options.drafter), options.exit_layer
    layered = options.hybrid_with if drafter == "hybrid" else drafter
    if exit_layer is not None and layered in ("copy", "exit-head"):
        raise UserError(f"--exit-layer has no effect with --drafter {drafter}", got=exit_layer, command="leave it out")
    if layered == "layer-skip" and exit_layer is None:
        exit_layer = artifact.exit_layer if artifact else None
        if exit_layer is None:
            raise UserError("--hybrid-with layer-skip needs an exit layer", command="--exit-layer E")
    if artifact is not None:
        known = artifact.drafter if artifact.enabled else "plain decoding"
        notices.append(f"drafter {drafter} overrides selfspec.json's {known}")
    k = _draft_tokens(options, options.num_draft_tokens)
    return Choice(drafter, exit_layer, k, numerics, None, "", notices)


def _draft_tokens(options: DecodeConfig, k: int | None) -> int:
    return k or (MAX_DRAFT_TOKENS if options.k_policy == "cost" else DEFAULT_NUM_DRAFT_TOKENS)


def make_drafter(
    name: str, decoder: LayeredDecoder, model: str, exit_layer: int | None, options: DecodeConfig
) -> Drafter:
    """Make a drafter by its name.

    Raises:
        UserError: it does not fit the model, the device or the options.
    """
    vocab = None if name == "hybrid" else read_vocab(model, options.draft_vocab)
    if name == "layer-skip":
        return LayerSkipDrafter(decoder, int(exit_layer or 0), vocab)
    if name == "copy":
        return PromptLookupDrafter()
    if name == "low-precision":
        head_bits = int(options.draft_head_bits) if options.draft_head_bits else None
        return LowPrecisionDrafter(decoder, int(options.draft_bits), head_bits, exit_layer, vocab)
    if name == "exit-head":
        directory = checkpoint_dir(model)
        if directory is None:
            raise UserError("an exit head stands beside a checkpoint", got=model, allowed="a checkpoint directory")
        return ExitHeadDrafter.beside(directory, decoder, vocab)
    return HybridDrafter(PromptLookupDrafter(), make_drafter(options.hybrid_with, decoder, model, exit_layer, options))


def make_policy(
    engine: Engine, drafter: Drafter, choice: Choice, options: DecodeConfig, progress: Progress = silent
) -> Policy:
    """Make the policy asked for; `cost` times the drafters first, which takes some seconds."""
    if options.k_policy == "window":
        return WindowPolicy(choice.num_draft_tokens)
    if options.k_policy != "cost":
        return DraftPolicy(choice.num_draft_tokens, choice.round_cost)
    costs = {part.name: draft_costs(engine, part, progress=progress) for part in drafter.parts()}
    return CostPolicy(costs, k_max=choice.num_draft_tokens)


def make_plan(
    model: str, tokenizer: Any, artifact: Artifact | None, options: DecodeConfig, progress: Progress = silent
) -> Plan:
    """Load the model and prepare to decode with it as `choose` decides."""
    choice = choose(artifact, options, model)
    decoder = load_decoder(model, dtype=options.dtype, device=options.device)
    drafter = make_drafter(choice.drafter, decoder, model, choice.exit_layer, options) if choice.drafter else None
    engine = Engine(
        decoder,
        tokenizer,
        end_tokens=end_tokens(decoder.model),
        numerics=choice.numerics,
        batch_size=options.batch_size,
    )
    if isinstance(drafter, LowPrecisionDrafter):
        choice.notices.append(
            f"the {options.draft_bits}-bit draft takes {drafter.num_bytes / 2**20:.0f} MiB more memory"
        )
        choice.notices.extend(f"left in full precision: {line}" for line in drafter.unpacked)
    policy = make_policy(engine, drafter, choice, options, progress) if drafter else DraftPolicy(0)
    return Plan(engine, drafter, choice, policy)
