"""The text of one output as its tokens come: no broken characters, ended before the first stop string."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

# What a tokenizer says for bytes that are no character, or not yet one.
BROKEN = "\ufffd"


class Text:
    """Decodes a few tokens at a time: those since the last whole character, after the few before them that settle spaces."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str] = ()) -> None:
        self.tokenizer, self.stop = tokenizer, tuple(stop)
        self.stopped = False
        self._whole = self._begun = ""
        self._ids: list[int] = []
        self._prefix_offset, self._read_offset = 0, 0

    @property
    def text(self) -> str:
        """All that can be read so far."""
        return self._whole + self._begun

    @property
    def length(self) -> int:
        """Tokens added."""
        return len(self._ids)

    def add(self, *tokens: int, may_stop: bool = True) -> str | None:
        """Go on by `tokens` (one at a time where there are stop strings); return the stop string that they complete.

        The text is then cut before it.
        """
        start = len(self.text)
        self._ids += tokens
        piece = self._unread()
        if piece.endswith(BROKEN):
            self._begun = piece.rstrip(BROKEN)
        elif piece:
            self._whole, self._begun = self._whole + piece, ""
            self._prefix_offset, self._read_offset = self._read_offset, len(self._ids)
        return self._cut(start) if may_stop else None

    def _unread(self) -> str:
        before = self._decode(self._ids[self._prefix_offset : self._read_offset])
        return self._decode(self._ids[self._prefix_offset :])[len(before) :]

    def _cut(self, start: int) -> str | None:
        """Cut the text before the first stop string that ends past `start`; the longest where several begin there."""
        text = self.text
        found = {stop: text.find(stop, max(0, start - len(stop) + 1)) for stop in self.stop}
        first = min((stop for stop in self.stop if found[stop] >= 0), key=lambda stop: (found[stop], -len(stop)), default=None)
        if first is not None:
            self._whole, self._begun, self.stopped = text[: found[first]], "", True
        return first

    def shown(self) -> str:
        """Return the text that no later token can take back: without what may be the beginning of a stop string."""
        text = self.text
        if self.stopped:
            return text
        held = max((size for stop in self.stop for size in range(1, len(stop)) if text.endswith(stop[:size])), default=0)
        return text[: len(text) - held]

    def finish(self) -> str:
        """Return the whole text, with what is left of an unfinished character."""
        if not self.stopped and self._read_offset < len(self._ids):
            self._whole, self._begun = self._whole + self._unread(), ""
            self._prefix_offset = self._read_offset = len(self._ids)
        return self.text

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))
