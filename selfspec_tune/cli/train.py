"""`selfspec train`: recipe, --set and flags become a TrainConfig, facts become a table or JSON."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from selfspec_tune import config as configs
from selfspec_tune.cli import console
from selfspec_tune.cli.options import options_from
from selfspec_tune.cli.verdict import warn_of_gate


@options_from(configs.TrainConfig)
def train(
    recipe: Annotated[
        Path | None,
        typer.Argument(metavar="RECIPE", help="YAML recipe; --set and flags override it.", show_default=False),
    ] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override one option of the recipe. May be repeated."),
    ] = None,
    *,
    flags: dict[str, Any],
) -> None:
    """Train a model so that its early layers draft well, without giving up its full-depth quality.

    With --method layer-skip: continued pretraining with layer dropout and early-exit losses. Writes a complete
    checkpoint, metrics.jsonl and training.json to --output.

    With --method exit-head: the model stays as it is, to the bit. One layer and a norm after exit E are trained, and
    written as exit_head.safetensors and exit_head.json into --output. That may be the model's own directory; any other
    one is completed to a checkpoint: weights are hard links where the disk can, the small files copies.
    --cache-targets DIR keeps the model's hidden states on disk, so that steps run the new layer and the LM head only;
    it pays when sequences are read more than once, by more epochs or by another run.

    The same command again resumes an interrupted run, and does nothing for a finished one.

    \b
    Examples:
      selfspec train recipes/demo.yaml --model SmolLM2-135M/ --output trained/ \\
          --train-data demo/train.jsonl --eval-data demo/heldout.jsonl
      selfspec train --model Qwen/Qwen3-0.6B --output trained/ --train-data chats.jsonl --exits 6,10,14 --max-steps 2000
      selfspec train recipes/demo.yaml --set max_minutes=60 --set learning_rate=5e-5 --model MODEL --output trained/ \\
          --train-data wikitext:wikitext-2-raw-v1:train[:5000]
      selfspec train --method exit-head --model MODEL --output MODEL --train-data chats.jsonl --exits 10 \\
          --learning-rate 5e-4 --max-steps 1000
    """
    layers = [configs.read_recipe(recipe)] if recipe else []
    config = configs.build(configs.TrainConfig, *layers, configs.parse_assignments(assignments or []), flags)

    from selfspec_tune.train import checkpoint, loop
    from selfspec_tune.train.options import check_options

    check_options(config)
    facts = checkpoint.finished(config)
    if facts is not None:
        console.notice(f"{config.output} is finished: {facts['steps']} steps were done. Nothing to do.")
    else:
        if config.model:
            warn_of_gate(config.model)
        if config.method == "exit-head":
            console.notice(f"memory, estimated: {_head_memory(config)}")
        with console.progress_bar() as progress:
            facts = loop.train(config, progress)
    if os.environ.get("RANK", "0") != "0":  # started by torchrun or accelerate launch: one rank speaks for all
        return
    if config.json:
        console.print_json(facts)
    else:
        _print(facts, config)


def _head_memory(config: configs.TrainConfig) -> object:
    import torch

    from selfspec_tune.model.layer import cpu_multiplies_bf16
    from selfspec_tune.model.load import load_config
    from selfspec_tune.train import checkpoint, memory

    of_model = load_config(checkpoint.base_name(str(config.model)))
    dtype = of_model.dtype if isinstance(of_model.dtype, torch.dtype) else torch.float32
    if dtype == torch.bfloat16 and not torch.cuda.is_available() and not cpu_multiplies_bf16():
        dtype = torch.float32  # see `FrozenHead`
    return memory.head_memory(of_model, tokens=config.batch_size * config.sequence_length, dtype=dtype)


def _print(facts: dict[str, Any], config: configs.TrainConfig) -> None:
    rows = [
        [f"alpha at exit {layer}", f"{before:.3f}", f"{facts['alpha_after'][layer]:.3f}"]
        for layer, before in facts["alpha_before"].items()
    ]
    output = config.output
    following = f"selfspec sweep-exit {output} --prompts PROMPTS.jsonl"
    if config.method == "exit-head":
        following = f'selfspec decode {output} --drafter exit-head --prompt "..."'
    rows.append(["perplexity", f"{facts['perplexity_before']:.3f}", f"{facts['perplexity_after']:.3f}"])
    console.table(
        f"{output}: {facts['steps']} steps, {facts['tokens']:,} tokens, {facts['seconds'] / 60:.1f} minutes",
        ["held-out text", "before", "after"],
        rows,
        caption=f"next: {following}",
    )
