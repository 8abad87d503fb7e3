"""Drafting by copying: what followed the last time the text said what it says now. Knows no model and runs no layer.

The idea is prompt lookup decoding (Apoorv Saxena, 2023; and arXiv 2304.04487, where the copied text is a reference):
summaries, edits and code repeat what they were given. The longest suffix of prompt + output that occurred before is
looked up, and the tokens after its most recent earlier occurrence are the draft.
"""

from __future__ import annotations

import torch
from torch import Tensor

from selfspec_tune.config import MAX_DRAFT_TOKENS
from selfspec_tune.decode.drafters import ChooseToken, Draft, Drafter, Enough, Source, never
from selfspec_tune.model.cache import SharedKVCache

LONGEST_MATCH = 16
"""Tokens of a match that are told apart; a longer one counts as this long."""

QUALITIES = ((8, "long", MAX_DRAFT_TOKENS), (4, "medium", 4), (2, "short", 2))
"""(least match length, quality, most tokens to propose), best first: a match of n tokens is trusted for about n more.
A match of one token is none: almost every token has occurred before, and what followed it says little."""


class CopyIndex:
    """Finds the longest suffix of a growing text that occurred before, up to `LONGEST_MATCH` tokens.

    A trie of the text's n-grams read backwards: a node at depth n stands for n tokens and knows where they ended last.
    A node passed once is a leaf and has no children yet; when it is passed again, its first passage moves one level
    down. Appending a token walks one path of at most `LONGEST_MATCH` nodes, and the match is found on the way, so both
    take a bounded number of steps however long the text is, and nodes are made only for what repeats (about two per
    token of source code, 9 MB for 32,768 tokens).
    """

    def __init__(self) -> None:
        self.text: list[int] = []
        self._match = (0, -1)
        # Node 0 is the root. Children by (node, token); a key packs both into one integer.
        self._children: dict[int, int] = {}
        self._last_end = [-1]
        self._is_leaf = [False]

    def append(self, token: int) -> None:
        """Add one token to the text."""
        text = self.text
        text.append(token)
        end, node = len(text) - 1, 0
        self._match = (0, -1)
        for length in range(1, min(LONGEST_MATCH, len(text)) + 1):
            child = self._children.get(_key(node, text[end - length + 1]))
            if child is None:
                self._add_leaf(node, text[end - length + 1], end)
                return
            earlier = self._last_end[child]
            self._match = (length, earlier)
            if self._is_leaf[child] and length < LONGEST_MATCH:
                self._is_leaf[child] = False
                if earlier >= length:
                    self._add_leaf(child, text[earlier - length], earlier)
            self._last_end[child] = end
            node = child

    def match(self) -> tuple[int, int]:
        """Return (length, position) of the longest match of the text's end.

        `text[position - length + 1 : position + 1]` equals the text's last `length` tokens, `position` is the greatest
        such before the last one, and no longer match exists (up to `LONGEST_MATCH`). (0, -1) without any.
        """
        return self._match

    def continuation(self, count: int) -> list[int]:
        """Return the `count` tokens after the match; where they reach the text's end, they go on with themselves.

        Raises:
            ValueError: there is no match.
        """
        length, position = self._match
        if length == 0:
            raise ValueError("nothing to copy: the end of the text did not occur before")
        period = len(self.text) - 1 - position
        return [self.text[position + 1 + offset % period] for offset in range(count)]

    def _add_leaf(self, parent: int, token: int, end: int) -> None:
        self._children[_key(parent, token)] = len(self._last_end)
        self._last_end.append(end)
        self._is_leaf.append(True)


class PromptLookupDrafter(Drafter):
    """Draft the tokens that followed the same words before, in the prompt or in the output.

    In a batch every row drafts alike. A row that has nothing to copy while another has repeats its newest token: any
    token will do, since each is tested like every other draft and a wrong one only costs its place in the pass.
    """

    name = "copy"
    copies = True

    def __init__(self) -> None:
        self._rows: list[CopyIndex] = []
        self._turns: list[int] = []

    def start(self, texts: list[list[int]]) -> None:
        """Index the prompts, token ids of each row."""
        self._rows = [CopyIndex() for _ in texts]
        self._turns = [0] * len(texts)
        for index, text in zip(self._rows, texts, strict=True):
            for token in text:
                index.append(token)

    def extend(self, row: int, tokens: list[int]) -> None:
        """Index the tokens a row emitted. They may run past the row's end; then nothing is drafted for it any more."""
        self._turns[row] += 1
        for token in tokens:
            self._rows[row].append(token)

    def sources(self) -> list[Source]:
        """Return one source, of the quality of the longest match in an unfinished row; none without a match.

        An unfinished row emits in every round, so one that emitted less often than another is finished. A row that
        finished in the latest round is still counted, once.
        """
        latest = max(self._turns, default=0)
        unfinished = (index for index, turns in zip(self._rows, self._turns, strict=True) if turns == latest)
        longest = max((index.match()[0] for index in unfinished), default=0)
        return [Source(self.name, quality, most) for least, quality, most in QUALITIES if longest >= least][:1]

    def propose(
        self, last: Tensor, cache: SharedKVCache, k: int, choose: ChooseToken, source: Source, enough: Enough = never
    ) -> Draft:
        """Return k tokens for every row. They are given, not drawn (q is one at each), and have no hidden states."""
        rows = [_copy(index, k) for index in self._rows]
        # Idle rows of the batch have no text; nothing of theirs is kept.
        rows += [[0] * k] * (last.shape[0] - len(rows))
        return Draft(torch.tensor(rows, device=last.device), None, None, 0)


def _copy(index: CopyIndex, k: int) -> list[int]:
    """Return the k tokens after a row's match, or its newest token k times."""
    return index.continuation(k) if index.match()[0] else index.text[-1:] * k


def _key(node: int, token: int) -> int:
    return node << 32 | token
