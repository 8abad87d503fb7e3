"""`selfspec check`: which row counts give equal bits on this machine, and what exactness costs."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from selfspec_tune import config
from selfspec_tune.cli import console
from selfspec_tune.cli.options import options_from
from selfspec_tune.cli.verdict import warn_of_gate
from selfspec_tune.errors import UserError


@options_from(config.CheckConfig)
def check(
    model: Annotated[str, typer.Argument(help="Checkpoint directory or hub name.", show_default=False)],
    flags: dict[str, Any],
) -> None:
    """Test on this machine which row counts `numerics: exact` may use, and measure its price.

    Exit code 0 if exact decoding is possible, 1 if not.

    Examples:

        selfspec check ./my-model

        selfspec check ./my-model --dtype float32 --batch-size 4 --json
    """
    import torch

    from selfspec_tune.decode.price import plain_step_seconds
    from selfspec_tune.model.decoder import load_decoder
    from selfspec_tune.model.rows import certify_at_length

    options = config.build(config.CheckConfig, flags)
    for name in ("batch_size", "live_length"):
        if getattr(options, name) < 1:
            raise UserError(f"{name} is out of range", got=getattr(options, name), allowed="1 or more")
    warn_of_gate(model)
    decoder = load_decoder(model, dtype=options.dtype, device=options.device)
    with console.progress_bar() as progress, torch.inference_mode():
        classes = certify_at_length(
            decoder,
            batch_size=options.batch_size,
            max_rows=config.MAX_DRAFT_TOKENS + 1,
            live_length=options.live_length,
            progress=progress,
        )
        seconds = plain_step_seconds(decoder, classes[:1], batch_size=options.batch_size, progress=progress)
    result = {
        "exact": bool(classes),
        "classes": [list(rows.counts) for rows in classes],
        "batch_size": options.batch_size,
        "dtype": str(decoder.dtype).removeprefix("torch."),
        "device": str(decoder.device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "plain_step_ms": {name: round(1000 * value, 2) for name, value in seconds.items()},
    }
    if options.json:
        console.print_json(result)
    else:
        _print(result, classes)
    if not classes:
        raise typer.Exit(1)


def _print(result: dict[str, Any], classes: list[Any]) -> None:
    rows = [
        (", ".join(map(str, counts)), f"a plain or draft step has {counts[0]}" if index == 0 else "")
        for index, counts in enumerate(result["classes"])
    ]
    where = f"{result['dtype']} on {result['device']}, {result['threads']} threads, batch size {result['batch_size']}"
    console.table("Row counts with equal bits", ("rows per sequence", ""), rows, caption=where)
    steps = result["plain_step_ms"]
    if classes:
        price = steps["exact"] / steps["fast"]
        print(f"exact: yes. A plain step takes {steps['exact']} ms exact, {steps['fast']} ms fast ({price:.2f} x).")
    else:
        print(f"exact: no. No row count gives equal bits here; use --numerics fast ({steps['fast']} ms a step).")
