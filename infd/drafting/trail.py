"""Follow a choice's answer through the text that it copies, and learn where it leaves that text.

An answer that lists the records of its prompt, or edits a text, is a form with copied values. Two habits of it are
learned:

Turns    The prompt would go on with a certain token, but the answer goes on in its own way: a value ends before that
         token, or a name is replaced. The answer does so again at the next equal token.
Sources  A value was copied from a place in the prompt. When the answer comes to such a value again, it is copied from
         the next place that follows the same tokens.

Otherwise the answer is expected to copy the prompt in its order: of places that follow the same run of tokens, the
first one behind the text that was copied last.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from infd.drafting.drafter import RUN
from infd.drafting.occurrences import MOST_COMPARED, MOST_INDEXED, Occurrences, continued

if TYPE_CHECKING:
    from collections.abc import Sequence

NEAR: Final = 128  # tokens of the prompt behind a source in which the next one is sought
AHEAD: Final = 256  # tokens of the prompt behind the text copied last in which a run is sought first
VALUE: Final = 16  # most tokens of an earlier value behind which its form is sought
TRUSTED: Final = 2  # turns in a row that are wrong until turns are followed no more


class Trail:
    """The text of a choice, and the place in it that the answer follows.

    run  tokens up to the last one that the trail agreed with, RUN at most; 0: the answer follows no known text
    """

    def __init__(self, prompt_tokens: int) -> None:
        self.run = 0
        self._seen = Occurrences(RUN, since=prompt_tokens - MOST_INDEXED)
        self._prompt = prompt_tokens
        self._read = prompt_tokens  # tokens that were compared with the trail
        self._at = 0  # place of the token that is expected next
        self._copied_to = max(0, prompt_tokens - MOST_INDEXED)  # place of the prompt behind the text copied last
        self._turns: dict[int, int] = {}  # token of the prompt -> place of the answer that went on in its stead
        self._right = 0  # turns that were right; first, none is followed
        self._sources: dict[int, int] = {}  # place of the answer -> place of the prompt from which a value was copied
        self._value: int | None = None  # place of the earlier value in the stead of which a value is written

    def follow(self, tokens: Sequence[int]) -> None:
        """Read the choice's new tokens. If they leave the trail, follow the longest run of the last tokens."""
        self._seen.extend(tokens, len(tokens) - 1)  # the last run has no continuation yet
        for end in range(self._read, len(tokens)):
            if not self.run:
                break
            expected = tokens[self._at]
            if expected in self._turns or self._at in self._sources:
                self._compare(tokens, end)
            elif expected == tokens[end]:
                self._agree(self._at)
            else:
                self._leave(tokens, end)
        self._read = len(tokens)
        if not self.run and (found := self._seen.find(tokens, tokens)) is not None:
            self.run, self._at = found
            if self._at < self._prompt:
                self._at = self._in_order(tokens, self._at)
                if (begin := len(tokens) - self.run) >= self._prompt:
                    self._sources[begin] = self._at - self.run

    def _in_order(self, tokens: Sequence[int], latest: int) -> int:
        """Return the first place near the text copied last that follows the same run as `latest`; or `latest`."""
        at, end, run = self._copied_to, min(latest, self._copied_to + AHEAD), tokens[-self.run :]
        try:
            for _ in range(MOST_COMPARED):
                at = tokens.index(run[-1], at, end) + 1
                if tokens[at - self.run : at] == run:
                    return at
        except ValueError:  # no place is left
            pass
        return latest

    def drafts(self, tokens: Sequence[int], most: int) -> list[int]:
        """Return `most` tokens that are expected to follow; none if the answer follows no known text."""
        if not self.run:
            return []
        at, end = self._at, len(tokens)
        straight = not self._right or self._turns.keys().isdisjoint(tokens[at : at + most])
        if straight and self._sources.keys().isdisjoint(range(at, at + most)):
            return continued(tokens, at, most)
        found: list[int] = []
        while len(found) < most:
            if at < end:
                at = self._copied(tokens, self._turned(tokens, at) if self._right else at)
            found.append(tokens[at] if at < end else found[at - end])
            at += 1
        return found

    def _compare(self, tokens: Sequence[int], end: int) -> None:
        """Compare the token at place `end` with the expected ones."""
        at, token = self._at, tokens[end]
        turned = self._turned(tokens, at)
        copied = self._copied(tokens, turned)
        place = next((each for each in (copied, turned, at) if tokens[each] == token), None)
        if place is None:
            self._leave(tokens, end)
            return
        if at not in (turned, place):
            self._turns[tokens[at]] = end
            self._right = min(TRUSTED, self._right + 1)
        elif turned != at:
            del self._turns[token]
            self._right = max(0, self._right - 1)
        if place == copied != turned:
            self._sources[end], self._value = copied, turned
        self._agree(place)

    def _agree(self, place: int) -> None:
        """Follow the text behind a place that was right."""
        self._at, self.run = place + 1, min(RUN, self.run + 1)

    def _leave(self, tokens: Sequence[int], end: int) -> None:
        """Note that the token at place `end` was not expected."""
        at, self.run = self._at, 0
        if at >= self._prompt:
            self._value = at
            return
        self._copied_to = at
        self._turns[tokens[at]] = end
        if self._value is not None:
            form = tokens[self._value + 1 : min(self._value + 1 + VALUE, end)]
            if tokens[end] in form:  # it goes on behind the earlier value
                self._at, self.run = self._value + 2 + form.index(tokens[end]), 1
                self._value = None

    def _turned(self, tokens: Sequence[int], at: int) -> int:
        """Return the place of the answer that is expected in the stead of the token at `at`; or `at`."""
        return self._turns.get(tokens[at], at) if at < self._prompt else at

    def _copied(self, tokens: Sequence[int], at: int) -> int:
        """Return the place of the prompt that is expected in the stead of the value at `at`; or `at`."""
        if not (source := self._sources.get(at, 0)):  # nothing stands before place 0
            return at
        place = alike(tokens, source, min(source + NEAR, self._prompt))
        return at if place is None else place


def alike(tokens: Sequence[int], place: int, end: int) -> int | None:
    """Return the next place before `end` that follows the same two tokens as `place`, or the same one; None if none."""
    before, last = tokens[place - 2], tokens[place - 1]
    at, found = place, None
    try:
        while True:
            at = tokens.index(last, at, end - 1) + 1
            if tokens[at - 2] == before:
                return at
            found = found or at
    except ValueError:
        return found
