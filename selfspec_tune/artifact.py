"""`selfspec.json`, the file beside a checkpoint that says whether and how to speculate. Imports no torch.

It is written by `sweep-exit`, completed by `regress` and read by `decode`. A file of another schema, or of other
weights, is refused by name with the command that makes a new one.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_args

from selfspec_tune.config import MAX_DRAFT_TOKENS, Drafter, HybridWith, KPolicy, Numerics
from selfspec_tune.errors import UserError
from selfspec_tune.files import read_json, write_json

FILE_NAME = "selfspec.json"
EXIT_HEAD_FILE = "exit_head.safetensors"
"""A drafter's weights beside the checkpoint (see `model/exit_head.py`): no part of it."""
SCHEMA_VERSION = 1

STATUSES = ("passed", "undecided", "failed")
"""Of a verdict and its parts, the worst last."""
VERDICT_PARTS = ("perplexity", "tasks", "lossless", "sampling")
"""What `regress` may hold: the first two are about the weights, the others about decoding with the drafter."""


@dataclass(frozen=True)
class Artifact:
    """The contents of `selfspec.json`; names as in the glossary of the README.

    Attributes:
        draft: what makes the drafter besides its name and exit layer, see `DRAFT_FIELDS`.
        costs: by drafter (a hybrid's two parts), what the cost policy needs: alpha, cost_ratio, verify_ratio for
            1, 2, … drafted tokens, overhead; in plain steps on the machine of `measured_on`.
        by_context: the same at other context lengths, the shortest first: {max_context, exit_layer (layer skip's there,
            else null), num_draft_tokens (0: do not draft), costs}; the last holds beyond its own length.
    """

    checkpoint_fingerprint: str
    model_type: str
    num_layers: int
    enabled: bool
    reason: str
    drafter: str = "layer-skip"
    exit_layer: int | None = None
    draft: dict[str, Any] = field(default_factory=dict)
    num_draft_tokens: int | None = None
    k_min: int = 1
    k_max: int = 8
    k_policy: str = "cost"
    by_context: list[dict[str, Any]] = field(default_factory=list)
    numerics: str = "exact"
    rows: list[int] = field(default_factory=list)
    batch_size: int = 1
    alpha: float | None = None
    cost_ratio: float | None = None
    verify_ratio: float | None = None
    costs: dict[str, dict[str, Any]] = field(default_factory=dict)
    tokens_per_round: float | None = None
    speedup_model: float | None = None
    speedup_predicted: float | None = None
    speedup_confirmed: dict[str, Any] | None = None
    measured_on: dict[str, Any] = field(default_factory=dict)
    eval_set: dict[str, Any] = field(default_factory=dict)
    regress: dict[str, Any] | None = None
    schema_version: int = SCHEMA_VERSION


def fingerprint(checkpoint: Path) -> str:
    """Return a SHA-256 over config.json and, of each weight file, its name, size, header and 64 spread samples.

    Reading a few MB is enough to tell two checkpoints apart and costs the same for 100 MB and for 100 GB.
    """
    digest = hashlib.sha256()
    for path in sorted(checkpoint.iterdir()):
        if path.name in ("config.json", "adapter_config.json"):
            config = read_json(path)
            config.pop("transformers_version", None)
            digest.update(json.dumps(config, sort_keys=True).encode())
        elif path.suffix in (".safetensors", ".bin") and path.name != EXIT_HEAD_FILE:
            size = path.stat().st_size
            digest.update(f"{path.name}:{size}".encode())
            with path.open("rb") as handle:
                for index in range(64):
                    handle.seek(size * index // 64)
                    digest.update(handle.read(1 << 16))
    return digest.hexdigest()


def check_fingerprint(checkpoint: Path, found: str, problem: str, again: str) -> None:
    """Raise a UserError that says `problem`, and `again` to mend it, unless `found` is the checkpoint's fingerprint."""
    expected = fingerprint(checkpoint)
    if found != expected:
        raise UserError(problem, got=found[:12], allowed=expected[:12], command=again)


def write(checkpoint: Path, artifact: Artifact) -> Path:
    """Write `artifact` beside the checkpoint, atomically, and return the path."""
    path = checkpoint / FILE_NAME
    write_json(path, asdict(artifact))
    return path


def read(checkpoint: Path) -> Artifact | None:
    """Read the artifact beside `checkpoint`; None where there is none.

    Raises:
        UserError: the file is broken, has another schema, or belongs to other weights.
    """
    path = checkpoint / FILE_NAME
    if not path.is_file():
        return None
    again = f"selfspec sweep-exit {checkpoint} --prompts PROMPTS.jsonl"
    content = read_json(path)
    version = content.get("schema_version") if isinstance(content, dict) else None
    if version != SCHEMA_VERSION:
        raise UserError(f"{path} has an unknown schema", got=version, allowed=SCHEMA_VERSION, command=again)
    names = {f.name for f in fields(Artifact)}
    unknown = sorted(set(content) - names)
    if unknown:
        raise UserError(f"{path} has unknown fields", got=", ".join(unknown), command=again)
    try:
        artifact = Artifact(**content)
    except TypeError as error:
        raise UserError(f"{path} is incomplete: {error}", command=again) from None
    check_fingerprint(checkpoint, artifact.checkpoint_fingerprint, f"{path} was written for other weights", again)
    _validate(path, artifact, again)
    return artifact


def with_regress(artifact: Artifact, verdict: dict[str, Any]) -> Artifact:
    """Return a copy of `artifact` that carries the verdict of `selfspec regress`."""
    return replace(artifact, regress=verdict)


def worst(statuses: Iterable[str]) -> str:
    """Return failed if any is, else undecided if any is, else passed."""
    return max(statuses, key=STATUSES.index, default="passed")


def judged(verdict: dict[str, Any]) -> dict[str, Any]:
    """Return a verdict with the `status` and `passed` that follow from its parts; a part not tested is None."""
    parts = [verdict[name] for name in VERDICT_PARTS if verdict.get(name)]
    # Versions before `status` had `passed` only.
    status = worst(part.get("status") or ("passed" if part.get("passed") else "failed") for part in parts)
    rest = {name: value for name, value in verdict.items() if name not in ("status", "passed")}
    return {"status": status, "passed": status == "passed", **rest}


def _validate(path: Path, artifact: Artifact, again: str) -> None:
    allowed = {"drafter": get_args(Drafter), "numerics": get_args(Numerics), "k_policy": get_args(KPolicy)}
    for name, values in allowed.items():
        if getattr(artifact, name) not in values:
            got = getattr(artifact, name)
            raise UserError(f"{path}: {name} is unknown", got=got, allowed=", ".join(values), command=again)
    for name in ("draft", "costs", "measured_on", "eval_set"):
        if not isinstance(getattr(artifact, name), dict):
            raise UserError(f"{path}: {name} is no object", got=getattr(artifact, name), allowed="{...}", command=again)
    k_max = artifact.k_max
    if not _is_count(k_max, MAX_DRAFT_TOKENS):
        raise UserError(f"{path}: k_max is out of range", got=k_max, allowed=f"1..{MAX_DRAFT_TOKENS}", command=again)
    if not all(_is_cost(value) for value in artifact.costs.values()):
        raise UserError(f"{path}: costs cannot be read", got=artifact.costs, command=again)
    if not _are_contexts(artifact):
        raise UserError(f"{path}: by_context cannot be read", got=artifact.by_context, command=again)
    unfit = {
        name: value
        for name, value in artifact.draft.items()
        if name not in DRAFT_FIELDS or not DRAFT_FIELDS[name](value)
    }
    if unfit:
        raise UserError(f"{path}: draft is unknown", got=unfit, allowed=", ".join(DRAFT_FIELDS), command=again)
    if not artifact.enabled:
        return
    exit_layer, k = artifact.exit_layer, artifact.num_draft_tokens
    needs_exit = "layer-skip" in (artifact.drafter, artifact.draft.get("hybrid_with"))
    most = artifact.num_layers if isinstance(artifact.num_layers, int) else 0
    if (exit_layer is not None or needs_exit) and not _is_count(exit_layer, most - 1):
        raise UserError(
            f"{path}: exit_layer is out of range",
            got=exit_layer,
            allowed=f"1..{artifact.num_layers - 1}",
            command=again,
        )
    if not _is_count(k, MAX_DRAFT_TOKENS):
        counts = f"1..{MAX_DRAFT_TOKENS}"
        raise UserError(f"{path}: num_draft_tokens is out of range", got=k, allowed=counts, command=again)


def _are_contexts(artifact: Artifact) -> bool:
    """Whether `by_context` is complete, of the drafters in `costs`, and sorted by length."""
    entries, most = artifact.by_context, artifact.num_layers - 1 if isinstance(artifact.num_layers, int) else 0
    if not isinstance(entries, list) or not all(_is_context(entry, most) for entry in entries):
        return False
    lengths = [entry["max_context"] for entry in entries]
    return lengths == sorted(lengths) and all(set(entry["costs"]) == set(artifact.costs) for entry in entries)


def _is_context(value: Any, last_exit: int) -> bool:
    """Whether an entry of `by_context` can be decoded with."""
    if not isinstance(value, dict) or set(value) != {"max_context", "exit_layer", "num_draft_tokens", "costs"}:
        return False
    exit_layer, k, costs = value["exit_layer"], value["num_draft_tokens"], value["costs"]
    return (
        _is_count(value["max_context"], 1 << 31)
        and (exit_layer is None or _is_count(exit_layer, last_exit))
        and (k == 0 or _is_count(k, MAX_DRAFT_TOKENS))
        and isinstance(costs, dict)
        and all(map(_is_cost, costs.values()))
    )


def _is_count(value: Any, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most


def _is_cost(value: Any) -> bool:
    """Whether a value of `costs` can be what the cost policy reckons with."""

    def is_number(number: Any, least: float, most: float = math.inf) -> bool:
        return isinstance(number, int | float) and least <= number <= most and math.isfinite(number)

    if not isinstance(value, dict) or set(value) != {"alpha", "cost_ratio", "verify_ratio", "overhead"}:
        return False
    verify, alpha = value["verify_ratio"], value["alpha"]
    return (
        is_number(value["cost_ratio"], 0)
        and is_number(value["overhead"], 0)
        and isinstance(verify, list)
        and 1 <= len(verify) <= MAX_DRAFT_TOKENS
        and all(is_number(each, 1e-6) for each in verify)
        and (alpha is None or is_number(alpha, 0, 1))
    )


DRAFT_FIELDS: dict[str, Callable[[Any], bool]] = {
    "draft_bits": lambda value: value in (4, 8),
    "draft_head_bits": lambda value: value in (4, 8, 16),
    "draft_group": lambda value: value in (32, 64),
    "hybrid_with": lambda value: value in get_args(HybridWith),
    "draft_vocab": lambda value: value is None or _is_count(value, 1 << 31),
}
"""What `draft` may hold, by name."""
