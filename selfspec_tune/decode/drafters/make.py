"""From settings to a drafter: the one place that knows every drafter by name."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from selfspec_tune import config
from selfspec_tune.artifact import Artifact
from selfspec_tune.decode.drafters import Drafter
from selfspec_tune.decode.drafters.draft_head import read_vocab
from selfspec_tune.decode.drafters.exit_head import ExitHeadDrafter
from selfspec_tune.decode.drafters.hybrid import HybridDrafter
from selfspec_tune.decode.drafters.layer_skip import LayerSkipDrafter
from selfspec_tune.decode.drafters.low_precision import LowPrecisionDrafter
from selfspec_tune.decode.drafters.prompt_lookup import PromptLookupDrafter
from selfspec_tune.errors import UserError
from selfspec_tune.model.decoder import LayeredDecoder
from selfspec_tune.model.load import checkpoint_dir


@dataclass(frozen=True)
class DraftSettings:
    """Everything that makes a drafter of a model; names as the options of `decode` and the fields of `selfspec.json`.

    Attributes:
        exit_layer: E; None where the drafter needs none (low-precision: all layers).
        draft_bits, draft_head_bits: low-precision: bits of the layers' and of the head's weights.
        draft_group: low-precision: weights that share a scale and a minimum in 4 bits.
        hybrid_with: hybrid: the drafter beside `copy`.
        draft_vocab: draft only so many of the most frequent tokens; None for all.
    """

    drafter: config.Drafter
    exit_layer: int | None = None
    draft_bits: int = 4
    draft_head_bits: int = 8
    draft_group: int = 32
    hybrid_with: config.HybridWith = "low-precision"
    draft_vocab: int | None = None

    @classmethod
    def of(cls, artifact: Artifact) -> DraftSettings:
        """Return what `selfspec.json` says."""
        return cls(artifact.drafter, artifact.exit_layer, **artifact.draft)  # type: ignore[arg-type]

    def to_artifact(self) -> dict[str, Any]:
        """Return the fields of `selfspec.json` that `of` reads."""
        values = asdict(self)
        return {"drafter": values.pop("drafter"), "exit_layer": values.pop("exit_layer"), "draft": values}

    @property
    def parts(self) -> list[DraftSettings]:
        """Settings of the drafters whose costs are measured: a hybrid's two, else these."""
        if self.drafter != "hybrid":
            return [self]
        return [DraftSettings("copy"), replace(self, drafter=self.hybrid_with, hybrid_with=DraftSettings.hybrid_with)]

    @property
    def label(self) -> str:
        """What a reader calls it, such as "low-precision 4-bit"; different settings have different labels."""
        if self.drafter == "hybrid":
            return f"hybrid (copy, {self.parts[1].label})"
        if self.drafter == "copy":
            return "copy"
        words = [self.drafter, f"E={self.exit_layer}" if self.exit_layer is not None else ""]
        if self.drafter == "low-precision":
            words.append(f"{self.draft_bits}-bit")
            words.append(f"group {self.draft_group}" if self.draft_bits == 4 and self.draft_group != 32 else "")
            words.append(f"head {self.draft_head_bits}-bit" if self.draft_head_bits != 8 else "")
        words.append(f"N={self.draft_vocab}" if self.draft_vocab is not None else "")
        return " ".join(word for word in words if word)


def make_drafter(settings: DraftSettings, decoder: LayeredDecoder, model: str) -> Drafter:
    """Make a drafter.

    Args:
        model: the directory or hub name the decoder's model came from; an exit head stands beside it.

    Raises:
        UserError: it does not fit the model, the device or the memory.
    """
    if settings.drafter == "copy":
        return PromptLookupDrafter()
    if settings.drafter == "hybrid":
        copy, other = settings.parts
        return HybridDrafter(make_drafter(copy, decoder, model), make_drafter(other, decoder, model))
    vocab, exit_layer = read_vocab(model, settings.draft_vocab), settings.exit_layer
    if settings.drafter == "layer-skip":
        return LayerSkipDrafter(decoder, int(exit_layer or 0), vocab)
    if settings.drafter == "low-precision":
        bits, head_bits, group = settings.draft_bits, settings.draft_head_bits, settings.draft_group
        return LowPrecisionDrafter(decoder, bits, head_bits, exit_layer, vocab, group=group)
    directory = checkpoint_dir(model)
    if directory is None:
        raise UserError("an exit head stands beside a checkpoint", got=model, allowed="a checkpoint directory")
    return ExitHeadDrafter.beside(directory, decoder, vocab)
