"""Prompt lookup: a request's own text as its drafter, for the rounds that find nothing in the speculation cache."""

from __future__ import annotations

from collections.abc import Iterable

from theory import check

_ROOT = 0


class Lookup:
    """One request's text, so indexed that what followed the last few tokens when they stood there before is found at once.

    The longest suffix of the text that occurred earlier counts, of `longest` down to `shortest` tokens, and of its earlier occurrences the
    most recent one, which may overlap the suffix. The index is a trie of all n-grams up to `longest` tokens: O(longest) time and memory for
    each token added, O(count) for a proposal, whatever the length of the text.

    A proposal is a fixed guess without a q: a point mass to the verifier.

    It differs from transformers' PromptLookupCandidateGenerator and vLLM's ngram_proposer, which search the whole text for each proposal:
    of several occurrences both take the earliest, here it is the most recent; both stop at the end of the text, here a proposal reads on,
    so that a repetition is followed from its second turn. transformers also cuts off an end token with what follows it, and what a logits
    processor forbids, vLLM what exceeds the model's length: here that is left to the caller.
    """

    def __init__(self, longest: int = 4, shortest: int = 1) -> None:
        self.shortest = check.count("shortest", shortest, 1)
        self.longest = check.count("longest", longest, self.shortest)
        self._text: list[int] = []
        # A node is an n-gram; its child by a token is the (n+1)-gram that ends with it. Node -> where the text goes on after it stood last.
        self._children: dict[tuple[int, int], int] = {}
        self._after: list[int] = [0]
        # The nodes of the text's suffixes of 0, 1, ... tokens, and where the text went on after the longest that had stood before.
        self._suffixes = [_ROOT]
        self._match: int | None = None

    def add(self, tokens: Iterable[int]) -> None:
        """Append to the text: the prompt's tokens at first, then what each round commits."""
        for token in tokens:
            self._add(int(token))

    def propose(self, count: int) -> tuple[int, ...]:
        """Return the `count` tokens that followed, none if no suffix has occurred before.

        Where they reach the end of the text they go on with the proposal's own beginning: the text as if it were periodic from there.
        """
        wanted = check.count("count", count, 0)
        if self._match is None:
            return ()
        period = len(self._text) - self._match
        return tuple(self._text[self._match + i % period] for i in range(wanted))

    def _add(self, token: int) -> None:
        self._text.append(token)
        suffixes, self._match = [_ROOT], None
        for length, shorter in enumerate(self._suffixes[: self.longest], start=1):
            node = self._children.setdefault((shorter, token), len(self._after))
            if node == len(self._after):
                self._after.append(0)
            elif length >= self.shortest:
                self._match = self._after[node]
            self._after[node] = len(self._text)
            suffixes.append(node)
        self._suffixes = suffixes
