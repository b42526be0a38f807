"""Write a `structural_tag` as rules: free text, in which each trigger begins a constrained block.

Two forms are supported: {"structures": [{"begin", "schema", "end"}], "triggers": [...]} and {"format": {...}}, a tree
of const_string, json_schema, regex, sequence, or, tag and triggered_tags. Other types in the tree are refused by name.
After a trigger, one of the tags that begin with the trigger follows; free text contains no trigger.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from infd.errors import GrammarFailed, shorten
from infd.grammar import bounds
from infd.grammar.regex_syntax import spelled
from infd.grammar.rules import (
    EMPTY,
    ROOT,
    Alternatives,
    Document,
    Pattern,
    Reference,
    Repeated,
    Sequence,
    Text,
    Until,
    Without,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from infd.grammar.protocol import Limits
    from infd.grammar.rules import Expression, Rules


def to_rules(description: str, limits: Limits, schema: Callable[[Any], Any]) -> Rules:
    """Return the rules of a structural tag.

    description  the structural tag as JSON text
    schema       rewrites a JSON Schema for the engine

    Raises GrammarFailed.
    """
    parsed = bounds.read_json(description, limits)
    if not isinstance(parsed, dict):
        _malformed("a structural tag is an object")
    writer = _Writer(limits, schema)
    if "structures" in parsed:
        tags = [
            {**each, "content": {"type": "json_schema", "json_schema": each.get("schema", True)}}
            for each in _objects(parsed, "structures")
        ]
        start = writer.triggered({"triggers": parsed.get("triggers"), "tags": tags}, "structures")
    else:
        start = writer.format(parsed.get("format"), "format")
    writer.rules[ROOT] = start
    return writer.rules


class _Writer:
    """Writes formats as expressions. `rules` collects the rules to which the expressions refer."""

    def __init__(self, limits: Limits, schema: Callable[[Any], Any]) -> None:
        self.rules: Rules = {ROOT: EMPTY}
        self._limits = limits
        self._schema = schema

    def format(self, value: Any, at: str) -> Expression:
        """Return the expression of a format. at: path of the format in the structural tag, for errors."""
        if not isinstance(value, dict):
            _malformed(f"{at} is an object with a type")
        match value.get("type"):
            case "const_string":
                return Text(_text(value, "value", at))
            case "json_schema":
                return self._rule(Document(self._schema(value.get("json_schema", True))))
            case "regex":
                pattern = _text(value, "pattern", at)
                bounds.check_nesting(pattern, self._limits)
                return self._rule(Pattern(spelled(pattern)))
            case "sequence" | "or" as kind:
                elements = [
                    self.format(each, f"{at}.elements[{index}]")
                    for index, each in enumerate(_objects(value, "elements"))
                ]
                if not elements:
                    _malformed(f"{at}.elements is empty")
                return Sequence(tuple(elements)) if kind == "sequence" else Alternatives(tuple(elements))
            case "tag":
                return self._tag(value, "", at)
            case "triggered_tags":
                return self.triggered(value, at)
            case kind:
                message = f"{at}: the type {shorten(str(kind))} of a structural tag is not supported"
                raise GrammarFailed(message, code="unsupported_grammar")

    def triggered(self, value: dict[str, Any], at: str) -> Expression:
        """Return the expression of free text in which a tag begins at each trigger."""
        triggers, tags = value.get("triggers"), _objects(value, "tags")
        if (
            not isinstance(triggers, list)
            or not triggers
            or not all(isinstance(each, str) and each for each in triggers)
        ):
            _malformed(f"{at}.triggers is a list of texts")
        blocks, left = [], list(range(len(tags)))
        for trigger in triggers:
            own = [index for index in left if _text(tags[index], "begin", f"{at}.tags[{index}]").startswith(trigger)]
            left = [index for index in left if index not in own]
            if not own:
                _malformed(f"{at}: no tag begins with the trigger {shorten(trigger)!r}")
            opened = self._rule(Until(trigger, tuple(triggers)))
            inner = Alternatives(tuple(self._tag(tags[index], trigger, f"{at}.tags[{index}]") for index in own))
            blocks.append(self._rule(Sequence((opened, inner))))
        if left:
            _malformed(f"{at}.tags[{left[0]}].begin begins with no trigger")
        rest = self._rule(Without(tuple(triggers)))
        block = Alternatives(tuple(blocks))
        least = int(bool(value.get("at_least_one")))
        if value.get("stop_after_first"):
            return block if least else Alternatives((block, rest))
        return Sequence((Repeated(block, least, None), rest))

    def _tag(self, tag: dict[str, Any], trigger: str, at: str) -> Expression:
        begin, end = _text(tag, "begin", at)[len(trigger) :], _text(tag, "end", at)
        content = self.format(tag.get("content"), f"{at}.content")
        return Sequence((*((Text(begin),) if begin else ()), content, *((Text(end),) if end else ())))

    def _rule(self, expression: Expression) -> Reference:
        """Add a rule; return a reference to it. The name is in capitals if the rule is a terminal."""
        name = f"t{len(self.rules)}"
        name = name.upper() if isinstance(expression, Pattern | Without) else name
        self.rules[name] = expression
        return Reference(name)


def _text(value: dict[str, Any], name: str, at: str) -> str:
    if not isinstance(text := value.get(name), str):
        _malformed(f"{at}.{name} is a text")
    return text


def _objects(value: dict[str, Any], name: str) -> list[dict[str, Any]]:
    members = value.get(name)
    if not isinstance(members, list) or not all(isinstance(each, dict) for each in members):
        _malformed(f"{name} is a list of objects")
    return members


def _malformed(reason: str) -> NoReturn:
    raise GrammarFailed(f"structural_tag: {reason}", code="invalid_grammar")
