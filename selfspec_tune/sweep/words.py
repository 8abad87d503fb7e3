"""What `sweep-exit` found, in plain sentences: for the terminal and for the report's page. Imports no torch."""

from __future__ import annotations

import shlex
from typing import Any

from selfspec_tune.config import flag
from selfspec_tune.sweep.tables import Json, best_in_window, chosen, printable

HOW = {
    "layer-skip": "the model's first {exit_layer} of {num_layers} layers draft",
    "low-precision": "a copy of the model in fewer bits drafts",
    "copy": "the draft is copied from what stands earlier in the text",
    "exit-head": "a trained layer after the model's first layers drafts",
    "hybrid": "the draft is copied from earlier text where that repeats, else made by another drafter",
}
"""What each drafter does, in a clause."""


def verdict(result: Json) -> str:
    """Return one or two sentences: does it pay, and with what."""
    artifact, k = result["artifact"], result["artifact"]["num_draft_tokens"]
    label, how = _chosen(result)["label"], HOW[artifact["drafter"]].format_map(artifact)
    what = f"{label} ({how}), about {k} token{'s' if k > 1 else ''} a round: {_speed(result)}"
    if artifact["enabled"]:
        return f"Yes, drafting is faster than plain decoding. Best is {what}."
    tried = artifact["speedup_confirmed"]
    slower = artifact["speedup_predicted"] <= 1 or (tried is not None and tried["speedup"] <= 1)
    why = "plain decoding is as fast or faster" if slower else "it is not sure that drafting is faster; see below"
    return f"No, {why}. The best draft there is: {what}."


def how_sure(result: Json) -> str:
    """Return how far the verdict rests on real decoding."""
    tried = result["artifact"]["speedup_confirmed"]
    if tried is None:
        return "This is a prediction from acceptance and costs. It was not tried by decoding."
    same = {
        True: "Every token was the one that plain decoding gives.",
        False: "Some tokens were OTHERS than plain decoding gives.",
        None: "Tokens were sampled, so they need not be the same.",
    }[tried["identical"]]
    return (
        f"Tried by really decoding {tried['num_prompts']} other prompts ({tried['num_tokens']} tokens) in turn with "
        f"plain decoding: ×{tried['speedup']:.2f} in the middle, and three quarters of the runs reached "
        f"×{tried['low']:.2f}. {same}"
    )


def machine(result: Json) -> str:
    """Return what it was measured on."""
    on = result["artifact"]["measured_on"]
    versions = [f"{name} {on[name]}" for name in ("torch", "transformers", "triton", "numba") if on.get(name)]
    plain = f"plain decoding {result['plain_tokens_per_second']:.1f} tokens/s"
    return f"{on['device']}, {on['threads']} threads, {on['dtype']}; {', '.join(versions)}; {plain}."


def prompts(result: Json) -> str:
    """Return which prompts, how many tokens, how they were decoded."""
    of, sampling = result["artifact"]["eval_set"], result["sampling"]
    how = "greedy"
    if sampling["temperature"] > 0:
        how = ", ".join(f"{name} {sampling[name]:g}" for name in ("temperature", "top_k", "top_p"))
    return f"{printable(of['name'])}: {of['num_prompts']} prompts, {of['num_tokens']} tokens, {how}."


def approximate(result: Json) -> str | None:
    """Return what makes the figures approximate, if they are."""
    if not result["approximate"]:
        return None
    return "Approximate: α and τ come from reference texts, which the model did not write itself."


def how_measured(result: Json) -> list[str]:
    """Return sentences on how each figure came about."""
    whose = "the model's own answers" if result["source"] == "generated" else "the reference answers"
    return [
        f"Acceptance: one pass over {whose} compares what every exit would have drafted with what the model says, for "
        f"all exits at once. It took {result['profile_seconds']:.1f} s, the model's own answers "
        f"{result['generate_seconds']:.1f} s.",
        "Tokens per round: the rounds of every exit and k are replayed on that comparison, token by token.",
        f"Costs: draft step, check and plain step are timed in turn in {result['numerics']} numerics; medians, in "
        "plain steps.",
        "Textbook score: (1 − α^(k+1)) / (1 − α) / (c·k + 1), which takes a check for one plain step. Predicted "
        "speed-up: τ / (c·k + v + o), with o what a round costs besides.",
        "Other drafters: real rounds on the same prompts, counted, at costs measured apart.",
        "The choice is made among exits in the window, and against plain decoding in the same numerics.",
    ]


def better_outside(result: Json) -> str | None:
    """Return a sentence on an exit outside the window that is predicted to do better, if there is one."""
    better = result["better_outside_window"]
    if better is None:
        return None
    low, high = result["window"]
    pays = better["speedup_predicted"] > 1
    return (
        f"better outside the window {low:g},{high:g}: exit {better['exit_layer']}, k = {better['num_draft_tokens']}, "
        f"predicted ×{better['speedup_predicted']:.2f}{'; try --window 0,1' if pays else ', which does not pay either'}"
    )


def next_command(result: Json) -> str:
    """Return the command to type next: decode, look outside the window, or train."""
    artifact, model, better = result["artifact"], result["model"], result["better_outside_window"]
    if artifact["enabled"]:
        words = ["selfspec", "decode", model, *([] if result["path"] else _flags(artifact))]
        return f'{shlex.join(words)} --prompt "..."'
    if better is not None and better["speedup_predicted"] > 1:
        raw = ["--raw"] if result["raw"] else []
        return shlex.join(["selfspec", "sweep-exit", model, "--prompts", result["prompts"], *raw, "--window", "0,1"])
    words = ["selfspec", "train", "--model", model, "--output", "trained", "--train-data", "TEXT.jsonl"]
    return shlex.join(words)


def _flags(artifact: Json) -> list[str]:
    """Return the flags of `decode` that say what `selfspec.json` would."""
    draft, names = artifact["draft"], ["draft_vocab"]
    if artifact["drafter"] == "hybrid":
        names.append("hybrid_with")
    if "low-precision" in (artifact["drafter"], draft["hybrid_with"] if artifact["drafter"] == "hybrid" else None):
        names += ["draft_bits", "draft_head_bits", "draft_group"]
    values: dict[str, Any] = {name: artifact[name] for name in ("drafter", "exit_layer")}
    values |= {name: draft[name] for name in names}
    given = {name: value for name, value in values.items() if value is not None}
    return [word for name, value in given.items() for word in (flag(name), str(value))]


def _chosen(result: Json) -> Json:
    number = chosen(result)
    assert number is not None, "selfspec.json names one of the candidates"
    candidate: Json = result["candidates"][number]
    return candidate


def _speed(result: Json) -> str:
    artifact = result["artifact"]
    predicted = f"×{artifact['speedup_predicted']:.2f} predicted"
    best = best_in_window(result, "speedup_predicted")
    # The grid of cells is about layer skip with the whole vocabulary.
    if best and artifact["drafter"] == "layer-skip" and artifact["draft"]["draft_vocab"] is None:
        low, high = best["interval"]
        predicted += f" ({low:.2f}–{high:.2f})"
    tried = artifact["speedup_confirmed"]
    return f"×{tried['speedup']:.2f} measured, {predicted}" if tried else predicted
