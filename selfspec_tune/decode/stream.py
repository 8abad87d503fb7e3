"""From token ids to text as it grows: whole UTF-8 characters only, and stop strings found across token boundaries."""

from __future__ import annotations

from typing import Any

from selfspec_tune.errors import UserError

CONTEXT_TOKENS = 8
"""Tokens of the prompt the decoder sees, to know whether a space begins the completion."""
REPLACEMENT = "\ufffd"


class TextStream:
    """The text of one completion, token by token.

    Args:
        tokenizer: a transformers tokenizer backed by the `tokenizers` library.
        prompt_ids: the prompt; its last tokens decide whether the completion starts with a space.
        stop: stop strings, not part of the text.
    """

    def __init__(self, tokenizer: Any, prompt_ids: list[int], stop: tuple[str, ...] = ()) -> None:
        from tokenizers.decoders import DecodeStream

        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise UserError(
                "this tokenizer has no `tokenizers` backend",
                got=type(tokenizer).__name__,
                allowed="a checkpoint with a tokenizer.json",
            )
        self._backend, self._tokenizer = backend, tokenizer
        tail = list(prompt_ids[-CONTEXT_TOKENS:])
        if tokenizer.decode(tail, skip_special_tokens=True).endswith(REPLACEMENT):
            tail = []  # an incomplete character at the prompt's end would be taken for the completion's beginning
        self._decoder = DecodeStream(ids=tail, skip_special_tokens=True)
        self._stop = tuple(text for text in stop if text)
        self._pending: list[int] = []
        self.text = ""
        self.stopped = False
        self._shown = 0

    def push(self, token: int) -> None:
        """Add a token; afterwards `stopped` says whether the text reached a stop string."""
        piece = self._decoder.step(self._backend, token)
        self._pending.append(token)
        if piece is None:
            return
        self._pending.clear()
        self._append(piece)

    def new_text(self) -> str:
        """Return text not returned before; what may be the beginning of a stop string is held back."""
        end = len(self.text) - (0 if self.stopped else self._held_back())
        fresh = self.text[self._shown : end]
        self._shown = max(self._shown, end)
        return fresh

    def finish(self) -> str:
        """End the text: add what an incomplete character left, return the text not returned before."""
        if self._pending and not self.stopped:
            self._append(self._tokenizer.decode(self._pending, skip_special_tokens=True))
            self._pending.clear()
        fresh = self.text[self._shown :]
        self._shown = len(self.text)
        return fresh

    def _append(self, piece: str) -> None:
        searched = max(0, len(self.text) - max((len(text) for text in self._stop), default=0))
        self.text += piece
        found = [at for at in (self.text.find(text, searched) for text in self._stop) if at >= 0]
        if found:
            self.text = self.text[: min(found)]
            self.stopped = True

    def _held_back(self) -> int:
        longest = 0
        for text in self._stop:
            for size in range(min(len(text) - 1, len(self.text)), longest, -1):
                if self.text.endswith(text[:size]):
                    longest = size
                    break
        return longest
