"""Gather the experts that a sequence's tokens chose, span after span."""

from __future__ import annotations

from infd.request import RoutedExperts


class Routing:
    """The experts of the tokens computed so far, for one sequence."""

    __slots__ = ("_known", "_prompt_tokens", "_sizes", "_values")

    def __init__(self, prompt_tokens: int) -> None:
        self._prompt_tokens = prompt_tokens
        self._sizes: tuple[int, int] | None = None  # layers, and experts of a token in each; None: no token is known
        self._values = bytearray()
        self._known = 0  # tokens

    def add(self, start: int, part: RoutedExperts) -> None:
        """Append the tokens that are not known yet. `part` are those of a span that begins at token `start`.

        A preempted sequence computes its tokens again.
        """
        assert start <= self._known, "tokens were computed whose experts are not known"
        self._sizes = part.layers, part.chosen
        self._values += part.values[(self._known - start) * part.token_bytes :]
        self._known = max(self._known, start + part.tokens)

    def report(self, generated: int) -> RoutedExperts | None:
        """Return the experts of the prompt's tokens and of `generated` tokens, all but the last, which is not computed.

        If the sequence ended before, the tokens computed by then; None if no token was computed.
        """
        if self._sizes is None:
            return None
        layers, chosen = self._sizes
        tokens = min(self._known, self._prompt_tokens + generated - 1)
        with memoryview(self._values) as values:  # a slice of the array would be a second copy
            return RoutedExperts(layers, chosen, bytes(values[: 2 * layers * chosen * tokens]))
