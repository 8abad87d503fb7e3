"""The texts of a run: what is trained on, what is held out of it, and general text that must not suffer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from selfspec_tune.config import TrainConfig
from selfspec_tune.progress import Report
from selfspec_tune.train.data import Sequences, Training, load_general, load_sequences
from selfspec_tune.train.stream import open_stream


@dataclass(frozen=True)
class Texts:
    """Attributes:
    training: sequences to train on, or a stream of them.
    held_out: sequences of the same domain, never trained on.
    general: sequences of general text; None where none is given.
    anchor: sequences on which the model is held to its base; None where none are given.
    """

    training: Training
    held_out: Sequences
    general: Sequences | None
    anchor: Sequences | None


def load_texts(config: TrainConfig, tokenizer: Any, rank: int, ranks: int, report: Report) -> Texts:
    """Read and tokenize what `config` names; with --streaming, as far as it is not trained on.

    Args:
        config: of the run.
        tokenizer: of the base.
        rank: of this process.
        ranks: processes that train.
        report: told of what the data do not have, and of bad records that were skipped.
    """
    reading: dict[str, Any] = {
        "length": config.sequence_length,
        "text_field": config.text_field,
        "messages_field": config.messages_field,
        "assistant_only": config.assistant_only,
        "skip_bad": config.skip_bad_records,
    }
    both = {"num_eval": config.eval_sequences, "packing": not config.no_packing, "seed": config.seed, **reading}
    training: Training
    if config.streaming:
        training, held_out = open_stream(config.train_data, config.eval_data, tokenizer, rank=rank, ranks=ranks, **both)
    else:
        num_train = config.max_steps * config.batch_size * config.gradient_accumulation * ranks
        training, held_out = load_sequences(config.train_data, config.eval_data, tokenizer, num_train=num_train, **both)
    general = None
    if config.general_data:
        general = load_general(config.general_data, tokenizer, num=config.eval_sequences, **reading)
    anchor = None
    if config.anchor_data:
        count = config.max_steps * config.anchor_batch_size * ranks
        measured = {record.digest() for data in (held_out, general) if data for record in data.records}
        of_anchor = {**reading, "assistant_only": False, "what": "anchor", "measured": measured}
        anchor = load_general(config.anchor_data, tokenizer, num=count, **of_anchor)
    known = [held_out, *([training] if isinstance(training, Sequences) else [])]
    if config.assistant_only and not any(record.templated for data in known for record in data.records):
        report({"notice": "--assistant-only has no effect: no record has chat messages"})
    for part in (training, general, anchor):
        for line in part.skipped if part else ():
            report({"notice": line})
    return Texts(training, held_out, general, anchor)
