"""`selfspec sweep-exit`: prompts in, a table and `selfspec.json` out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from selfspec_tune import config as configs
from selfspec_tune.cli import console
from selfspec_tune.cli.options import options_from
from selfspec_tune.cli.verdict import gate_notices
from selfspec_tune.errors import UserError

if TYPE_CHECKING:
    from selfspec_tune.sweep.objective import Cell
    from selfspec_tune.sweep.select import Sweep

FEW_PROMPTS = 8
MAP_ROWS, TABLE_ROWS = 32, 12


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
    """
    config = configs.build(configs.SweepConfig, flags)
    check_options(config)

    from selfspec_tune.decode.engine import Engine
    from selfspec_tune.decode.prompts import read_requests
    from selfspec_tune.decode.sampling import SamplingParams
    from selfspec_tune.model.decoder import load_decoder
    from selfspec_tune.model.load import checkpoint_dir, end_tokens, load_tokenizer
    from selfspec_tune.sweep import confirm, select

    assert config.prompts is not None
    SamplingParams(config.temperature, config.top_k, config.top_p)  # a bad value fails before anything is loaded
    tokenizer = load_tokenizer(model)
    _, requests = read_requests(
        config.prompts,
        tokenizer,
        config,
        max_new_tokens=config.max_new_tokens,
        limit=config.num_prompts + confirm.CONFIRM_PROMPTS,
    )
    if len(requests) < FEW_PROMPTS:
        console.notice(f"only {len(requests)} prompts: with fewer than {FEW_PROMPTS} the choice may be chance")
    decoder = load_decoder(model, dtype=config.dtype, device=config.device)
    engine = Engine(
        decoder,
        tokenizer,
        end_tokens=end_tokens(decoder.model),
        numerics=config.numerics,
    )
    with console.progress_bar() as progress:
        result = select.sweep(model, engine, requests, config, progress)
    if config.json:
        console.print_json(result.to_dict())
    else:
        _print(result, config)
    for line in gate_notices(model, checkpoint_dir(model), result.artifact.regress):
        console.notice(line)
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
    for name in ("num_prompts", "max_draft_tokens", "context_length", "repeats", "confirm"):
        least = {"confirm": 0, "context_length": 16}.get(name, 1)
        if getattr(config, name) < least:
            raise UserError(f"{configs.flag(name)} is too small", got=getattr(config, name), allowed=f"{least} or more")
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


def shown_exits(num_layers: int, limit: int, always: set[int]) -> list[int]:
    """Return all exits 1..L − 1 if they are at most `limit`, else about as many spread ones and those in `always`."""
    exits = range(1, num_layers)
    if len(exits) <= limit:
        return list(exits)
    spread = {exits[round(i * (len(exits) - 1) / (limit - 1))] for i in range(limit)} if limit > 1 else set()
    return sorted(spread | always)


def _print(result: Sweep, config: configs.SweepConfig) -> None:
    artifact, costs, better = result.artifact, result.costs, result.better_outside_window
    by_exit: dict[int, list[Cell]] = {}
    for cell in result.cells:
        by_exit.setdefault(cell.exit_layer, []).append(cell)
    always = {artifact.exit_layer} if artifact.exit_layer else set()
    always |= {better.exit_layer} if better else set()
    rows = shown_exits(artifact.num_layers, MAP_ROWS, always)
    for title, score in (
        ("textbook score E(k)/(c·k + 1)", lambda cell: cell.speedup_model),
        ("predicted speed-up τ/(c·k + v + o)", lambda cell: cell.speedup_predicted),
    ):
        console.heat_map(
            title,
            [f"E={e} ({e / artifact.num_layers:.0%})" for e in rows],
            [f"k={cell.num_draft_tokens}" for cell in by_exit[1]],
            [[score(cell) for cell in by_exit[e]] for e in rows],
            neutral=1.0,
        )
    lines = [
        _line(max(by_exit[e], key=lambda cell: cell.speedup_predicted), costs.overhead_ratio)
        for e in shown_exits(artifact.num_layers, TABLE_ROWS - len(always), always)
    ]
    console.table(
        f"each exit at its best k: {result.profile.num_prompts} prompts, {result.profile.num_tokens} tokens, "
        f"temperature {config.temperature:g}",
        ["exit", "k", "α", "α needed", "c", "v", "τ", "textbook", "predicted"],
        lines,
        caption="α needed: to break even at this c and v. predicted: τ/(c·k + v + o). " + _caption(result, config),
    )
    _print_candidates(result)
    print(f"speculation {'on' if artifact.enabled else 'off'}: {artifact.reason}")
    if better is not None:
        print(
            f"better outside the window {config.window[0]:g},{config.window[1]:g}: exit {better.exit_layer}, "
            f"k = {better.num_draft_tokens}, predicted ×{better.speedup_predicted:.2f}; try --window 0,1"
        )
    if result.path:
        print(f"written: {result.path}")
    else:
        console.print_json(result.to_dict()["artifact"])


def _print_candidates(result: Sweep) -> None:
    measured = {confirmed.label: confirmed for confirmed in result.confirmed}
    lines = []
    for candidate in result.candidates:
        tried = measured.get(candidate.label)
        numbers = (candidate.cost_ratio, candidate.verify_ratio, candidate.tokens_per_step, candidate.cost_per_step)
        lines.append(
            [
                candidate.label,
                str(candidate.num_draft_tokens),
                "–" if candidate.alpha is None else f"{candidate.alpha:.3f}",
                *(f"{number:.2f}" for number in (*numbers, candidate.speedup_predicted)),
                f"×{tried.speedup:.2f} ±{tried.spread / 2:.0%}" if tried else "",
            ]
        )
    console.table(
        "drafters",
        ["", "k", "α", "c", "v", "tokens", "cost", "predicted", "measured"],
        lines,
        caption="k: mean. tokens, cost: of a step, plain ones among them, in tokens and plain steps. measured: against "
        "plain decoding in turn, on other prompts, with --k-policy cost; ± half the quartiles' span. N: tokens that a "
        "draft may propose",
    )
    for confirmed in result.confirmed:
        if confirmed.identical is False:
            print(f"OTHER TOKENS than plain decoding with {confirmed.label}")
    for label, reason in result.skipped.items():
        print(f"not tried: {label}: {reason}")


def _line(cell: Cell, overhead_ratio: float) -> list[str]:
    from selfspec_tune.sweep.objective import alpha_needed

    needed = alpha_needed(1.0, cell.cost_ratio, cell.verify_ratio + overhead_ratio, cell.num_draft_tokens)
    numbers = (cell.cost_ratio, cell.verify_ratio, cell.tokens_per_round, cell.speedup_model, cell.speedup_predicted)
    return [
        str(cell.exit_layer),
        str(cell.num_draft_tokens),
        f"{cell.alpha:.3f}",
        f"{needed:.3f}" if needed is not None else "never",
        *(f"{number:.2f}" for number in numbers),
    ]


def _caption(result: Sweep, config: configs.SweepConfig) -> str:
    costs = result.costs
    price = "exact numerics cannot be certified here"
    if costs.exact_over_fast is not None:
        price = f"an exact plain step costs ×{costs.exact_over_fast:.2f} of a fast one"
    return (
        f"{config.numerics} numerics, {config.context_length} live tokens: plain step {1000 * costs.plain:.1f} ms "
        f"(spread {costs.spread.get('plain', 0):.0%}, composed ×{costs.composed_over_measured:.2f}), "
        f"o = {costs.overhead_ratio:.3f}, {price}; plain decoding {result.profile.plain_tokens_per_second:.1f} tokens/s"
    )
