"""`selfspec draft-vocab`: texts and prompts in, `draft_vocab.json` and a table of what N tokens cover out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from selfspec_tune import config as configs
from selfspec_tune.cli import console
from selfspec_tune.cli.options import options_from
from selfspec_tune.cli.verdict import warn_of_gate
from selfspec_tune.errors import UserError

if TYPE_CHECKING:
    from selfspec_tune.model.draft_vocab import DraftVocab, TokenCounts
    from selfspec_tune.model.load import Outline
    from selfspec_tune.progress import Progress


@options_from(configs.DraftVocabConfig)
def draft_vocab(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Checkpoint directory.", show_default=False)],
    *,
    flags: dict[str, Any],
) -> None:
    """Rank the tokens that drafts may propose, so that they need not read the whole LM head.

    Counts the tokens of texts like those to be written (--text) and of the model's own greedy answers (--prompts), and
    writes draft_vocab.json beside the checkpoint for `selfspec decode --draft-vocab N`. The table says which share of
    held-out text the N most frequent tokens cover; the rest is never drafted, and costs a draft each time. The output
    stays the model's own whatever N is. Special tokens are always among the N.

    \b
    Examples:
      selfspec draft-vocab ./my-model --text my-text.jsonl --text notes.txt
      selfspec draft-vocab ./my-model --prompts my-prompts.jsonl --num-prompts 200 --max-new-tokens 256
      selfspec draft-vocab ./my-model --text chats.jsonl --prompts my-prompts.jsonl --size 16384 --json
    """
    config = configs.build(configs.DraftVocabConfig, flags)
    check_options(config)

    from selfspec_tune.model.draft_vocab import write_draft_vocab
    from selfspec_tune.model.load import checkpoint_dir, load_outline, load_tokenizer

    directory = checkpoint_dir(model)
    if directory is None:
        raise UserError(
            "a draft vocabulary is written beside a checkpoint",
            got=model,
            allowed="a checkpoint directory",
            command="download the model, and give its directory",
        )
    warn_of_gate(model)
    outline, tokenizer = load_outline(model, dtype=config.dtype), load_tokenizer(model)
    with console.progress_bar() as progress:
        counts = _count(model, config, outline, tokenizer, progress)
    vocab = counts.draft_vocab(directory, [*tokenizer.all_special_ids, *outline.end_tokens], config.size)
    result = _result(write_draft_vocab(directory, vocab), vocab, outline)
    if config.json:
        console.print_json(result)
    else:
        _print(model, result)


def check_options(config: configs.DraftVocabConfig) -> None:
    """Raise a UserError for a missing option or a value that cannot work, before anything heavy is loaded."""
    if not config.text and config.prompts is None:
        raise UserError(
            "draft-vocab needs something to count",
            allowed="--text FILE (.txt or .jsonl), --prompts PROMPTS.jsonl, or both",
            command="selfspec draft-vocab MODEL --text FILE.jsonl",
        )
    for path in config.text:
        if path.suffix not in (".txt", ".jsonl"):
            raise UserError("this text cannot be read", got=path, allowed=".txt or .jsonl files")
    for path in (*config.text, *([config.prompts] if config.prompts else [])):
        if not path.is_file():
            raise UserError(f"{path} does not exist or is not a file", command=f"ls {path.parent}")
    for name in ("num_prompts", "max_new_tokens", "size"):
        if getattr(config, name) < 1:
            raise UserError(f"{configs.flag(name)} is too small", got=getattr(config, name), allowed="1 or more")
    if config.size > configs.MAX_DRAFT_VOCAB:
        raise UserError("--size is too large", got=config.size, allowed=f"1..{configs.MAX_DRAFT_VOCAB}")


def _count(
    model: str, config: configs.DraftVocabConfig, outline: Outline, tokenizer: Any, progress: Progress
) -> TokenCounts:
    from selfspec_tune.decode.engine import Engine
    from selfspec_tune.decode.own_text import own_tokens, text_tokens
    from selfspec_tune.decode.prompts import read_requests
    from selfspec_tune.decode.requests import Request
    from selfspec_tune.model.decoder import load_decoder
    from selfspec_tune.model.draft_vocab import TokenCounts
    from selfspec_tune.train.records import Parser, read_records

    parser = Parser(tokenizer, config.text_field, config.messages_field)

    def texts(path: Path) -> list[str]:
        return [record.text for record in read_records(str(path), parser)]

    counts = TokenCounts(outline.vocab_size)
    documents = {str(path): texts(path) for path in config.text}
    requests: list[Request] = []
    if config.prompts is not None:
        _, requests = read_requests(
            config.prompts, tokenizer, config, max_new_tokens=config.max_new_tokens, limit=config.num_prompts
        )
    for name, found in documents.items():
        counts.add(name, text_tokens(tokenizer, found, progress))
    if requests:
        decoder = load_decoder(model, dtype=config.dtype, device=config.device)
        engine = Engine(decoder, end_tokens=outline.end_tokens, numerics="fast")
        counts.add(f"answers to {config.prompts}", own_tokens(engine, requests, progress))
    return counts


def _result(path: Path, vocab: DraftVocab, outline: Outline) -> dict[str, Any]:
    return {
        "path": str(path),
        "source": vocab.source,
        "num_tokens": vocab.num_tokens,
        "vocab_size": vocab.vocab_size,
        "num_special": len(vocab.special),
        "num_ranked": len(vocab.ranked),
        "coverage": vocab.coverage,
        "dtype": str(outline.dtype).removeprefix("torch."),
        "head_bytes": {str(size): outline.head_bytes(int(size)) for size in (*vocab.coverage, str(vocab.vocab_size))},
    }


def _print(model: str, result: dict[str, Any]) -> None:
    whole, head_bytes = str(result["vocab_size"]), result["head_bytes"]

    def row(name: str, share: str, size: str) -> list[str]:
        return [name, share, f"{head_bytes[size] / 2**20:.2f} MiB", f"{head_bytes[size] / head_bytes[whole]:.0%}"]

    rows = [row(size, f"{share:.2%}", size) for size, share in result["coverage"].items()]
    rows.append(row("all tokens", "", whole))
    print(f"{result['path']}: {result['num_ranked']:,} tokens ranked, of {result['num_tokens']:,} counted")
    console.table(
        "what the first N cover",
        ["N", "of held-out text covered", f"head read by a draft, {result['dtype']}", "of the whole head"],
        rows,
    )
    print(f"next, to compare sizes: selfspec sweep-exit {model} --prompts PROMPTS.jsonl")
