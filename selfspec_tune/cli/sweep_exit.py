"""`selfspec sweep-exit`: prompts in, tables, `selfspec.json` and, if asked for, a report out."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from selfspec_tune import config as configs
from selfspec_tune.cli import console, sweep_view
from selfspec_tune.cli.options import options_from
from selfspec_tune.cli.verdict import gate_notices
from selfspec_tune.errors import UserError


@options_from(configs.SweepConfig)
def sweep_exit(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Checkpoint directory or hub name.")],
    *,
    flags: dict[str, Any],
) -> None:
    """Find the drafter, the exit layer and the number of draft tokens that pay on your prompts and this machine.

    Profiles every exit on the model's own continuations in one pass and the other drafters by real rounds, measures
    what draft and verification cost here, tries the best against plain decoding, and writes selfspec.json beside the
    checkpoint for `selfspec decode`. If nothing pays, it says what is missing, and decoding stays plain.

    \b
    Examples:
      selfspec sweep-exit trained/ --prompts heldout.jsonl
      selfspec sweep-exit trained/ --prompts chats.jsonl --temperature 0.7 --top-p 0.9 --max-draft-tokens 5
      selfspec sweep-exit trained/ --prompts code.jsonl --raw --num-prompts 12 --window 0.1,0.6 --json
      selfspec sweep-exit my-model/ --prompts chats.jsonl --drafters copy,low-precision,hybrid --confirm 4
      selfspec sweep-exit trained/ --prompts heldout.jsonl --report report/ --costs a100.json
      selfspec sweep-exit trained/ --prompts answered.jsonl --source reference
      accelerate launch -m selfspec_tune sweep-exit trained/ --prompts heldout.jsonl
    """
    config = configs.build(configs.SweepConfig, flags)
    check_options(config)

    from selfspec_tune.sweep import page

    if config.report:
        page.check_report(config.report)

    from selfspec_tune.decode.engine import Engine
    from selfspec_tune.decode.prompts import prompt_text
    from selfspec_tune.decode.sampling import SamplingParams
    from selfspec_tune.model.decoder import load_decoder
    from selfspec_tune.model.load import checkpoint_dir, end_tokens, load_tokenizer
    from selfspec_tune.sweep.processes import Processes
    from selfspec_tune.sweep.prompts import read_prompts
    from selfspec_tune.sweep.select import sweep
    from selfspec_tune.trained_on import notices

    SamplingParams(config.temperature, config.top_k, config.top_p)  # a bad value fails before anything is loaded
    processes, tokenizer = Processes(), load_tokenizer(model)
    records, prompts = read_prompts(config, tokenizer)
    texts = [prompt_text(record, config) for record in records]
    flattered = notices(checkpoint_dir(model), texts, what="prompts", flattered="acceptance") if processes.main else []
    for text in flattered:
        console.notice(text)
    decoder = load_decoder(model, dtype=config.dtype, device=processes.device(config.device))
    engine = Engine(decoder, tokenizer, end_tokens=end_tokens(decoder.model), numerics=config.numerics)
    with console.progress_bar(shown=processes.main) as progress:
        result = sweep(model, engine, prompts, config, processes, flattered, console.notice, progress)
    processes.leave()
    if result is None:
        return
    found = result.to_dict()
    gate = gate_notices(model, checkpoint_dir(model), result.artifact.regress)
    found["warnings"] += [line.removeprefix("warning: ") for line in gate]
    for line in gate:
        console.notice(line)
    if config.json:
        console.print_json(found)
    else:
        sweep_view.show(found)
    if config.report:
        page.write_report(found, config.report)
        console.notice(f"report: {config.report / page.PAGE_NAME}")
    if result.path is None:
        console.notice(f"{model} is not a directory, so nothing was written: download it to keep the choice beside it")


def check_options(config: configs.SweepConfig) -> None:
    """Raise a UserError for a missing option or a value that cannot work, before anything heavy is loaded."""
    if config.prompts is None:
        raise UserError(
            "sweep-exit needs prompts like those to be served, which the model was not trained on",
            allowed='JSONL with lines such as {"prompt": "..."} or {"messages": [...]}',
            command="selfspec sweep-exit MODEL --prompts PROMPTS.jsonl",
        )
    for name in ("num_prompts", "max_draft_tokens", "context_lengths", "batch_sizes", "repeats", "confirm"):
        least = {"confirm": 0, "context_lengths": 16}.get(name, 1)
        value = getattr(config, name)
        if value == () or min(value if isinstance(value, tuple) else (value,)) < least:
            raise UserError(f"{configs.flag(name)} is too small", got=value, allowed=f"{least} or more")
    if config.max_draft_tokens > configs.MAX_DRAFT_TOKENS:
        allowed = f"1..{configs.MAX_DRAFT_TOKENS}"
        raise UserError("--max-draft-tokens is too large", got=config.max_draft_tokens, allowed=allowed)
    if config.max_new_tokens < config.max_draft_tokens + 2:
        raise UserError(
            "the continuations are too short to hold a whole round",
            got=f"--max-new-tokens {config.max_new_tokens}",
            allowed=f"{config.max_draft_tokens + 2} or more with --max-draft-tokens {config.max_draft_tokens}",
        )
    if any(size < 1 for size in config.draft_vocab):
        raise UserError("--draft-vocab is too small", got=config.draft_vocab, allowed="1 or more")
    low, high = config.window
    if not 0 <= low <= high <= 1:
        raise UserError("--window is no part of the depth", got=f"{low:g},{high:g}", allowed="LOW,HIGH within 0,1")
