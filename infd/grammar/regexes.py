r"""Parse regular expressions in the syntax of Rust's regex crate, for engines that need an automaton.

Classes are Unicode's, as in the crate: `\d` is every decimal digit. `.` excludes the line feed. The crate rejects
look-around and back-references; word boundaries are unsupported here.
Sources: the documentation of the regex crate, version 1; UTS #18 for `\w` and `\s`.
"""

from __future__ import annotations

import re
import sys
import unicodedata
from functools import cache
from typing import TYPE_CHECKING, Final, NoReturn

from infd.errors import GrammarFailed, shorten
from infd.grammar.automata import Anchor, Join, Set, Times, Union
from infd.grammar.rules import ANY, LAST, Ranges, opposite, ranges_of

if TYPE_CHECKING:
    from infd.grammar.automata import Regular

_TIMES: Final = re.compile(r"\{(\d*)(,?)(\d*)\}")
_FLAGS: Final = re.compile(r"\(\?([a-zA-Z]*)(?:-([a-zA-Z]*))?([:)])")
_NAME: Final = re.compile(r"\(\?P?<[A-Za-z_][\w.\[\]]*>")
_CODE: Final = re.compile(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|[xuU]\{([0-9A-Fa-f]{1,8})\}")
_ASCII: Final = {
    "alnum": ((48, 57), (65, 90), (97, 122)),
    "alpha": ((65, 90), (97, 122)),
    "ascii": ((0, 127),),
    "blank": ((9, 9), (32, 32)),
    "cntrl": ((0, 31), (127, 127)),
    "digit": ((48, 57),),
    "graph": ((33, 126),),
    "lower": ((97, 122),),
    "print": ((32, 126),),
    "punct": ((33, 47), (58, 64), (91, 96), (123, 126)),
    "space": ((9, 13), (32, 32)),
    "upper": ((65, 90),),
    "word": ((48, 57), (65, 90), (95, 95), (97, 122)),
    "xdigit": ((48, 57), (65, 70), (97, 102)),
}
_SPACE: Final = ((9, 13), (32, 32), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029),
                 (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000))  # fmt: skip
_CIRCLED: Final = ((0x24B6, 0x24E9), (0x1F130, 0x1F149), (0x1F150, 0x1F169), (0x1F170, 0x1F189))  # alphabetic; not L
_CONTROL: Final = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11, "a": 7}
_DEPTH: Final = 200


def parse(pattern: str) -> Regular:
    """Return the syntax tree of a regular expression.

    Raises GrammarFailed: invalid_grammar for a malformed expression, unsupported_grammar for features such as word
    boundaries, grammar_too_large for too many repetitions or levels of brackets.
    """
    return Parser(pattern).whole()


class Parser:
    """A recursive-descent parser of one expression."""

    def __init__(self, pattern: str) -> None:
        self._text = pattern
        self._at = 0
        self._depth = 0
        self._dot_all = False
        self._many_lines = False
        self._any_case = False
        self._verbose = False

    def whole(self) -> Regular:
        found = self._options()
        if self._at < len(self._text):
            self._fail("a ) too many")
        return found

    def _options(self) -> Regular:
        flags = self._flags()
        options = [self._sequence()]
        while self._peek() == "|":
            self._at += 1
            options.append(self._sequence())
        self._set_flags(flags)
        return options[0] if len(options) == 1 else Union(tuple(options))

    def _sequence(self) -> Regular:
        items: list[Regular] = []
        while (here := self._peek()) not in ("", "|", ")"):
            if here in "*+?{":
                if not items:
                    self._fail(f"{here} repeats nothing")
                items.append(self._times(items.pop()))
            else:
                items += self._item()
        return items[0] if len(items) == 1 else Join(tuple(items))

    def _times(self, item: Regular) -> Regular:
        here = self._text[self._at]
        least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(here, (0, 0))
        self._at += 1
        if here == "{":
            found = _TIMES.match(self._text, self._at - 1)
            if found is None or not (found[1] or (found[2] and found[3])):
                self._fail("{ without its numbers")
            least = int(found[1] or 0)
            most = (int(found[3]) if found[3] else None) if found[2] else least
            if most is not None and most < least:
                self._fail(f"{found[0]} is empty")
            self._at = found.end()
        if self._peek() == "?":
            self._at += 1  # a lazy repetition matches the same whole texts
        if max(least, most or 0) > 10_000:  # the automaton would have too many states
            raise GrammarFailed(f"more than 10,000 repetitions: {shorten(self._text)}", code="grammar_too_large")
        return Times(item, least, most)

    def _item(self) -> list[Regular]:
        here = self._text[self._at]
        self._at += 1
        match here:
            case "(":
                return self._group()
            case "[":
                return [Set(self._class())]
            case ".":
                return [Set(ANY if self._dot_all else opposite(((10, 10),)))]
            case "^" | "$":
                if self._many_lines:
                    self._unsupported("(?m)")
                return [Anchor(end=here == "$")]
            case "\\":
                return [self._escape()]
            case "#" if self._verbose:
                end = self._text.find("\n", self._at)
                self._at = len(self._text) if end < 0 else end
                return []
            case _ if self._verbose and here.isspace():
                return []
        return [Set(self._cased(((ord(here), ord(here)),)))]

    def _group(self) -> list[Regular]:
        if self._text.startswith(("?=", "?!", "?<=", "?<!"), self._at):
            self._unsupported("look-around")
        inside = None
        if self._peek() == "?":
            if found := _NAME.match(self._text, self._at - 1):
                self._at = found.end()
            else:
                found = _FLAGS.match(self._text, self._at - 1)
                if found is None:
                    self._fail("a group of no known kind")
                self._at = found.end()
                if found[3] == ")":
                    self._turn(found[1], found[2] or "")
                    return []
                inside = (found[1], found[2] or "")
        self._depth += 1
        if self._depth > _DEPTH:
            raise GrammarFailed(f"more than {_DEPTH} levels of brackets", code="grammar_too_large")
        flags = self._flags()
        if inside:
            self._turn(*inside)
        found_options = self._options()
        self._set_flags(flags)
        if self._peek() != ")":
            self._fail("a ) is missing")
        self._at += 1
        self._depth -= 1
        return [found_options]

    def _flags(self) -> tuple[bool, bool, bool, bool]:
        return self._dot_all, self._many_lines, self._any_case, self._verbose

    def _set_flags(self, flags: tuple[bool, bool, bool, bool]) -> None:
        self._dot_all, self._many_lines, self._any_case, self._verbose = flags

    def _turn(self, on: str, off: str) -> None:
        for letters, value in ((on, True), (off, False)):
            for letter in letters:
                match letter:
                    case "s":
                        self._dot_all = value
                    case "m":
                        self._many_lines = value
                    case "i":
                        self._any_case = value
                    case "x":
                        self._verbose = value
                    case "U":
                        pass  # swaps greed, which does not change the set of whole texts that match
                    case "u" if value:
                        pass
                    case _:
                        self._unsupported(f"the flag {letter}")

    def _escape(self) -> Regular:
        here = self._peek()
        if here in ("A", "z"):
            self._at += 1
            return Anchor(end=here == "z")
        of = self._escaped()
        return Set(of if here in "dDsSwW" else self._cased(of))  # these classes hold all cases of their members

    def _escaped(self) -> Ranges:
        """Read an escape after its backslash, inside or outside of a class."""
        if found := _CODE.match(self._text, self._at):
            self._at = found.end()
            code = int(next(filter(None, found.groups())), 16)
            if code > LAST or 0xD800 <= code <= 0xDFFF:
                self._fail(f"{code:x} is no character")
            return ((code, code),)
        here = self._peek()
        self._at += 1
        match here:
            case "":
                self._fail("a backslash at the end")
            case "d" | "D" | "s" | "S" | "w" | "W":
                of = {"d": category("Nd"), "s": _SPACE, "w": _word()}[here.lower()]
                return opposite(of) if here.isupper() else of
            case "p" | "P":
                return self._property(negated=here == "P")
            case _ if here in _CONTROL:
                return ((_CONTROL[here],) * 2,)
            case _ if here.isascii() and here.isalnum():
                self._unsupported(f"\\{here}")
        return ((ord(here), ord(here)),)

    def _property(self, *, negated: bool) -> Ranges:
        found = re.compile(r"\{(\^?)([A-Za-z_=:& ]+)\}|([A-Za-z])").match(self._text, self._at)
        if found is None:
            self._fail("a property without its name")
        self._at = found.end()
        name = found[3] or re.sub(r"^(gc|general_category|General_Category)[=:]", "", found[2])
        name = _LONG.get(re.sub(r"[_ -]", "", name).lower(), name)
        if name in ("Any", "any"):
            of = ANY
        elif (of := category(name)) == ():
            self._unsupported(f"\\p{{{shorten(name)}}}")
        return opposite(of) if negated != bool(found[1]) else of

    def _class(self) -> Ranges:
        """Read a class after its opening bracket."""
        self._depth += 1
        if self._depth > _DEPTH:
            raise GrammarFailed(f"more than {_DEPTH} levels of brackets", code="grammar_too_large")
        negated = self._peek() == "^"
        self._at += negated
        kept: Ranges | None = None
        operator = ""
        pairs: list[tuple[int, int]] = []
        first = True
        while first or self._peek() != "]":
            if self._at >= len(self._text):
                self._fail("a ] is missing")
            if (following := self._text[self._at : self._at + 2]) in ("&&", "--", "~~") and not first:
                kept, operator = _combined(kept, operator, ranges_of(pairs)), following
                pairs = []
                self._at += 2
                continue
            pairs += self._member()
            first = False
        self._at += 1
        self._depth -= 1
        of = _combined(kept, operator, self._cased(ranges_of(pairs)))
        return opposite(of) if negated else of

    def _member(self) -> list[tuple[int, int]]:
        text, at = self._text, self._at
        if text.startswith("[:", at) and (found := re.compile(r"\[:(\^?)([a-z]+):\]").match(text, at)):
            if found[2] not in _ASCII:
                self._fail(f"{found[0]} is no class")
            self._at = found.end()
            return [*(opposite(_ASCII[found[2]]) if found[1] else _ASCII[found[2]])]
        self._at += 1
        if text[at] == "[":
            return [*self._class()]
        low = self._escaped() if text[at] == "\\" else ((ord(text[at]), ord(text[at])),)
        if self._peek() == "-" and text[self._at + 1 : self._at + 2] not in ("]", "", "-"):
            if len(low) != 1 or low[0][0] != low[0][1]:
                self._fail("a range from a class")
            self._at += 2
            last = text[self._at - 1]
            high = self._escaped() if last == "\\" else ((ord(last), ord(last)),)
            if len(high) != 1 or high[0][0] != high[0][1] or high[0][0] < low[0][0]:
                self._fail("a range that is empty")
            return [(low[0][0], high[0][0])]
        return [*low]

    def _cased(self, of: Ranges) -> Ranges:
        return _any_case(of) if self._any_case else of

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _fail(self, reason: str) -> NoReturn:
        raise GrammarFailed(f"the pattern {shorten(self._text)!r}: {reason}", code="invalid_grammar")

    def _unsupported(self, feature: str) -> NoReturn:
        raise GrammarFailed(f"the pattern {shorten(self._text)!r}: {feature} is not kept", code="unsupported_grammar")


_LONG: Final = {
    "letter": "L", "uppercaseletter": "Lu", "lowercaseletter": "Ll", "titlecaseletter": "Lt", "modifierletter": "Lm",
    "otherletter": "Lo", "mark": "M", "number": "N", "decimalnumber": "Nd", "digit": "Nd", "letternumber": "Nl",
    "othernumber": "No", "punctuation": "P", "symbol": "S", "separator": "Z", "spaceseparator": "Zs", "other": "C",
    "control": "Cc",
}  # fmt: skip


def _combined(kept: Ranges | None, operator: str, of: Ranges) -> Ranges:
    if kept is None:
        return of
    both = opposite(ranges_of([*opposite(kept), *opposite(of)]))
    match operator:
        case "&&":
            return both
        case "--":
            return opposite(ranges_of([*opposite(kept), *of]))
    return opposite(ranges_of([*opposite(ranges_of([*kept, *of])), *both]))


@cache
def _categories() -> dict[str, Ranges]:
    """Return the characters of each general category. The first call takes 0.3 s."""
    found: dict[str, list[tuple[int, int]]] = {}
    for code in range(sys.maxunicode + 1):
        pairs = found.setdefault(unicodedata.category(chr(code)), [])
        if pairs and pairs[-1][1] == code - 1:
            pairs[-1] = (pairs[-1][0], code)
        else:
            pairs.append((code, code))
    return {name: ranges_of(pairs) for name, pairs in found.items()}


@cache
def category(name: str) -> Ranges:
    """Return the characters of a general category, such as "L" or "Lu"; no characters for an unknown name."""
    if not re.fullmatch("[A-Z][a-z]?", name):
        return ()
    return ranges_of([pair for each, ranges in _categories().items() if each.startswith(name) for pair in ranges])


@cache
def _word() -> Ranges:
    names = ("L", "M", "Nd", "Nl", "Pc")
    return ranges_of([*(pair for name in names for pair in category(name)), *_CIRCLED, (0x200C, 0x200D)])


def _any_case(of: Ranges) -> Ranges:
    """Return a set with the simple case variants of its members.

    Raises GrammarFailed for a set of more than 2,000 characters, except the set of all characters.
    """
    if sum(high - low + 1 for low, high in of) > 2000:
        if of == ANY:
            return of
        raise GrammarFailed("(?i) beside large classes is not kept", code="unsupported_grammar")
    pairs = [*of]
    for low, high in of:
        for code in range(low, high + 1):
            one = chr(code)
            several = {one.lower(), one.upper(), one.lower().upper(), one.upper().lower()}
            pairs += [(ord(each), ord(each)) for each in several if len(each) == 1]
    return ranges_of(pairs)
