"""The texts of a run: what is trained on, what is held out of it, and general text that must not suffer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from selfspec_tune.config import TrainConfig
from selfspec_tune.errors import UserError
from selfspec_tune.progress import Report
from selfspec_tune.train.data import Sequences, load_held_out, load_sequences


@dataclass(frozen=True)
class Texts:
    """Attributes:
    training: sequences to train on.
    held_out: sequences of the same domain, never trained on.
    general: sequences of general text; None where none is given.
    """

    training: Sequences
    held_out: Sequences
    general: Sequences | None

    def check_vocabulary(self, vocab_size: int, base: str) -> None:
        """Raise a UserError if a token of the training data is unknown to the model."""
        if int(self.training.ids.max()) >= vocab_size:
            raise UserError("the tokenizer has tokens that the model does not know", got=base)


def load_texts(config: TrainConfig, tokenizer: Any, ranks: int, report: Report) -> Texts:
    """Read and tokenize what `config` names.

    Args:
        config: of the run.
        tokenizer: of the base.
        ranks: processes that train.
        report: told of what the data do not have.
    """
    training, held_out = load_sequences(
        config.train_data,
        config.eval_data,
        tokenizer,
        length=config.sequence_length,
        num_train=config.max_steps * config.batch_size * config.gradient_accumulation * ranks,
        num_eval=config.eval_sequences,
        text_field=config.text_field,
        messages_field=config.messages_field,
        seed=config.seed,
    )
    general = None
    if config.general_data:
        general = load_held_out(
            config.general_data,
            tokenizer,
            length=config.sequence_length,
            num=config.eval_sequences,
            text_field=config.text_field,
            messages_field=config.messages_field,
        )
    if config.assistant_only and not any(record.templated for record in training.records):
        report({"notice": "--assistant-only has no effect: no training record has chat messages"})
    return Texts(training, held_out, general)
