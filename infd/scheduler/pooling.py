"""Gather the numbers to which a prompt is reduced, span after span."""

from __future__ import annotations

from typing import TYPE_CHECKING

from infd.request import Pooled, by_token

if TYPE_CHECKING:
    from infd.request import Pool


class PromptPooling:
    """The numbers of one prompt.

    want    the pooling that the request asks for
    result  all numbers; None until the prompt's last span is committed
    """

    __slots__ = ("_known", "_parts", "_tokens", "result", "want")

    def __init__(self, want: Pool, tokens: int) -> None:
        """tokens: length of the prompt."""
        self.want = want
        self.result: Pooled | None = None
        self._tokens = tokens
        self._parts: list[Pooled] = []
        self._known = 0  # leading tokens of the prompt whose rows are in `_parts`, if each token has a row

    def add(self, start: int, end: int, part: Pooled | None) -> None:
        """Append the rows that are not known yet. `part` are those of a span of tokens [start, end).

        A sequence preempted in its prompt may be admitted again while its last step is in flight, so two steps may
        pool the same tokens.
        """
        if by_token(self.want.task):
            assert start <= self._known, "part of the prompt was not pooled"
            if part is not None and (known := max(0, self._known - max(start, self.want.skip))):
                part = Pooled(part.width, part.values[4 * part.width * known :])
            self._known = max(self._known, end)
        if part is not None:
            self._parts.append(part)
        if end >= self._tokens:
            assert self._parts, "the prompt was not pooled"
            self.result = Pooled(self._parts[0].width, b"".join(each.values for each in self._parts))
            self._parts.clear()
