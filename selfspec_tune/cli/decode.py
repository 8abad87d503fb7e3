"""`selfspec decode`: complete prompts, speculatively where `selfspec.json` or flags say so."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from selfspec_tune import artifact as artifacts
from selfspec_tune import config
from selfspec_tune.cli import console
from selfspec_tune.cli.options import options_from
from selfspec_tune.cli.verdict import gate_notices
from selfspec_tune.errors import UserError
from selfspec_tune.files import read_text

if TYPE_CHECKING:
    from selfspec_tune.decode.plan import Plan
    from selfspec_tune.decode.stats import Stats


@options_from(config.DecodeConfig)
def decode(
    model: Annotated[str, typer.Argument(help="Checkpoint or adapter directory, or hub name.", show_default=False)],
    flags: dict[str, Any],
) -> None:
    """Complete prompts. The text is the model's own; speculation changes only the time.

    Examples:

        selfspec decode ./my-model --prompt "Why is the sky blue?"

        cat question.txt | selfspec decode ./my-model --max-new-tokens 100 --temperature 0.7 --top-p 0.9

        selfspec decode ./my-model --input prompts.jsonl --output answers.jsonl

        selfspec decode ./my-model --prompt "def fib(n):" --raw --exit-layer 8 --num-draft-tokens 3 --json

        selfspec decode ./my-model --prompt-file report.txt --drafter hybrid
    """
    options = config.build(config.DecodeConfig, flags)
    _check_sources(options)
    prompt = None if options.input else _read_prompt(options)

    from selfspec_tune.decode.plan import make_plan
    from selfspec_tune.decode.sampling import SamplingParams
    from selfspec_tune.model.load import checkpoint_dir, load_tokenizer

    params = SamplingParams(
        options.temperature, options.top_k, options.top_p, options.seed, reproducible=options.reproducible
    )
    if params.greedy and (options.top_k or options.top_p != 1):
        console.notice("--top-k and --top-p have no effect in greedy decoding; to sample, add --temperature")
    directory = checkpoint_dir(model)
    artifact = artifacts.read(directory) if directory else None
    for line in gate_notices(model, directory, artifact.regress if artifact else None):
        console.notice(line)
    tokenizer = load_tokenizer(model)
    with console.progress_bar() as progress:
        plan = make_plan(model, tokenizer, artifact, options, progress)
    for line in plan.notices:
        console.notice(line)
    if prompt is not None:
        _decode_one(plan, params, options, prompt)
    else:
        _decode_file(plan, params, options)


def _check_sources(options: config.DecodeConfig) -> None:
    given = [name for name in ("prompt", "prompt_file", "input") if getattr(options, name) is not None]
    if len(given) > 1:
        raise UserError("more than one source of prompts", got=", ".join(given), allowed="one of them")
    if (options.input is None) != (options.output is None):
        raise UserError("--input and --output go together", command="--input prompts.jsonl --output answers.jsonl")
    if options.input is not None and options.output is not None and options.input.resolve() == options.output.resolve():
        raise UserError("--output would overwrite --input", got=options.output, command="another --output file")
    if options.input is not None and not options.input.is_file():
        raise UserError(f"{options.input} does not exist or is not a file", command=f"ls {options.input.parent}")
    if options.batch_size < 1:
        raise UserError("batch_size must be at least 1", got=options.batch_size)
    if options.max_new_tokens < 0:
        raise UserError("max_new_tokens must not be negative", got=options.max_new_tokens, allowed="0 or more")


def _read_prompt(options: config.DecodeConfig) -> str:
    if options.prompt is not None:
        prompt = options.prompt
    elif options.prompt_file is not None:
        prompt = read_text(options.prompt_file)
    elif sys.stdin.isatty():
        raise UserError("no prompt", command='--prompt "...", --prompt-file FILE, --input FILE, or a prompt on stdin')
    else:
        try:
            prompt = sys.stdin.read()
        except UnicodeDecodeError as error:
            raise UserError(f"standard input is not UTF-8 text: {error}") from None
    if not prompt:
        raise UserError("the prompt is empty", allowed="at least one token", command='--prompt "..."')
    return prompt


def _decode_one(plan: Plan, params: Any, options: config.DecodeConfig, prompt: str) -> None:
    from selfspec_tune.decode.prompts import encode_text
    from selfspec_tune.decode.requests import Request

    ids = encode_text(plan.engine.tokenizer, prompt, raw=options.raw)
    request = Request("0", ids, options.max_new_tokens, options.stop)
    show = None if options.json else _write_text
    completions, stats = plan.generate([request], params, on_text=show)
    completion = completions[0]
    if options.json:
        record = {"completion": completion.text, "num_tokens": len(completion.token_ids)}
        console.print_json({**record, "finish_reason": completion.finish_reason, **stats.to_dict()})
    else:
        print()
        console.notice(_stats_line(stats))


def _write_text(_row: int, text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _decode_file(plan: Plan, params: Any, options: config.DecodeConfig) -> None:
    from selfspec_tune.decode.prompts import read_requests
    from selfspec_tune.decode.stats import Stats

    assert options.input is not None and options.output is not None
    records, requests = read_requests(
        options.input,
        plan.engine.tokenizer,
        options,
        max_new_tokens=options.max_new_tokens,
        stop=options.stop,
    )
    done = _read_answers(options.output, options.id_field)
    todo = []
    for record, request in zip(records, requests, strict=True):
        if request.id in done:
            _check_same(done[request.id], record, request.id, options.output)
        else:
            plan.engine.check(request)
            todo.append((record, request))
    if done:
        console.notice(f"{options.output} already holds {len(requests) - len(todo)} of {len(requests)} records")
    total = Stats()
    # Lone surrogates, which JSON may hold and UTF-8 may not, are written as the escapes they came from.
    with (
        console.progress_bar() as progress,
        options.output.open("a", encoding="utf-8", errors="backslashreplace") as handle,
    ):
        for start in range(0, len(todo), options.batch_size):
            batch = todo[start : start + options.batch_size]
            completions, stats = plan.generate([request for _, request in batch], params)
            lines = [
                {
                    options.id_field: record.get(options.id_field, request.id),
                    **record,
                    "completion": completion.text,
                    "num_tokens": len(completion.token_ids),
                    "finish_reason": completion.finish_reason,
                }
                for (record, request), completion in zip(batch, completions, strict=True)
            ]
            # One write per batch: an interrupted run leaves whole lines, or one torn line that the next run drops.
            handle.write("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
            handle.flush()
            total.add(stats)
            progress("decoding", start + len(batch), len(todo))
    if options.json:
        console.print_json({"written": len(todo), "skipped": len(requests) - len(todo), **total.to_dict()})
    else:
        console.notice(_stats_line(total))


WRITTEN = ("completion", "num_tokens", "finish_reason")
"""Fields added to a record; of the same name, they replace the input's."""


def _read_answers(output: Path, id_field: str) -> dict[str, dict[str, Any]]:
    """Return the records already written, by id; a last line torn by an interruption is cut off.

    Raises:
        UserError: the file holds anything that `selfspec decode` did not write; it is left as it is.
    """
    if output.is_dir():
        raise UserError("--output is a directory", got=output, allowed="a file")
    if not output.exists():
        output.parent.mkdir(parents=True, exist_ok=True)
        return {}
    data = output.read_bytes()
    end = data.rfind(b"\n") + 1
    answers = {}
    for number, line in enumerate(data[:end].split(b"\n")[:-1], start=1):
        try:
            record = json.loads(line)
            answers[str(record[id_field])] = record
            known = set(WRITTEN) <= set(record)
        except (ValueError, KeyError, TypeError):
            known = False
        if not known:
            raise UserError(f"{output}:{number} was not written by `selfspec decode`", command="another --output file")
    if end < len(data):
        if not data[end:].startswith(b"{"):
            raise UserError(f"{output} was not written by `selfspec decode`", command="another --output file")
        with output.open("r+b") as handle:
            handle.truncate(end)
    return answers


def _check_same(answer: dict[str, Any], record: dict[str, Any], request_id: str, output: Path) -> None:
    """Raise a UserError when an answer already written belongs to another input record of the same id."""
    changed = [name for name in record if name not in WRITTEN and answer.get(name) != record[name]]
    if changed:
        raise UserError(
            f"{output} answers another record {request_id!r} than the one in --input",
            got=f"other values in {', '.join(changed)}",
            command="another --output file",
        )


def _stats_line(stats: Stats) -> str:
    values = stats.to_dict()
    parts = [f"{stats.emitted} tokens", f"{values['tokens_per_second'] or 0:.1f} tokens/s"]
    parts.append(f"prefill {values['prefill_seconds']:.2f} s")
    if stats.rounds:
        parts.append(f"alpha {values['alpha'] or 0:.3f}, tokens/round {values['tokens_per_round']:.2f}")
        parts.append(f"{stats.rounds} rounds, {stats.drafted} drafted, {stats.accepted} accepted")
        layers = f", E={stats.exit_layer}" if stats.exit_layer else ""
        parts.append(f"{stats.drafter}{layers}, k={stats.num_draft_tokens}")
    else:
        parts.append("plain")
    parts.append(stats.numerics)
    return " | ".join(parts) + (f" | {stats.reason}" if stats.reason else "")
