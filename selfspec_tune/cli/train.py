"""`selfspec train`: recipe, --set and flags become a TrainConfig, facts become a table or JSON."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from selfspec_tune import config as configs
from selfspec_tune.cli import console
from selfspec_tune.cli.options import options_from
from selfspec_tune.cli.train_view import training_view
from selfspec_tune.cli.verdict import warn_of_gate
from selfspec_tune.train.guard import STOPPED


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
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print all options as a recipe, each with its source, and end.")
    ] = False,
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

    Full-depth perplexity is held against the base's at every evaluation, on held-out text and on --general-data. What
    is saved is the evaluation with the best estimated speed-up of those within --max-perplexity-increase; if there is
    none, nothing is saved and the exit code is 1.

    The same command again resumes an interrupted run, and does nothing for a finished one. Ctrl-C and SIGTERM finish
    the step, save a state and exit with 130 and 143; told a second time, the process ends at once.

    Several processes and machines: `accelerate launch -m selfspec_tune train ...` with the same options, and an
    --output that all machines share. With --use_fsdp --fsdp_version 2 weights, gradients and moments are sharded over
    the processes; the layers are the units, whatever else it is told.

    \b
    Examples:
      selfspec train recipes/demo.yaml --model SmolLM2-135M/ --output trained/ \\
          --train-data demo/train.jsonl --eval-data demo/heldout.jsonl
      selfspec train --model Qwen/Qwen3-0.6B --output trained/ --train-data chats.jsonl --exits 6,10,14 --max-steps 2000
      selfspec train recipes/demo.yaml --set max_minutes=60 --set learning_rate=5e-5 --model MODEL --output trained/ \\
          --train-data wikitext:wikitext-2-raw-v1:train[:5000]
      selfspec train --method exit-head --model MODEL --output MODEL --train-data chats.jsonl --exits 10 \\
          --learning-rate 5e-4 --max-steps 1000
      accelerate launch --num_processes 8 --use_fsdp --fsdp_version 2 -m selfspec_tune train --model MODEL \\
          --output trained/ --train-data chats.jsonl
    """
    layers = {"--set": configs.parse_assignments(assignments or []), "flag": flags}
    if recipe:
        layers = {f"recipe {recipe}": configs.read_recipe(recipe), **layers}
    config = configs.build(configs.TrainConfig, *layers.values())
    if print_config:
        _print_config(config, layers)
        return

    from selfspec_tune.train import checkpoint, environment, loop
    from selfspec_tune.train.options import check_options, idle_options

    check_options(config)
    speaks = os.environ.get("RANK", "0") == "0"  # started by torchrun or accelerate launch: one rank speaks for all
    facts = checkpoint.finished(config)
    if facts is not None:
        if speaks:
            console.notice(f"{config.output} is finished: {facts['steps']} steps were done. Nothing to do.")
    else:
        if speaks:
            _warn(config, idle_options(config))
        try:
            with training_view(config, shown=speaks) as (progress, report):
                facts = loop.train(config, progress, report)
        except (KeyboardInterrupt, SystemExit):
            if speaks:
                console.notice(checkpoint.where_it_stopped(config))
            raise
    if speaks:
        if config.json:
            console.print_json(facts)
        else:
            _print(facts, config)
        _print_verdict(facts, config)
    environment.tear_down()
    if facts.get("stopped_by") == "diverged":  # a finished one: when it happened it was an error
        raise typer.Exit(2)
    if facts.get("best_step", 0) is None:
        raise typer.Exit(1)


def _warn(config: configs.TrainConfig, idle: list[str]) -> None:
    for sentence in idle:
        console.notice(f"warning: {sentence}")
    if config.model:
        warn_of_gate(config.model)
    if config.method == "exit-head":
        console.notice(f"memory, estimated: {_head_memory(config)}")
    elif (config.anchor_weight or config.anchor_data) and not config.lora_rank:
        size = _anchor_memory(config) / 1e9
        console.notice(f"memory: the anchor keeps a frozen copy of the base on every device, {size:.2g} GB")


def _print_config(config: configs.TrainConfig, layers: dict[str, dict[str, Any]]) -> None:
    """Print the options as a recipe, each with where its value comes from; with --json as one object."""
    sources = dict.fromkeys(configs.field_types(configs.TrainConfig), "default")
    for source, layer in layers.items():
        sources.update({str(key).replace("-", "_"): source for key in layer})
    values = configs.plain({**vars(config), "exits": config.chosen_exits})
    if config.json:
        console.print_json(values)
    else:
        print(configs.as_recipe(values, sources))


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


def _anchor_memory(config: configs.TrainConfig) -> int:
    import torch

    from selfspec_tune.model.load import load_config
    from selfspec_tune.train import checkpoint, environment, memory

    precision = environment.mixed_precision(config.mixed_precision, environment.training_device(config.device))
    return memory.anchor_memory(
        load_config(checkpoint.base_name(str(config.model))),
        share_embeddings=config.freeze_embeddings,
        compute=torch.bfloat16 if precision == "bf16" else torch.float32,
    )


def _print(facts: dict[str, Any], config: configs.TrainConfig) -> None:
    output, saved = config.output, facts.get("best_step", 0) is not None
    following = f"selfspec sweep-exit {output} --prompts PROMPTS.jsonl"
    if config.method == "exit-head":
        following = f'selfspec decode {output} --drafter exit-head --prompt "..."'
    rows = [
        [f"alpha at exit {layer}", f"{before:.3f}", f"{facts['alpha_after'][layer]:.3f}"]
        for layer, before in facts["alpha_before"].items()
    ]
    for name, text in (("perplexity", "perplexity"), ("general_perplexity", "perplexity of general text")):
        if f"{name}_before" in facts:
            rows.append([text, f"{facts[f'{name}_before']:.3f}", f"{facts[f'{name}_after']:.3f}"])
    if "speedup_estimate_after" in facts:
        before, after = (facts[f"speedup_estimate_{when}"]["speedup_model"] for when in ("before", "after"))
        rows.append(["speed-up, estimated", f"{before:.2f}", f"{after:.2f}"])
    console.table(
        f"{output}: {facts['steps']} steps, {facts['tokens']:,} tokens, {facts['seconds'] / 60:.1f} minutes",
        ["held-out text", "before", "after" if saved else "after, not saved"],
        rows,
        caption=f"next: {following}" if saved else None,
    )


def _print_verdict(facts: dict[str, Any], config: configs.TrainConfig) -> None:
    """Say on stderr what the facts mean where they are not what was hoped for."""
    best, limit = facts.get("best_step", facts["steps"]), config.max_perplexity_increase
    states = f"{config.output}/state"
    if best is None:
        console.notice(
            f"nothing is saved: no evaluation kept perplexity within {limit} of the base. The last weights are a state "
            f"in {states} only.\n  try:     a smaller --learning-rate, a larger --anchor-weight, or --lora-rank, and "
            f"--output OTHER_DIR"
        )
        return
    if best != facts["steps"]:
        ended = STOPPED.get(facts["stopped_by"], facts["stopped_by"])
        console.notice(f"saved are the weights of step {best}, the best within {limit}; the run ended as {ended}")
    if "share_kept" in facts:
        console.notice(
            f"perplexity was beyond {limit} at the end: {facts['share_kept']:.0%} of what was trained is kept, the "
            f"rest taken back towards the base"
        )
    if not facts.get("improved", True):
        console.notice("the estimated speed-up is no better than the base's: training has bought nothing so far")
