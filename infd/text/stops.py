"""Find stop strings in a text that arrives in parts.

The stop string that is complete first ends the text; of two that are complete
at the same character, the longer one. So the answer depends neither on how the
text is cut into tokens nor on text that has not been generated.

All strings are matched at once (Aho and Corasick 1975): a character costs the
same however many strings there are, and none is looked at twice.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class _Node:
    """What is known after some characters: the longest end of the text that begins a stop string."""

    __slots__ = ("fallback", "found", "held", "longer")

    def __init__(self) -> None:
        self.longer: dict[str, _Node] = {}
        self.fallback: _Node | None = None  # the next shorter end that begins a stop string
        self.found: str | None = None  # the longest stop string that is complete here
        self.held = 0  # characters that may yet become a stop string


class StopStrings:
    """The stop strings of one request, shared by all its choices. Empty strings stop nothing."""

    __slots__ = ("_first", "_root")

    def __init__(self, strings: Iterable[str] = ()) -> None:
        self._root = _Node()
        wanted = [string for string in strings if string]
        self._first = frozenset(string[0] for string in wanted)
        for string in wanted:
            node = self._root
            for character in string:
                node = node.longer.setdefault(character, _Node())
            node.found = string
        self._link()

    def __bool__(self) -> bool:
        return bool(self._first)

    def search(self) -> StopSearch:
        """Start on a text."""
        return StopSearch(self._root, self._first)

    def _link(self) -> None:
        """Fill in fallbacks, shorter nodes first. A fallback's own stop string is shorter than the node's."""
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
    """How far one text has been searched.

    found  the stop string that ended it
    held   how many characters at the end of the text may yet turn out to begin a stop string
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
        """Return where in `text` the first stop string is complete, None if none is.

        With `ignore`, strings that are complete in this text do not count; one that it begins does.
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
    """Return the node of the longest end that begins a stop string, once `character` follows."""
    while True:
        following = node.longer.get(character)
        if following is not None:
            return following
        if node.fallback is None:
            return node
        node = node.fallback
