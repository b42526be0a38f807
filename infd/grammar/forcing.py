"""Find the tokens that a grammar forces, from its masks: all allowed tokens begin with the same bytes.

Where white space is optional, as between the members of a JSON object, the answer is assumed to go on as it was written
so far: with the white space that followed the same characters before, or that its indentation calls for. An array or
object that may be empty is assumed not to be, and an array of objects to go on. Tokens found so are likely, not forced.

The tokens become drafts. A model writes a text in the tokens in which its tokenizer encodes it, so the forced text is
encoded as a whole. If its last token may merge with the text that follows, that token is left to the model.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from infd.grammar.protocol import Forced

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from infd.errors import GrammarFailed
    from infd.grammar.protocol import Matcher, Vocabulary

    Fill = Callable[[Sequence[Matcher], NDArray[np.int32]], list[GrammarFailed | None]]

MOST_ALLOWED: Final = 48  # allowed tokens of a mask that is examined, without those that begin with white space
MOST_BLANK: Final = 1024  # allowed tokens that begin with white space
TOKEN_BYTES: Final = 5  # bytes that are sought for each token; each byte takes a mask, 0.1 ms in all
CLOSING: Final = ('",', '"', ",")
WRITTEN: Final = 256  # latest tokens of an answer in which the white space is sought
_STRINGS: Final = re.compile(rb'"(?:[^"\\]|\\.)*"')
_WORD: Final = re.compile(rb"[A-Za-z0-9_]+")
_INDENTED: Final = re.compile(rb"^\s*[\[{]\n([ \t]+)\S")
_BRACKETS: Final = re.compile(rb"[\[\]{}]")
_NUMBERS: Final = re.compile(rb"[-+.0-9eE]*[0-9]")


def closing(vocabulary: Vocabulary) -> list[int]:
    """Return the tokens that end a string or a number of a JSON text."""
    encoded = map(vocabulary.encode, CLOSING)
    return [tokens[0] for tokens in encoded if len(tokens) == 1]


def narrow(row: NDArray[np.int32]) -> bool:
    """Return whether a mask may allow few enough tokens to be examined. Takes microseconds."""
    import numpy as np

    most = MOST_ALLOWED + MOST_BLANK
    return int(np.count_nonzero(row)) <= most and int(np.bitwise_count(row).sum()) <= most


def allows(row: NDArray[np.int32], token: int) -> bool:
    """Return whether a mask allows a token."""
    return bool(row[token // 32] >> (token % 32) & 1)


def forced(
    fill: Fill,
    vocabulary: Vocabulary,
    matcher: Matcher,
    row: NDArray[np.int32],
    most: int,
    known: Sequence[int] = (),
    *,
    exact: bool = True,
) -> Forced:
    """Return at most `most` tokens that the grammar forces; none if the model has a choice.

    fill     see Compiler.fill
    matcher  reads the forced tokens, and is rolled back. If it fails, it is unusable
    row      mask of the next token
    known    tokens of the answer so far
    exact    whether it is found out if the tokens are sure. Otherwise they are likely, and fewer masks are filled
    """
    walk = _Walk(fill, vocabulary, matcher, row, known, exact=exact)
    while len(walk.text) < most * TOKEN_BYTES and walk.step():
        pass
    if walk.read:
        matcher.rollback(walk.read)
    return walk.found(most)


def behind(
    fill: Fill,
    vocabulary: Vocabulary,
    closing: Sequence[int],
    matcher: Matcher,
    row: NDArray[np.int32],
    most: int,
    known: Sequence[int],
) -> dict[int, list[int]]:
    """Return the tokens that are likely behind each token of `closing`; none if it is not allowed or leaves a choice.

    For the other arguments see `forced`.
    """
    found: dict[int, list[int]] = {}
    rows, tokens = row[None].copy(), vocabulary.tokens
    for token in closing:
        found[token] = []
        if not allows(row, token):
            continue
        # A quote goes on as a quote with a comma does, if that was found.
        for rest in closing:
            whole = next((each for each in found if tokens[each] == tokens[token] + tokens[rest]), None)
            if whole is not None and found[whole]:
                found[token] = [rest, *found[whole]]
        if found[token]:
            continue
        matcher.advance([token])
        if not matcher.stopped and fill([matcher], rows)[0] is None and narrow(rows[0]):
            found[token] = forced(fill, vocabulary, matcher, rows[0], most, [*known, token], exact=False).tokens
        matcher.rollback(1)
    return found


class _Walk:
    """Follows the text that a grammar forces.

    text  so far
    read  tokens that the matcher has read
    """

    def __init__(
        self,
        fill: Fill,
        vocabulary: Vocabulary,
        matcher: Matcher,
        row: NDArray[np.int32],
        known: Sequence[int],
        *,
        exact: bool,
    ) -> None:
        self.text = b""
        self.read = 0
        self._fill = fill
        self._vocabulary = vocabulary
        self._matcher = matcher
        self._rows = row[None].copy()
        self._known = known
        self._allowed: dict[int, list[int]] = {}  # by offset in the text
        self._written: bytes | None = None  # the answer before the text, once it is needed
        self._spaced = False  # whether the text ends with white space that the grammar does not force
        self._sure = exact
        self._special: int | None = None  # the special token that is forced
        self._stopped = False  # whether the text ends the answer

    def step(self) -> bool:
        """Extend the text; return whether more may be forced."""
        if not narrow(self._rows[0]):
            return False
        tokens, choices = self._vocabulary.tokens, listed(self._rows[0])
        visible = [each for each in choices if not tokens[each][:1].isspace()]
        optional = bool(visible) and len(visible) < len(choices)  # white space
        visible = self._without_ends(visible)
        if len(visible if optional else choices) > MOST_ALLOWED:
            return False
        if optional and not self._spaced and (gap := self._gap(visible)):
            filling = _fitting(gap, choices, self._vocabulary)
            if filling:
                self._allowed[len(self.text)] = choices
                self._spaced, self._sure = True, False
                return self._read(filling, gap)
        choices, self._spaced = visible or choices, False
        if any(each in self._vocabulary.end_ids or each in self._vocabulary.special for each in choices):
            if len(choices) == 1 and not self.text and choices[0] not in self._vocabulary.end_ids:
                self._special = choices[0]
            return False
        if not choices:
            return False
        by_length = sorted(choices, key=lambda each: len(tokens[each]))
        shortest, longest = by_length[0], by_length[-1]
        if not all(tokens[each].startswith(tokens[shortest]) for each in choices):
            return False
        self._allowed[len(self.text)] = choices
        self._sure = self._sure and not optional
        # Where each token begins the longest, and that is a word, the text goes on with it, unless another way is shown
        # by no token. A likely text may be wrong, so the longest is taken, which saves most of the masks of a name.
        # Behind other characters there are such ways: `:-` may be a token behind a name, and no token joins a digit.
        word = not self._sure and _WORD.fullmatch(tokens[longest])
        if word and all(tokens[longest].startswith(tokens[each]) for each in choices):
            shortest = longest
        return self._read([shortest], tokens[shortest])

    def found(self, most: int) -> Forced:
        """Return at most `most` tokens in which the text is probably written."""
        if self._special is not None:
            return Forced([self._special], self._sure)
        tokens, found = self._vocabulary.tokens, _tokens(self.text, self._allowed, self._vocabulary)
        last = len(tokens[found[-1]]) if found and self._sure and not self._stopped else 0
        if last and _merges(last, self.text, self._allowed, self._vocabulary):
            del found[-1]
        return Forced(found[:most], self._sure)

    def _without_ends(self, visible: list[int]) -> list[int]:
        """Return the tokens `visible` without those that end an array or object with nothing in it, or behind an object
        an array that may go on.
        """
        tokens = self._vocabulary.tokens
        within = [each for each in visible if tokens[each][:1] not in (b"]", b"}")]
        if not within or len(within) == len(visible):
            return visible
        last = self._whole.rstrip()[-1:]
        goes_on = last == b"}" and all(tokens[each][:1] == b"," for each in within)
        if last not in (b"[", b"{") and not goes_on:
            return visible
        self._sure = False
        return within

    @property
    def _whole(self) -> bytes:
        """The answer's last tokens, and the text behind them."""
        if self._written is None:
            self._written = _joined(self._vocabulary, self._known)
        return self._written + self.text

    def _gap(self, visible: list[int]) -> bytes:
        """Return the white space that probably follows, before one of the tokens `visible`."""
        first = {self._vocabulary.tokens[each][:1] for each in visible}
        return blank(self._whole, first.pop() if len(first) == 1 else b"")

    def _read(self, tokens: list[int], text: bytes) -> bool:
        """Append a text, of these tokens; return whether a mask follows."""
        self.text += text
        self._matcher.advance(tokens)
        self.read += len(tokens)
        self._stopped = self._matcher.stopped
        return not self._stopped and self._fill([self._matcher], self._rows)[0] is None


def blank(written: bytes, follows: bytes) -> bytes:
    """Return the white space that the answer probably has between its end and `follows`: what it had there before, or
    behind a first bracket and before a first closing one a new line, indented as the answer's lines are.

    written  a JSON text so far; it may end within the white space
    follows  the next character; empty: not known
    """
    text = _NUMBERS.sub(b"0", _STRINGS.sub(b'""', written))
    begun = text[len(text.rstrip()) :]
    text = text[: len(text) - len(begun)]
    last, contexts = text[-1:], [text[-2:], text[-1:]]
    if last == b",":
        contexts += [b"[", b"{"]
    gap = b" " if last == b":" else b""
    behind = rb"(\s*)" + (re.escape(follows) or rb"(?=\S)")
    for context in contexts:
        if found := re.findall(re.escape(context) + behind, text):
            gap = found[-1]
            break
    else:
        gap = b"\n" if last in (b"[", b"{") or follows in (b"]", b"}") else gap
    if b"\n" in gap and (last in (b"[", b"{") or follows in (b"]", b"}")):
        gap = _new_line(text, gap, ends=follows in (b"]", b"}"))
    return gap[len(begun) :] if gap.startswith(begun) else b""


def _new_line(text: bytes, otherwise: bytes, *, ends: bool) -> bytes:
    """Return a line break and the indentation of the next line of a JSON text.

    text       without strings, which may contain brackets
    otherwise  returned if the text has lines whose indentation is not known; empty: it has one line so far
    ends       whether the line begins with a closing bracket; then it is indented as the line of the opening one
    """
    first = _INDENTED.match(text)
    opened: list[int] = []  # places behind brackets that are open
    for bracket in _BRACKETS.finditer(text):
        if bracket[0] in b"[{":
            opened.append(bracket.end())
        elif opened:
            opened.pop()
    if first is None or not opened:
        return otherwise if len(otherwise) > 1 else b""
    if ends and not text.startswith(b"\n", opened[-1]):
        return b""
    return b"\n" + first[1] * (len(opened) - ends)


def _joined(vocabulary: Vocabulary, known: Sequence[int]) -> bytes:
    tokens = vocabulary.tokens
    return b"".join(tokens[each] for each in known[-WRITTEN:] if each < len(tokens))


def _fitting(text: bytes, choices: list[int], vocabulary: Vocabulary) -> list[int]:
    """Return the token that is `text`, if it is allowed; else the tokens of its bytes, if the first is allowed."""
    whole = next((each for each in choices if vocabulary.tokens[each] == text), None)
    if whole is not None:
        return [whole]
    first = {vocabulary.tokens[each]: each for each in choices if len(vocabulary.tokens[each]) == 1}
    single = [first.get(text[at : at + 1]) for at in range(len(text))]
    return [each for each in single if each is not None] if None not in single else []


def listed(row: NDArray[np.int32]) -> list[int]:
    """Return the tokens that a mask allows."""
    import numpy as np

    words = np.flatnonzero(row)
    bits = np.unpackbits(row[words].view(np.uint8), bitorder="little").reshape(-1, 32)
    word, bit = np.nonzero(bits)
    tokens: list[int] = (words[word] * 32 + bit).tolist()
    return tokens


def _tokens(text: bytes, allowed: dict[int, list[int]], vocabulary: Vocabulary) -> list[int]:
    """Return the tokens in which the tokenizer encodes a forced text.

    If the tokenizer adds a space to the beginning of texts, or the text ends within a character, return the longest
    tokens that the grammar allows, one behind the other.
    """
    try:
        encoded = vocabulary.encode(text.decode())
    except UnicodeDecodeError:
        encoded = []
    if b"".join(vocabulary.tokens[each] for each in encoded if each < len(vocabulary.tokens)) == text:
        return encoded
    found: list[int] = []
    at = 0
    while at in allowed:
        fitting = [each for each in allowed[at] if text.startswith(vocabulary.tokens[each], at)]
        found.append(max(fitting, key=lambda each: len(vocabulary.tokens[each])))
        at += len(vocabulary.tokens[found[-1]])
    return found


def _merges(last: int, text: bytes, allowed: dict[int, list[int]], vocabulary: Vocabulary) -> bool:
    """Return whether a longer token than the text's last one, of `last` bytes, is allowed in its place."""
    return any(len(vocabulary.tokens[each]) > last for each in allowed.get(len(text) - last, ()))
