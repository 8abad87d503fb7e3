"""The texts of a run: what is trained on, what is held out of it, and general text that must not suffer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from selfspec_tune.config import TrainConfig
from selfspec_tune.progress import Report
from selfspec_tune.train.data import Sequences, load_held_out, load_sequences
from selfspec_tune.train.stream import Stream, open_stream


@dataclass(frozen=True)
class Texts:
    """Attributes:
    training: sequences to train on.
    held_out: sequences of the same domain, never trained on.
    general: sequences of general text; None where none is given.
    anchor: sequences on which the model is held to its base; None where none are given.
    """

    training: Sequences | Stream
    held_out: Sequences
    general: Sequences | None
    anchor: Sequences | None


def load_texts(config: TrainConfig, tokenizer: Any, vocab_size: int, report: Report, *, rank: int, ranks: int) -> Texts:
    """Read and tokenize what `config` names.

    Args:
        config: of the run.
        tokenizer: of the base.
        vocab_size: tokens that the model knows.
        report: told of what the data do not have, and of records left out.
        rank: of this process.
        ranks: processes that train.

    Raises:
        UserError: a missing source, a bad record, too little text, or a token that the model does not know.
    """
    reading = {"text_field": config.text_field, "messages_field": config.messages_field}
    options: dict[str, Any] = {
        "length": config.sequence_length,
        "packing": not config.no_packing,
        "skip_bad": config.skip_bad_records,
        **reading,
    }
    of_training = {**options, "assistant_only": config.assistant_only, "num_eval": config.eval_sequences}
    sources = (config.train_data, config.eval_data, tokenizer)
    training: Sequences | Stream
    if config.streaming:
        training, held_out = open_stream(*sources, **of_training, seed=config.seed, rank=rank, ranks=ranks)
    else:
        count = config.max_steps * config.batch_size * config.gradient_accumulation * ranks
        training, held_out = load_sequences(*sources, **of_training, seed=config.seed, num_train=count)
        if config.assistant_only and not any(record.templated for record in training.records):
            report({"notice": "warning: --assistant-only has no effect: no training record has chat messages"})
    general = None
    if config.general_data:
        general = load_held_out(config.general_data, tokenizer, num=config.eval_sequences, **options)
    anchor = None
    if config.anchor_data:
        count = config.max_steps * config.anchor_batch_size * ranks
        anchor = load_held_out(config.anchor_data, tokenizer, num=count, **options)
    for part in (training, held_out, general, anchor):
        if part is not None:
            part.check_vocabulary(vocab_size)
            for line in part.skipped:
                report({"notice": line})
    return Texts(training, held_out, general, anchor)
