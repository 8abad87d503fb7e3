"""Copying where the text repeats itself, another drafter where it does not. Which one, the policy decides per round."""

from __future__ import annotations

from torch import Tensor

from selfspec_tune.decode.drafters import ChooseToken, Draft, Drafter, Enough, Source, never
from selfspec_tune.model.cache import SharedKVCache


class HybridDrafter(Drafter):
    """Offer the sources of two drafters, those of `copy` first.

    Rounds of both may alternate freely: a copied draft is verified from layer 0, which writes the early keys and values
    that the other drafter reads.

    Args:
        copy: proposes by looking text up; it must be free, as it is asked first.
        other: proposes by running layers; its `exit_layer` is the hybrid's.

    Raises:
        ValueError: both have the same name, so their sources could not be told apart.
    """

    name = "hybrid"

    def __init__(self, copy: Drafter, other: Drafter) -> None:
        if copy.name == other.name:
            raise ValueError(f"two drafters named {copy.name!r}")
        self.copy, self.other = copy, other
        self.exit_layer: int | None = other.exit_layer

    def start(self, texts: list[list[int]]) -> None:
        """Begin new requests in both drafters."""
        self.copy.start(texts)
        self.other.start(texts)

    def extend(self, row: int, tokens: list[int]) -> None:
        """Give a row's emitted tokens to both drafters, whichever drafted them."""
        self.copy.extend(row, tokens)
        self.other.extend(row, tokens)

    def use_exit(self, exit_layer: int) -> None:
        """Tell the other drafter."""
        self.other.use_exit(exit_layer)
        self.exit_layer = self.other.exit_layer

    def parts(self) -> list[Drafter]:
        """Return both drafters."""
        return [self.copy, self.other]

    def part(self, source: Source) -> Drafter:
        """Return the drafter that offered a source."""
        return self.copy if source.drafter == self.copy.name else self.other

    def sources(self) -> list[Source]:
        """Return the sources of `copy`, then those of `other`."""
        return [*self.copy.sources(), *self.other.sources()]

    def propose(
        self, last: Tensor, cache: SharedKVCache, k: int, choose: ChooseToken, source: Source, enough: Enough = never
    ) -> Draft:
        """Return the draft of the drafter that offered `source`."""
        return self.part(source).propose(last, cache, k, choose, source, enough)
