"""Find stop strings in a text that arrives in parts.

The first stop string to complete ends the text; if several complete at the same
character, the longest does. So the result depends neither on how the text is split into
tokens nor on text that has not been generated.

All strings are matched at once (Aho and Corasick 1975): the cost of a character
does not depend on their number, and no character is read twice.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class _Node:
    """A state of the automaton: the longest suffix of the text that is a prefix of a stop string."""

    __slots__ = ("fallback", "found", "held", "longer")

    def __init__(self) -> None:
        self.longer: dict[str, _Node] = {}
        self.fallback: _Node | None = None  # the next shorter suffix that is a prefix of a stop string
        self.found: str | None = None  # longest stop string that completes in this state
        self.held = 0  # number of the suffix's characters that can still begin a stop string


class StopStrings:
    """The stop strings of one request, shared by all its choices. Empty strings are ignored.

    included    whether the answer's text includes the stop string that ended the text
    min_tokens  stop strings that complete within the first min_tokens tokens do not count
    """

    __slots__ = ("_first", "_root", "included", "min_tokens")

    def __init__(self, strings: Iterable[str] = (), *, included: bool = False, min_tokens: int = 0) -> None:
        self.included = included
        self.min_tokens = min_tokens
        self._root = _Node()
        nonempty = [string for string in strings if string]
        self._first = frozenset(string[0] for string in nonempty)
        for string in nonempty:
            node = self._root
            for character in string:
                node = node.longer.setdefault(character, _Node())
            node.found = string
        self._link()

    def __bool__(self) -> bool:
        return bool(self._first)

    def search(self) -> StopSearch:
        """Start a search in one text."""
        return StopSearch(self._root, self._first)

    def _link(self) -> None:
        """Set `fallback`, `found` and `held` of all nodes, shorter nodes first.

        A node's own stop string takes precedence over its fallback's, which is shorter.
        """
        level = deque((node, 1) for node in self._root.longer.values())
        for node, _ in level:
            node.fallback = self._root
        while level:
            node, depth = level.popleft()
            shorter = node.fallback
            assert shorter is not None
            node.found = node.found or shorter.found
            node.held = depth if node.longer else shorter.held
            for character, following in node.longer.items():
                following.fallback = _step(shorter, character)
                level.append((following, depth + 1))


class StopSearch:
    """The search in one text.

    found  the stop string that ended the text
    held   number of characters at the text's end that may begin a stop string
    """

    __slots__ = ("_first", "_node", "_root", "found")

    def __init__(self, root: _Node, first: frozenset[str]) -> None:
        self._root = self._node = root
        self._first = first
        self.found: str | None = None

    @property
    def held(self) -> int:
        return self._node.held

    def feed(self, text: str, *, ignore: bool = False) -> int | None:
        """Return the end in `text` of the first stop string that completes, None if no stop string does.

        With `ignore`, stop strings that complete in `text` do not count; a stop string that
        begins in `text` and completes later counts.
        """
        node = self._node
        if node is self._root and self._first.isdisjoint(text):
            return None
        for index, character in enumerate(text):
            node = _step(node, character)
            if node.found is not None and not ignore:
                self.found = node.found
                return index + 1
        self._node = node
        return None


def _step(node: _Node, character: str) -> _Node:
    """Return the state after `character`."""
    while True:
        following = node.longer.get(character)
        if following is not None:
            return following
        if node.fallback is None:
            return node
        node = node.fallback
