"""The verdict of `selfspec regress`: both tests, what they found, and where that is kept.

Order matters for memory only: the trained model is loaded, scored, decoded with and released before the base is
loaded, so that one model fits at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from selfspec_tune import artifact, trained_on
from selfspec_tune.artifact import Artifact
from selfspec_tune.config import RegressConfig
from selfspec_tune.decode.drafters.make import DraftSettings, make_drafter
from selfspec_tune.decode.engine import Engine, Request
from selfspec_tune.decode.prompts import read_requests
from selfspec_tune.errors import UserError
from selfspec_tune.files import read_json
from selfspec_tune.model.decoder import LayeredDecoder
from selfspec_tune.model.families import Family, describe
from selfspec_tune.model.layer import widens
from selfspec_tune.model.load import checkpoint_dir, end_tokens, load_config, load_model, load_tokenizer
from selfspec_tune.progress import Progress, silent
from selfspec_tune.regress import lossless, quality
from selfspec_tune.regress.lossless import Lossless
from selfspec_tune.regress.quality import Quality

PARTS = ("perplexity", "lossless")
"""The two halves of a verdict."""

FACTS = "training.json"
"""What `selfspec train` leaves beside a checkpoint; its `base` is the checkpoint trained from."""


@dataclass
class Inputs:
    """Everything read before a model is loaded, so that mistakes show at once."""

    base: str | None
    windows: list[Tensor]
    requests: list[Request]
    artifact: Artifact | None
    notices: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Findings:
    """What the trained model's turn gave: nats per window, the comparison, and what the base must match."""

    nll: Tensor | None
    lossless: Lossless | None
    family: Family
    dtype: str
    config: Any


def run(model: str, config: RegressConfig, progress: Progress = silent) -> tuple[dict[str, Any], list[str]]:
    """Test `model` and keep the verdict beside it.

    Args:
        model: checkpoint directory, adapter directory or hub name (then nothing is written).
        config: what to test, and how.
        progress: told of windows and cases.

    Returns:
        The verdict, and notices for the user on what was not tested or not written.

    Raises:
        UserError: nothing to test, or bad input.
    """
    max_increase = quality.parse_increase(config.max_perplexity_increase)
    inputs = read_inputs(model, config)
    findings = _try_trained(model, config, inputs, progress)
    compared = None
    if inputs.base is not None and findings.nll is not None:
        base = for_scoring(load_model(inputs.base, dtype=findings.dtype, device=config.device))
        quality.check_same_size(findings.config, base.config)
        nll = quality.window_nll(base, inputs.windows, progress, "perplexity of the base")
        counts = torch.tensor([len(window) - 1 for window in inputs.windows])
        compared = quality.compare(findings.nll, nll, counts, max_increase=max_increase)
    verdict = build_verdict(compared, findings.lossless)
    if inputs.artifact is not None and inputs.artifact.regress is not None:
        verdict = merged(verdict, inputs.artifact.regress)
    inputs.notices += store(model, verdict, findings.family, inputs.artifact)
    return verdict, inputs.notices


def build_verdict(compared: Quality | None, tested: Lossless | None) -> dict[str, Any]:
    """Return the verdict as one JSON object; what was not tested is null and cannot fail."""
    return {
        "passed": (compared is None or compared.passed) and (tested is None or tested.passed),
        "perplexity_ratio": compared.to_dict()["ratio"] if compared is not None else None,
        "perplexity": {**compared.to_dict(), "passed": compared.passed} if compared is not None else None,
        "lossless": {**tested.to_dict(), "passed": tested.passed} if tested is not None else None,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def merged(verdict: dict[str, Any], earlier: dict[str, Any]) -> dict[str, Any]:
    """Return `verdict` with what it did not test taken from an earlier verdict on the same weights.

    Otherwise a run without `--text` would hide that perplexity failed. A half taken over keeps its own date.
    """
    kept = {name: earlier[name] for name in PARTS if verdict[name] is None and earlier.get(name) is not None}
    if not kept:
        return verdict
    halves = {name: {"date": earlier.get("date"), **half} for name, half in kept.items()}
    passed = verdict["passed"] and all(half.get("passed", earlier["passed"]) for half in halves.values())
    ratio = (halves.get("perplexity") or verdict["perplexity"] or {}).get("ratio")
    return {**verdict, **halves, "passed": passed, "perplexity_ratio": ratio}


def store(model: str, verdict: dict[str, Any], family: Family, known: Artifact | None) -> list[str]:
    """Put the verdict into MODEL's selfspec.json and return notices; without a directory nothing is written.

    Where there is no usable selfspec.json one is made that says that no sweep has been run.
    """
    directory = checkpoint_dir(model)
    if directory is None:
        return [f"{model} is no directory here: the verdict was not stored"]
    if known is None:
        known = Artifact(
            checkpoint_fingerprint=artifact.fingerprint(directory),
            model_type=family.model_type,
            num_layers=family.num_layers,
            enabled=False,
            reason="no sweep was run",
        )
    try:
        artifact.write(directory, artifact.with_regress(known, verdict))
    except OSError as error:
        return [f"the verdict could not be stored in {directory}: {error.strerror or error}"]
    return []


def for_scoring(loaded: Any) -> Any:
    """Return the model, its weights widened to fp32 (no value changes) where that is what the device computes fast."""
    return loaded.float() if widens(loaded) else loaded


def find_base(model: str, config: RegressConfig) -> str | None:
    """Return the base to compare with: the flag's, else the one that training.json names, else None."""
    directory = checkpoint_dir(model)
    if config.base is not None or directory is None or not (directory / FACTS).is_file():
        return config.base
    facts = read_json(directory / FACTS)
    base = facts.get("base") if isinstance(facts, dict) else None
    if base is None:
        return None
    if Path(base).is_absolute() and not Path(base).is_dir():
        raise UserError(
            f"the base that {directory / FACTS} names is gone", got=base, command="--base DIR, where it is now"
        )
    return str(base)


def read_inputs(model: str, config: RegressConfig) -> Inputs:
    """Read texts, prompts, tokenizers and selfspec.json, and say what cannot be tested.

    Raises:
        UserError: a bad number or file, another vocabulary in the base, or nothing left to test.
    """
    least = {"num_prompts": 1, "max_new_tokens": 1, "max_documents": 1, "window_length": 2}
    for name, minimum in least.items():
        if getattr(config, name) < minimum:
            got = getattr(config, name)
            raise UserError(f"{name} is too small", got=got, allowed=f"{minimum} or more")
    if config.base is not None and not config.text:
        raise UserError("a base is compared on held-out text, and none was given", command="--text HELDOUT.txt")
    base = find_base(model, config) if config.text else None
    if base is None and config.prompts is None:
        raise UserError(
            "there is nothing to test",
            allowed="--prompts for losslessness; --base and --text for perplexity",
            command=f"selfspec regress {model} --prompts PROMPTS.jsonl --base BASE --text HELDOUT.txt",
        )
    known, notices = _known_artifact(model)
    tokenizer = load_tokenizer(model)
    inputs = Inputs(base, [], [], known, notices)
    if base is not None:
        inputs.windows = _read_windows(base, tokenizer, config)
        texts = [tokenizer.decode(window) for window in inputs.windows]
        notices += trained_on.notices(checkpoint_dir(model), texts, what="texts", flattered="perplexity")
    elif config.text:
        notices.append("no base is known (--base): weights were not compared, perplexity was not tested")
    else:
        notices.append("no held-out text (--text): weights were not compared, perplexity was not tested")
    if config.prompts is None:
        notices.append("no prompts (--prompts): losslessness was not tested")
    else:
        _, inputs.requests = read_requests(
            config.prompts,
            tokenizer,
            config,
            max_new_tokens=config.max_new_tokens,
            limit=config.num_prompts,
        )
    return inputs


def _read_windows(base: str, tokenizer: Any, config: RegressConfig) -> list[Tensor]:
    quality.check_same_vocabulary(tokenizer, load_tokenizer(base))
    return quality.read_windows(
        config.text,
        tokenizer,
        text_field=config.text_field,
        window_length=config.window_length,
        max_documents=config.max_documents,
    )


def _known_artifact(model: str) -> tuple[Artifact | None, list[str]]:
    directory = checkpoint_dir(model)
    if directory is None:
        return None, []
    try:
        return artifact.read(directory), []
    except UserError as error:
        return None, [f"{error.what}: it is replaced"]


def _try_trained(model: str, config: RegressConfig, inputs: Inputs, progress: Progress) -> Findings:
    """Load the trained model and do all that needs it; it is released when this returns."""
    loaded = load_model(model, dtype=config.dtype, device=config.device)
    family = describe(loaded.config)
    nll = None
    if inputs.base is not None:
        if config.window_length > family.max_context:
            got, allowed = config.window_length, f"at most {family.max_context}"
            raise UserError("window_length is longer than the model's context", got=got, allowed=allowed)
        directory = checkpoint_dir(inputs.base)
        if directory is None or not (directory / "adapter_config.json").is_file():
            quality.check_same_size(loaded.config, load_config(inputs.base))
        # Decoding below needs the weights as they are, so scoring in fp32 takes a copy of its own.
        again = widens(loaded) and load_model(model, dtype=config.dtype, device=config.device)
        scored = for_scoring(again) if again else loaded
        nll = quality.window_nll(scored, inputs.windows, progress, "perplexity of the model")
    tested = _try_lossless(model, loaded, config, inputs, progress) if inputs.requests else None
    return Findings(nll, tested, family, str(loaded.dtype).removeprefix("torch."), loaded.config)


def _try_lossless(model: str, loaded: Any, config: RegressConfig, inputs: Inputs, progress: Progress) -> Lossless:
    decoder = LayeredDecoder(loaded)
    swept = inputs.artifact
    lengths = list(dict.fromkeys(config.num_draft_tokens)) or list(lossless.DEFAULT_NUM_DRAFT_TOKENS)
    if not config.num_draft_tokens and swept and swept.enabled and swept.num_draft_tokens:
        # The policy drafts up to k_max tokens.
        lengths = sorted({1, swept.num_draft_tokens, swept.k_max})
    settings = _tested(config, swept, decoder.num_layers)
    drafters = {each.label: make_drafter(each, decoder, model) for each in settings}
    engine = Engine(
        decoder,
        end_tokens=end_tokens(loaded),
        numerics=config.numerics,
        keep_logits=True,
    )
    return lossless.check_lossless(engine, inputs.requests, drafters, lengths, progress=progress)


def _tested(config: RegressConfig, swept: Artifact | None, num_layers: int) -> list[DraftSettings]:
    """Return layer skip at the exits asked for, else what `selfspec.json` has chosen, else exits over the depth."""
    if not config.exit_layers and swept is not None and swept.enabled:
        return [DraftSettings.of(swept)]
    exits = list(dict.fromkeys(config.exit_layers)) or lossless.default_exit_layers(num_layers)
    return [DraftSettings("layer-skip", exit_layer) for exit_layer in exits]
