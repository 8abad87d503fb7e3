"""How one decoding command will run: what `selfspec.json` says, what flags override, and the notices that say so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from selfspec_tune.artifact import Artifact
from selfspec_tune.config import MAX_DRAFT_TOKENS, DecodeConfig, flag
from selfspec_tune.decode.drafters import Drafter
from selfspec_tune.decode.drafters.make import DraftSettings, make_drafter
from selfspec_tune.decode.engine import Engine
from selfspec_tune.decode.policy import CostPolicy, DraftPolicy, Policy, WindowPolicy
from selfspec_tune.decode.price import KnownCosts, draft_costs, measured_elsewhere
from selfspec_tune.decode.requests import Completion, Request
from selfspec_tune.decode.sampling import GREEDY, SamplingParams
from selfspec_tune.decode.stats import Stats
from selfspec_tune.errors import UserError
from selfspec_tune.model.decoder import load_decoder
from selfspec_tune.model.load import end_tokens
from selfspec_tune.progress import Progress, silent

DEFAULT_NUM_DRAFT_TOKENS = 3
"""k of fixed and window where none is given."""


@dataclass(frozen=True)
class Choice:
    """What to speculate with, before a model is loaded.

    Attributes:
        settings: what drafts; None decodes plainly.
        num_draft_tokens: k; of the cost policy the most.
        as_measured: whether `selfspec.json`'s costs are of these settings, numerics and batch size.
    """

    settings: DraftSettings | None
    num_draft_tokens: int
    k_policy: str
    numerics: str
    as_measured: bool = False
    reason: str = ""
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
    """Merge `selfspec.json` and flags: flags win, and every override is said.

    Raises:
        UserError: flags that do not go together, or a draft that cannot be.
    """
    notices = _overrides(
        {
            "numerics": (options.numerics, artifact.numerics),
            "dtype": (None if options.dtype == "auto" else options.dtype, artifact.measured_on.get("dtype")),
            "batch_size": (options.batch_size, artifact.batch_size),
        }
        if artifact
        else {}
    )
    numerics = options.numerics or (artifact.numerics if artifact else "exact")
    k = options.num_draft_tokens
    if options.no_speculation:
        if options.drafter is not None or options.exit_layer is not None or _draft_flags(options):
            raise UserError("--no-speculation and a draft were both asked for", allowed="one of them")
        reason = "speculation switched off by --no-speculation"
        return Choice(None, 0, "fixed", numerics, reason=reason, notices=notices)
    if k is not None and not 1 <= k <= MAX_DRAFT_TOKENS:
        raise UserError("num_draft_tokens is out of range", got=k, allowed=f"1..{MAX_DRAFT_TOKENS}")
    known = DraftSettings.of(artifact) if artifact else None
    enabled = artifact is not None and artifact.enabled
    if options.draft_vocab is not None and options.draft_vocab < 1:
        raise UserError("--draft-vocab is too small", got=options.draft_vocab, allowed="1 or more")
    if options.drafter is None and options.exit_layer is None and not enabled:
        return _plain(artifact, options, model, numerics, notices)
    settings = _settings(known, options, enabled=enabled, model=model)
    if artifact and not enabled:
        notices.append(f"speculating because of flags, although selfspec.json says: {artifact.reason}")
    as_measured = False
    k_policy = options.k_policy or ("fixed" if k is not None else artifact.k_policy if artifact and enabled else "cost")
    if artifact and enabled and known is not None:
        pairs: dict[str, tuple[Any, Any]] = {"drafter": (settings.drafter, known.drafter)}
        if settings.drafter == known.drafter:
            theirs = _shown(known)
            pairs |= {
                name: (value, "default" if theirs[name] is None else theirs[name])
                for name, value in _shown(settings).items()
            }
            pairs["num_draft_tokens"] = (k, artifact.num_draft_tokens)
        pairs["k_policy"] = (k_policy, artifact.k_policy)
        notices += _overrides(pairs)
        as_measured = (settings, numerics, options.batch_size) == (known, artifact.numerics, artifact.batch_size)
        if as_measured and not _same_sampling(options, artifact):
            as_measured = False
            how = "greedily" if artifact.eval_set.get("temperature", 0) == 0 else "with other sampling"
            notices.append(f"costs are timed anew: selfspec.json's were measured {how}")
    if k is None and as_measured and artifact:
        k = artifact.k_max if k_policy == "cost" else artifact.num_draft_tokens
    k = k or (MAX_DRAFT_TOKENS if k_policy == "cost" else DEFAULT_NUM_DRAFT_TOKENS)
    return Choice(settings, k, k_policy, numerics, as_measured, notices=notices)


def _same_sampling(options: DecodeConfig, artifact: Artifact) -> bool:
    """Whether tokens are chosen as when the costs were measured; what a temperature is costs nothing."""

    def kind(temperature: float, top_k: int, top_p: float) -> tuple[Any, ...]:
        return (True, top_k, top_p) if temperature > 0 else (False,)

    measured = artifact.eval_set
    theirs = kind(measured.get("temperature", 0.0), measured.get("top_k", 0), measured.get("top_p", 1.0))
    return kind(options.temperature, options.top_k, options.top_p) == theirs


def _draft_flags(options: DecodeConfig) -> dict[str, Any]:
    """Return the flags given that only say something about a draft, besides its name and exit layer."""
    names = ("num_draft_tokens", "draft_vocab", "draft_bits", "draft_head_bits", "draft_group", "hybrid_with")
    return {name: getattr(options, name) for name in names if getattr(options, name) is not None}


def _plain(artifact: Artifact | None, options: DecodeConfig, model: str, numerics: str, notices: list[str]) -> Choice:
    """Decode plainly because nobody said how to draft."""
    advice = f"selfspec sweep-exit {model} --prompts PROMPTS.jsonl"
    for name, value in _draft_flags(options).items():
        raise UserError(f"{flag(name)} needs a draft", got=value, command=f"--exit-layer E, --drafter D, or {advice}")
    if artifact is None:
        notices.append(f"decoding plainly: no selfspec.json beside the checkpoint. To get one: {advice}")
    else:
        notices.append(f"decoding plainly: {artifact.reason}. To measure again: {advice}")
    reason = artifact.reason if artifact else "no selfspec.json"
    return Choice(None, 0, "fixed", numerics, reason=reason, notices=notices)


def _settings(known: DraftSettings | None, options: DecodeConfig, *, enabled: bool, model: str) -> DraftSettings:
    """Return what flags make of the settings in `selfspec.json`."""
    drafter, exit_layer = options.drafter, options.exit_layer
    if drafter is None:
        # An exit layer alone asks for layer skip, unless what is in use has an exit layer too.
        uses_known = enabled and known is not None and (exit_layer is None or known.exit_layer is not None)
        drafter = known.drafter if uses_known and known is not None else "layer-skip"
    base = known if known is not None and (enabled and known.drafter == drafter) else DraftSettings(drafter)
    changes: dict[str, Any] = {
        "draft_bits": int(options.draft_bits) if options.draft_bits else None,
        "draft_head_bits": int(options.draft_head_bits) if options.draft_head_bits else None,
        "draft_group": int(options.draft_group) if options.draft_group else None,
        "hybrid_with": options.hybrid_with,
        "draft_vocab": options.draft_vocab,
        "exit_layer": exit_layer,
    }
    settings = replace(base, **{name: value for name, value in changes.items() if value is not None})
    for name in _draft_flags(options):
        if name not in _shown(settings) and name != "num_draft_tokens":
            why = ", which reads no head" if name == "draft_vocab" else ""
            got = getattr(options, name)
            raise UserError(
                f"{flag(name)} has no effect with --drafter {drafter}{why}", got=got, command="leave it out"
            )
    layered = settings.parts[-1].drafter
    if exit_layer is not None and layered in ("copy", "exit-head"):
        raise UserError(f"--exit-layer has no effect with --drafter {drafter}", got=exit_layer, command="leave it out")
    if layered == "layer-skip" and settings.exit_layer is None:
        settings = replace(settings, exit_layer=known.exit_layer if known else None)
    if layered == "layer-skip" and settings.exit_layer is None:
        advice = f"--exit-layer E, or selfspec sweep-exit {model} --drafters layer-skip --prompts PROMPTS.jsonl"
        given = "--hybrid-with" if drafter == "hybrid" else "--drafter"
        raise UserError(f"{given} layer-skip needs an exit layer", command=advice)
    return settings


def _shown(settings: DraftSettings) -> dict[str, object]:
    """Return the settings that matter to the drafter, for notices."""
    values = asdict(settings)
    if settings.drafter != "hybrid":
        del values["hybrid_with"]
    if settings.parts[-1].drafter != "low-precision":
        del values["draft_bits"], values["draft_head_bits"], values["draft_group"]
    if settings.drafter == "copy":
        del values["draft_vocab"]
    return values


def _overrides(values: dict[str, tuple[Any, Any]]) -> list[str]:
    """Return a notice for every value asked for (name → asked, in the file) that differs from the file's."""
    return [
        f"{name} {asked} overrides selfspec.json's {known}"
        for name, (asked, known) in values.items()
        if asked is not None and known is not None and asked != known
    ]


def make_policy(
    engine: Engine,
    drafter: Drafter,
    choice: Choice,
    artifact: Artifact | None = None,
    params: SamplingParams = GREEDY,
    progress: Progress = silent,
) -> Policy:
    """Make the policy chosen, with the costs in `selfspec.json` where they are of this; `cost` else times the drafters.

    That takes some seconds. Without costs `fixed` never stops drafting.
    """
    if choice.k_policy == "window":
        return WindowPolicy(choice.num_draft_tokens)
    names = [part.name for part in drafter.parts()]
    known = KnownCosts.of(artifact) if artifact and choice.as_measured and set(names) <= set(artifact.costs) else None
    others = measured_elsewhere(artifact, engine.decoder) if artifact and known else ""
    if choice.k_policy == "fixed":
        [name, *rest], k = names, choice.num_draft_tokens
        usable = known is not None and not others and not rest and k <= len(known.costs[name].verify_ratio)
        return DraftPolicy(k, known.costs[name].round(k) if known and usable else None)
    if known and not others:
        return CostPolicy(known.costs, known.alphas, choice.num_draft_tokens, known.by_context)
    if others:
        choice.notices.append(f"costs are timed anew: selfspec.json's were measured with {others}")
    costs = {part.name: draft_costs(engine, part, params, progress=progress) for part in drafter.parts()}
    return CostPolicy(costs, known.alphas if known else None, choice.num_draft_tokens)


def make_plan(
    model: str, tokenizer: Any, artifact: Artifact | None, options: DecodeConfig, progress: Progress = silent
) -> Plan:
    """Load the model and prepare to decode with it as `choose` decides."""
    choice = choose(artifact, options, model)
    decoder = load_decoder(model, dtype=options.dtype, device=options.device)
    if options.compile and choice.numerics == "exact":
        raise UserError(
            "what torch.compile fuses is not certified for exact numerics",
            got="--compile",
            allowed="with --numerics fast",
            command="--numerics fast --compile",
        )
    if options.compile and not decoder.compile_layers():
        choice.notices.append("--compile has no effect: on this CPU the layers are one compiled call already")
    drafter = make_drafter(choice.settings, decoder, model) if choice.settings else None
    engine = Engine(
        decoder,
        tokenizer,
        end_tokens=end_tokens(decoder.model),
        numerics=choice.numerics,
        batch_size=options.batch_size,
        record=not options.no_graphs,
    )
    for part in drafter.parts() if drafter else []:
        if part.num_bytes:
            choice.notices.append(f"the {part.name} draft takes {part.num_bytes / 2**20:.0f} MiB more memory")
        choice.notices.extend(part.remarks)
    params = SamplingParams(options.temperature, options.top_k, options.top_p)
    policy = make_policy(engine, drafter, choice, artifact, params, progress) if drafter else DraftPolicy(0)
    return Plan(engine, drafter, choice, policy)
