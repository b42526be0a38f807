"""Hostile templates and tokenizers generated from bytes.

They combine every construct that the sandbox or the library knows: structures are shared, texts grow and expressions
backtrack.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from jinja2.defaults import DEFAULT_FILTERS, DEFAULT_TESTS

from tests.text.vocabularies import KINDS

if TYPE_CHECKING:
    from tests.fuzz.grammar import Chooser

BEGINNING: Final = (
    "{%- set ns = namespace(a=[1], b=[1], t=(1, 2), s='xy', n=3, d={'k': [1], 'l': 'm'}, g=range(50)) -%}"
    "{%- macro m(x, y=1) %}{{ x }}{{ caller() if caller }}{% endmacro -%}"
)
PLACES = ("ns.a", "ns.b", "ns.t", "ns.s", "ns.n", "ns.d", "ns.g")
NAMES = (*PLACES, "messages", "messages[0].content", "x", "loop.index", "varargs", "tools", "nothing", "bos_token")
CONSTANTS = ("1", "-1", "0", "99", "1.5", "'x'", "' '", "''", "'xyxy'", "true", "none", "[]", "{}", "10**9", "'%s%s'")
OPERATORS = ("+", "-", "*", "/", "//", "%", "**", "~", "==", "!=", "<", "<=", ">", "in", "not in", "and", "or")
FILTERS = (*sorted(DEFAULT_FILTERS), *("list", "map", "join", "sort", "unique", "select", "tojson", "replace") * 3)
TESTS = tuple(sorted(name for name in DEFAULT_TESTS if name.isidentifier()))
METHODS = (
    *(
        "split",
        "rsplit",
        "join",
        "replace",
        "strip",
        "find",
        "rfind",
        "count",
        "index",
        "format",
        "format_map",
        "title",
    ),
    *(
        "splitlines",
        "partition",
        "rpartition",
        "center",
        "ljust",
        "zfill",
        "encode",
        "startswith",
        "upper",
        "translate",
    ),
    *("items", "keys", "values", "get", "copy", "pop", "append", "fromkeys", "isdisjoint", "casefold", "expandtabs"),
)
ATTRIBUTES = ("content", "role", "k", "0", "__class__", "index", "previtem")


def template(choose: Chooser) -> str:
    """Return the source of a template."""
    return BEGINNING + "".join(_statement(choose, 0) for _ in range(1 + choose.below(6)))


def _body(choose: Chooser, depth: int) -> str:
    return "".join(_statement(choose, depth + 1) for _ in range(1 + choose.below(3)))


def _statement(choose: Chooser, depth: int) -> str:
    expression, place = _expression(choose, depth), choose.pick(PLACES)
    match choose.below(14 if depth < 3 else 5):
        case 0 | 1:
            return f"{{% set {place} = {expression} %}}"
        case 2:
            return f"{{{{ {expression} }}}}"
        case 3:
            return f"{{% set {place} = [{place}, {place}] %}}{{% set ns.b = [ns.b, ns.b] %}}"
        case 4:
            return choose.pick(("text", "{% break %}", "{% continue %}", "{% raw %}{{{% endraw %}"))
        case 5 | 6:
            turns = choose.pick(("range(45)", "range(99999)", "messages", "ns.g"))
            return f"{{% for x in {turns} %}}{_body(choose, depth)}{{% endfor %}}"
        case 7:
            kind = choose.pick(("", " recursive", f" if {expression}"))
            again = "{{ loop(x) }}" if kind == " recursive" else ""
            return f"{{% for x in {expression}{kind} %}}{_body(choose, depth)}{again}{{% endfor %}}"
        case 8:
            return f"{{% if {expression} %}}{_body(choose, depth)}{{% else %}}{_body(choose, depth)}{{% endif %}}"
        case 9:
            return f"{{% set {place.replace('.', '_')} %}}{_body(choose, depth)}{{% endset %}}"
        case 10:
            return (
                f"{{% macro m{choose.below(3)}(x) %}}{_body(choose, depth)}{{% endmacro %}}{{{{ m0({expression}) }}}}"
            )
        case 11:
            return f"{{% call m({expression}) %}}{_body(choose, depth)}{{% endcall %}}"
        case 12:
            return f"{{% filter {_filter(choose, depth)} %}}{_body(choose, depth)}{{% endfilter %}}"
        case _:
            frame = choose.pick(("block z", "autoescape true", f"with y = {expression}", "generation"))
            return f"{{% {frame} %}}{_body(choose, depth)}{{% end{frame.split()[0]} %}}"


def _expression(choose: Chooser, depth: int) -> str:
    if depth > 4:
        return str(choose.pick(NAMES))
    inner = lambda: _expression(choose, depth + 1)  # noqa: E731
    match choose.below(17):
        case 0 | 1 | 2:
            return str(choose.pick(NAMES))
        case 3:
            return str(choose.pick(CONSTANTS))
        case 4 | 5:
            return f"({inner()} {choose.pick(OPERATORS)} {inner()})"
        case 6 | 7 | 8:
            return f"({inner()} | {_filter(choose, depth)})"
        case 9:
            return f"({inner()} is {choose.pick(TESTS)}({inner()}))"
        case 10:
            return f"{inner()}.{choose.pick(METHODS)}({_arguments(choose, depth)})"
        case 11:
            return f"{inner()}[{choose.pick(('1:', ':-1', '::-1', '0', inner()))}]"
        case 12:
            opening, closing = choose.pick(("[]", "()"))
            return f"{opening}{inner()}, {inner()}{closing}"
        case 13:
            return f"{{'k': {inner()}, {choose.pick(('1', inner()))}: {inner()}}}"
        case 14:
            called = choose.pick(("m", "dict", "namespace", "range", "cycler", "joiner", "loop.changed", "loop.cycle"))
            return f"{called}({_arguments(choose, depth)})"
        case 15:
            called = choose.pick(("raise_exception", "strftime_now", "ns.s.join", "loop"))
            return f"{called}({inner()})"
        case _:
            return f"({inner()} if {inner()} else {inner()}).{choose.pick(ATTRIBUTES)}"


def _filter(choose: Chooser, depth: int) -> str:
    return f"{choose.pick(FILTERS)}({_arguments(choose, depth)})"


def _arguments(choose: Chooser, depth: int) -> str:
    given = []
    for _ in range(choose.below(3)):
        match choose.below(6):
            case 0:
                given.append(repr(choose.pick((*FILTERS, *TESTS, *ATTRIBUTES))))
            case 1:
                given.append(str(choose.pick(CONSTANTS)))
            case 2:
                given.append(
                    f"{choose.pick(('attribute', 'start', 'indent', 'default', 'by'))}={choose.pick(CONSTANTS)}"
                )
            case _:
                given.append(_expression(choose, depth + 2))
    return ", ".join(sorted(given, key=lambda argument: "=" in argument.partition("'")[0]))


ATOMS = ("a", "b", " ", r"\s", r"\S", r"\p{L}", r"\p{N}", "[^a]", r"[^\s\p{L}\p{N}]", ".", r"[\r\n]", "[a-z]", "'s")
TIMES = ("", "", "", "+", "*", "?", "{1,3}", "{2,}", "++", "+?", "{0,999}")
TEXTS = (
    "a",
    "b",
    " ",
    "ab",
    "a ",
    "\n",
    " \n",
    "1",
    "é",
    "\u0301",
    "\ufdfa",
    "中",
    "<m>",
    "'s",
    "A",
    "aA",
    "ʰ",
    "-",
    "▁",
)
STRINGS = ("a", " ", "", "▁", "aa", "a" * 40, "\ufdfa", "\n", "\0")


def tokenizer(choose: Chooser) -> bytes:
    """Return a tokenizer.json."""
    described: dict[str, Any] = json.loads(DESCRIBED[choose.pick(tuple(DESCRIBED))])
    if choose.below(3):
        described["normalizer"] = _sequence(choose, "normalizers", _normalizer)
    if choose.below(3):
        described["pre_tokenizer"] = _sequence(choose, "pretokenizers", _pre_tokenizer)
    if choose.below(3) == 2:
        described["decoder"] = _sequence(choose, "decoders", _decoder)
    for _ in range(choose.below(4)):
        flags = {name: bool(choose.below(2)) for name in ("single_word", "lstrip", "rstrip", "normalized", "special")}
        content = choose.pick(("<m>", " ", "a", "\n", "aa", "é"))
        described["added_tokens"].append({"id": choose.pick((0, 5, 900, 2**32 - 1)), "content": content, **flags})
    if choose.below(3) == 2:
        name = choose.pick(
            ("max_input_chars_per_word", "continuing_subword_prefix", "byte_fallback", "unk_token", "unk_id")
        )
        described["model"][name] = choose.pick((0, 1, 10**9, None, True, *STRINGS))
    return json.dumps(described).encode()


def text(choose: Chooser) -> str:
    """Return a text, mostly long."""
    parts = [choose.pick(TEXTS) for _ in range(1 + choose.below(4))]
    return "".join(parts) * choose.pick((1, 30, 3000)) + str(choose.pick(TEXTS))


def _sequence(choose: Chooser, inner: str, step: Any) -> Any:
    steps = [step(choose) for _ in range(1 + choose.below(3))]
    return steps[0] if len(steps) == 1 else {"type": "Sequence", inner: steps}


def _regex(choose: Chooser) -> str:
    if choose.below(4) == 0:
        return str(choose.pick(KNOWN_EXPRESSIONS))
    words = []
    for _ in range(1 + choose.below(3)):
        word = "".join(choose.pick(ATOMS) + choose.pick(TIMES) for _ in range(1 + choose.below(3)))
        match choose.below(6):
            case 0:
                word = f"(?:{word}){choose.pick(TIMES)}"
            case 1:
                word += choose.pick((r"(?!\S)", r"(?=a)", r"\b", "$", "(?i:b|c)", "(?:a|b)?"))
        words.append(word)
    return "|".join(words) + choose.pick(("", r"|\s+(?!\S)|\s+", r"|\s*[\r\n]+|\s+(?!\S)|\s+"))


def _pattern(choose: Chooser) -> Any:
    return {"Regex": _regex(choose)} if choose.below(3) else {"String": choose.pick(STRINGS)}


def _normalizer(choose: Chooser) -> Any:
    kind = choose.pick(("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Nmt", "Strip", "Bert", "", "", ""))
    match kind:
        case "Strip":
            return {"type": kind, "strip_left": True, "strip_right": True}
        case "Bert":
            names = ("clean_text", "handle_chinese_chars", "strip_accents", "lowercase")
            return {"type": "BertNormalizer", **{name: bool(choose.below(2)) for name in names}}
        case "" if choose.below(2):
            return {"type": "Prepend", "prepend": choose.pick(STRINGS)}
        case "":
            return {"type": "Replace", "pattern": _pattern(choose), "content": choose.pick(STRINGS)}
    return {"type": kind}


def _pre_tokenizer(choose: Chooser) -> Any:
    kind = choose.pick(
        ("Whitespace", "BertPreTokenizer", "UnicodeScripts", "ByteLevel", "Metaspace", "Digits", "Split")
    )
    match kind:
        case "ByteLevel":
            return {"type": kind, "add_prefix_space": bool(choose.below(2)), "trim_offsets": True, "use_regex": True}
        case "Metaspace":
            return {"type": kind, "replacement": "▁", "prepend_scheme": choose.pick(("always", "first")), "split": True}
        case "Digits":
            return {"type": kind, "individual_digits": bool(choose.below(2))}
        case "Split":
            behavior = choose.pick(("Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"))
            return {"type": kind, "pattern": _pattern(choose), "behavior": behavior, "invert": bool(choose.below(2))}
    return {"type": kind}


def _decoder(choose: Chooser) -> Any:
    match choose.below(5):
        case 0:
            return {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
        case 1:
            return {"type": "Replace", "pattern": _pattern(choose), "content": choose.pick(STRINGS)}
        case 2:
            return {"type": "Strip", "content": " ", "start": choose.below(3), "stop": choose.pick((0, 1, 10**9))}
        case 3:
            return {"type": "WordPiece", "prefix": choose.pick(STRINGS), "cleanup": True}
    return {"type": choose.pick(("ByteFallback", "Fuse"))}


DESCRIBED: Final = {kind: make().to_str() for kind, make in KINDS.items()}
_CASED: Final = (r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]")
_WORDS: Final = (
    r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*",
    "{0}?{1}*{2}+|{0}?{1}+{2}*".format(r"[^\r\n\p{L}\p{N}]", *_CASED),
)
KNOWN_EXPRESSIONS: Final = tuple(words + r"|\s*[\r\n]+|\s+(?!\S)|\s+" for words in _WORDS)
