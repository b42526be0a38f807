"""Run a stranger's template within bounds.

A chat template comes with the model file. Jinja's immutable sandbox keeps it
from reaching Python; this module keeps it from taking the process's time and
memory. Everything that a template does costs fuel: a turn of a loop, a call, a
filter, an operator, each character that these make. Steps that could make much
out of little in one go (repetition, powers, padding, printing a structure that
contains itself many times) are paid for before they run. The count is the same
on every machine; a deadline backs it up, checked at the same places.

It bounds accidents and plain malice. It is no jail against an author who counts
the instructions that are not metered, such as comparisons of long strings.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import ItemsView, KeysView, Mapping, Sized, ValuesView
from functools import wraps
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer
from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from jinja2 import Template
    from jinja2.parser import Parser


class Exhausted(TemplateError):
    """The template wants more than it may have; the message follows the template's name."""


class Limits(Struct, frozen=True, kw_only=True):
    """What one rendering may use.

    A legitimate prompt is bounded by the request's body, 16 MiB by default, and
    its text passes through a few filters.
    """

    output_characters: int = 32 * 2**20
    fuel: int = 192 * 2**20
    seconds: float = 5.0


# What the event loop can spare: many times what a short chat takes, and less than a step.
BRIEF = Limits(output_characters=2**16, fuel=2**17, seconds=0.005)

STEP = 64  # fuel of one turn, call, filter or operator; a character costs 1
MAX_BITS = 2**12  # of an integer
MAX_INDENT = 16
UNSIZED = 2**16  # what an iterator of unknown length is taken to hold; jinja's range ends below twice this

_WIDE_PERCENT = re.compile(r"%[^a-zA-Z%]*(\*|\d{4})")
_WIDE_BRACES = re.compile(r"\{[^{}]*:[^{}]*(\{|\d{4})")

# Filters that turn a structure into text; others leave it as it is.
_PRINTING = frozenset(
    (
        *("capitalize", "center", "e", "escape", "forceescape", "format", "indent", "join", "lower", "pprint"),
        *("replace", "safe", "string", "striptags", "title", "tojson", "trim", "truncate", "upper", "urlencode"),
        *("wordcount", "wordwrap", "xmlattr"),
    )
)
_TURNS, _JOINED = "each turn", "joined parts"  # names that a template cannot write


class Fuel:
    """What is left for one rendering."""

    __slots__ = ("_clock", "_deadline", "_left")

    def __init__(self, limits: Limits, clock: Callable[[], float]) -> None:
        self._left = limits.fuel
        self._clock = clock
        self._deadline = clock() + limits.seconds

    def burn(self, amount: int) -> None:
        self._left -= amount
        if self._left < 0:
            raise Exhausted("does too much")
        if self._clock() > self._deadline:
            raise Exhausted("takes too long")

    def burn_for(self, made: object) -> None:
        """Pay for a step and what it made."""
        self.burn(STEP + len(made) if isinstance(made, str | bytes | list | tuple | Mapping) else STEP)

    def burn_for_printing(self, value: object) -> None:
        """Pay for a structure's text. A structure that holds another twice prints it twice."""
        if not isinstance(value, str):
            self.burn(_printed_size(value, {}))


def _printed_size(value: object, known: dict[int, int]) -> int:
    parts: Iterable[Any]
    match value:
        case str() | bytes():
            return len(value)
        case Mapping():
            parts = (part for pair in value.items() for part in pair)
        case list() | tuple() | ValuesView() | KeysView() | ItemsView():
            parts = value
        case Namespace():
            raise SecurityError("prints a namespace")
        case _:
            return STEP
    if id(value) not in known:
        known[id(value)] = STEP + sum(_printed_size(part, known) for part in parts)
    return known[id(value)]


def _size(value: object) -> int:
    return len(value) if isinstance(value, Sized) else UNSIZED


def _foreseen(name: str, value: object, arguments: Iterable[object]) -> int:
    """How much a filter or a method of a string may make out of `value` at most."""
    match name, [value, *arguments]:
        case "replace", [str(text), str(old), str(new), *_]:
            return text.count(old) * len(new)
        case "join", [items, str(between), *_] if not isinstance(items, str):
            return _size(items) * len(between)
        case "format", [str(form), *_] if _WIDE_PERCENT.search(form):
            raise SecurityError("formats too wide a field")
        case _, [_, *rest]:
            widest = max((abs(number) for number in rest if isinstance(number, int)), default=0)
            return widest * _size(value) if isinstance(value, str | bytes | list | tuple) else widest
    return 0


class _Context(Context):
    """One rendering's variables, with its fuel."""

    def __init__(self, environment: Sandbox, *args: Any, **kwargs: Any) -> None:
        super().__init__(environment, *args, **kwargs)
        self.fuel = environment.fuel()

    def derived(self, locals: dict[str, Any] | None = None) -> Context:
        context = super().derived(locals)
        assert isinstance(context, _Context)
        context.fuel = self.fuel
        return context


class _Turns:
    """What a loop goes through, each turn paid for."""

    def __init__(self, fuel: Fuel, items: Any, cost: int) -> None:
        self._fuel, self._items, self._cost = fuel, items, cost

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[object]:
        for item in self._items:
            self._fuel.burn(self._cost)
            yield item


@pass_context
def _turns(context: _Context, items: Any, literal: int) -> _Turns:
    return _Turns(context.fuel, items, STEP + literal)


@pass_context
def _joined(context: _Context, parts: list[object]) -> str:
    for part in parts:
        context.fuel.burn_for_printing(part)
    text = [str(part) for part in parts]
    context.fuel.burn(STEP + sum(map(len, text)))
    return "".join(text)


@pass_context
def _output(context: _Context, value: object) -> object:
    context.fuel.burn_for_printing(value)
    context.fuel.burn_for(value)
    return value


def _metered(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a filter pay, and go on giving it the argument that jinja passes to it first."""
    wanted = getattr(getattr(function, "jinja_pass_arg", None), "name", None)

    @wraps(function)
    def pay(context: _Context, value: Any = None, *args: Any, **kwargs: Any) -> Any:
        if name in _PRINTING:
            for argument in (value, *args):
                context.fuel.burn_for_printing(argument)
        context.fuel.burn(_foreseen(name, value, (*args, *kwargs.values())))
        made = function(*first(context), value, *args, **kwargs)
        context.fuel.burn_for(made)
        return made

    def first(context: _Context) -> tuple[object, ...]:
        match wanted:
            case "context":
                return (context,)
            case "eval_context":
                return (context.eval_ctx,)
            case "environment":
                return (context.environment,)
        return ()

    return pass_context(pay)


class _Meter(NodeTransformer):
    """Rewrite what jinja would compile to unmetered code."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802 (jinja's name)
        literal = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, _TURNS, [nodes.Const(literal)], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:  # noqa: N802 (jinja's name)
        self.generic_visit(node)
        parts = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(parts, _JOINED, [], [], None, None, lineno=node.lineno)


class _Generation(Extension):
    """`{% generation %}`: marks for training what the assistant says; here it only groups."""

    tags = {"generation"}  # noqa: RUF012 (jinja's name and type)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: jinja's own filter escapes HTML."""
    if (indent if isinstance(indent, int) else len(indent or "")) > MAX_INDENT:
        raise SecurityError(f"indents JSON by more than {MAX_INDENT}")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> None:
    raise TemplateError(str(message))


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment that chat templates are written for: transformers' options, filters and functions."""

    context_class = _Context
    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self, limits: Limits = Limits(), clock: Callable[[], float] = time.monotonic) -> None:  # noqa: B008 (immutable)
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], finalize=_output)
        self._limits = limits
        self._clock = clock
        self.filters["tojson"] = _tojson
        del self.filters["urlize"], self.globals["lipsum"]  # costly, and of no use to a prompt
        self.filters = {name: _metered(name, function) for name, function in self.filters.items()}
        self.filters |= {_TURNS: _turns, _JOINED: _joined}
        self.globals["raise_exception"] = _raise_exception

    def fuel(self, limits: Limits | None = None) -> Fuel:
        return Fuel(limits or self._limits, self._clock)

    def run(self, template: Template, variables: Mapping[str, Any], limits: Limits) -> Iterator[str]:
        """Yield what a template writes. Raises whatever its code raises; Exhausted at a limit."""
        context = template.new_context(dict(variables))
        assert isinstance(context, _Context)
        context.fuel = self.fuel(limits)
        room = limits.output_characters
        for part in template.root_render_func(context):
            room -= len(part)
            if room < 0:
                raise Exhausted(f"writes a prompt of more than {limits.output_characters} characters")
            yield part

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_Meter().visit(source), *args, **kwargs)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str | bytes) and attr in ("translate", "maketrans", "expandtabs"):
            return False  # can make much out of little in ways that are not foreseen
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None and _WIDE_BRACES.search(value.__self__):
            raise SecurityError("formats too wide a field")
        return wrapped

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        assert isinstance(context, _Context)
        fuel = context.fuel
        match operator, left, right:
            case ("*", int(), int()) if left.bit_length() + right.bit_length() > MAX_BITS:
                raise SecurityError("computes too large a number")
            case ("**", int(), int()) if left.bit_length() * abs(right) > MAX_BITS:
                raise SecurityError("computes too large a number")
            case ("*", int(times), Sized() as repeated) | ("*", Sized() as repeated, int(times)):
                fuel.burn(max(0, times) * len(repeated))
            case ("%", str(), _):
                fuel.burn_for_printing((right,))
                fuel.burn(_foreseen("format", left, ()))
        made = super().call_binop(context, operator, left, right)
        fuel.burn_for(made)
        return made

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        assert isinstance(__context, _Context)
        fuel = __context.fuel
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(__obj, LoopContext) and args:
            args = (_Turns(fuel, args[0], STEP), *args[1:])
        elif isinstance(owner, str | bytes):
            value, *given = (*args, owner) if name == "join" and args else (owner, *args)
            fuel.burn(_foreseen(name, value, given))
        elif name in ("format", "format_map"):
            fuel.burn_for_printing((*args, kwargs))
        made = super().call(__context, __obj, *args, **kwargs)
        fuel.burn_for(made)
        return made
