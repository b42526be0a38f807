"""Run a stranger's template within bounds.

A chat template comes with the model file. Jinja's immutable sandbox keeps it
from reaching Python; this module keeps it from taking the process's time and
memory. Everything that a template does costs fuel: a turn of a loop, a call, a
filter, an operator, each byte that these make. A step whose cost depends on its
operands (comparing, searching, sorting, printing, repeating) is paid for before
it runs. A structure that holds another one twice is walked twice, and so it
counts twice. The count is the same on every machine; a deadline backs it up,
looked at whenever a few thousand units are burnt.

Fuel covers what `vetting.templates` lets through: only such templates run in
the daemon's process. Whatever else jinja can do runs here too, but in a worker
that can be killed.
"""

from __future__ import annotations

import json
import operator
import re
import sys
import time
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, Sized, ValuesView
from functools import wraps
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final

from jinja2 import TemplateError, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.runtime import Context, LoopContext, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer
from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Iterable

    from jinja2 import Template
    from jinja2.parser import Parser


class Exhausted(TemplateError):
    """The template wants more than it may have; the message follows the template's name."""


class Limits(Struct, frozen=True, kw_only=True):
    """What one rendering may use.

    A legitimate prompt is bounded by the request's body, and its text passes through a few filters.
    """

    output_characters: int = 32 * 2**20
    fuel: int = 192 * 2**20
    seconds: float = 5.0


# What the event loop can spare: many times what a short chat takes, and less than a step.
BRIEF = Limits(output_characters=2**16, fuel=2**18, seconds=0.005)

STEP: Final = 64  # fuel of one turn, call, filter or operator; a byte that is made costs 1
NODE: Final = 8  # of anything else that a body may do, once a turn
LOOK: Final = 2**11  # fuel between two looks at the clock
MAX_BITS: Final = 2**12  # of an integer
MAX_INDENT: Final = 16
UNSIZED: Final = 2**16  # what an iterator of unknown length is taken to hold; jinja's range ends below twice this
SPLIT: Final = 20  # bytes that a character takes at most once its text is split
STRFTIME: Final = 256  # characters that one of a format becomes at most

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
# Filters that compare or hash items with one another.
_SORTING = frozenset(("dictsort", "groupby", "max", "min", "sort", "unique"))
_SEARCHED_BACKWARDS = frozenset(("rfind", "rindex", "rpartition", "rsplit"))  # in time of text times word
_STRIPPED = frozenset(("lstrip", "rstrip", "strip", "trim"))
# Names that a template cannot write
_TURNS, _JOINED, _MADE, _BODY, _COMPARED, _SUBTRACTED, _KEY = (
    *("each turn", "joined parts", "what was made", "each call", "compared", "subtracted", "a key"),
)
# Make much out of little in ways that are not foreseen, or hash what they are given
_REFUSED_METHODS = frozenset(("translate", "maketrans", "expandtabs", "fromkeys", "isdisjoint"))
_SCALARS = (str, int, float, bool, type(None))

_COMPARISONS: Final[Mapping[str, Callable[[Any, Any], Any]]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "gt": operator.gt,
    "gteq": operator.ge,
    "lt": operator.lt,
    "lteq": operator.le,
    "in": lambda left, right: left in right,
    "notin": lambda left, right: left not in right,
}
# jinja's tests that compare; "in" is one of them
_COMPARING_TESTS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("==", "eq", "equalto"), "eq"),
    **dict.fromkeys(("!=", "ne"), "ne"),
    **dict.fromkeys((">", "gt", "greaterthan"), "gt"),
    **dict.fromkeys((">=", "ge"), "gteq"),
    **dict.fromkeys(("<", "lt", "lessthan"), "lt"),
    **dict.fromkeys(("<=", "le"), "lteq"),
    "in": "in",
}


class Fuel:
    """What is left for one rendering."""

    __slots__ = ("_clock", "_deadline", "_left", "_look")

    def __init__(self, limits: Limits, clock: Callable[[], float]) -> None:
        self._left = limits.fuel
        self._look = self._left - LOOK  # the clock is looked at below
        self._clock = clock
        self._deadline = clock() + limits.seconds

    def burn(self, amount: int) -> None:
        left = self._left = self._left - amount
        if left < self._look:
            self._look_at_the_clock()

    def burn_for(self, made: object) -> None:
        """Pay for a step and what it made, which takes at least as much memory."""
        self.burn(STEP + _bytes(made))

    def burn_for_printing(self, value: object) -> None:
        """Pay for a structure's text. A structure that holds another twice prints it twice."""
        if type(value) is not str:
            self.burn(_walked(value, {}))

    def _look_at_the_clock(self) -> None:
        self._look = max(0, self._left - LOOK)
        if self._left < 0:
            raise Exhausted("does too much")
        if self._clock() > self._deadline:
            raise Exhausted("takes too long")


def _bytes(made: object) -> int:
    match made:
        case str():
            return len(made) if made.isascii() else sys.getsizeof(made)
        case bytes() | list() | tuple() | Mapping():
            return sys.getsizeof(made)
    return 0


def _walked(value: object, known: dict[int, int]) -> int:
    """Return what it costs to go through a structure: to print it, to compare it or to hash it."""
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
        known[id(value)] = STEP + sum(_walked(part, known) for part in parts)
    return known[id(value)]


def _lines(value: object, known: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """Return how many lines a structure is when it is indented, and how deep."""
    parts: Iterable[Any]
    match value:
        case Mapping():
            parts = value.values()
        case list() | tuple():
            parts = value
        case _:
            return 1, 1
    if id(value) not in known:
        inner = [_lines(part, known) for part in parts]
        known[id(value)] = 2 + sum(lines for lines, _ in inner), 1 + max((depth for _, depth in inner), default=0)
    return known[id(value)]


def _size(value: object) -> int:
    return len(value) if isinstance(value, Sized) else UNSIZED


def _foreseen(name: str, value: object, arguments: tuple[object, ...]) -> int:
    """How much a filter or a method of a string may make out of `value` at most, or how long it may search."""
    match name, [value, *arguments]:
        case "replace", [str(text), str(old), str(new), *_]:
            return len(text) + text.count(old) * len(new)
        case "join", [items, str(between), *_] if not isinstance(items, str):
            return _size(items) * len(between)
        case "format", [str(form), *_] if _WIDE_PERCENT.search(form):
            raise SecurityError("formats too wide a field")
        case "split", [str(text), str(between), *_]:
            return STEP * text.count(between) if between else 0
        case "rsplit", [str(text), str(between), *_]:
            return len(text) * len(between) + STEP * text.count(between) if between else 0
        case "split" | "rsplit" | "splitlines", [str(text), *_]:
            return SPLIT * len(text)
        case _, [str(text), str(word), *_] if name in _SEARCHED_BACKWARDS or name in _STRIPPED:
            return len(text) * max(1, len(word))
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


def _paid(fuel: Fuel, items: Iterator[object]) -> Iterator[object]:
    """Pay for what a lazy filter makes, wherever it is taken."""
    for item in items:
        fuel.burn_for(item)
        yield item


# What the meter puts around pieces of a template


@pass_context
def _turns(context: _Context, items: Any, body: int) -> _Turns:
    return _Turns(context.fuel, items, STEP + body)


@pass_context
def _joined(context: _Context, parts: list[object]) -> str:
    fuel = context.fuel
    for part in parts:
        fuel.burn_for_printing(part)
    text = [str(part) for part in parts]
    fuel.burn(STEP + sum(map(len, text)))
    return "".join(text)


@pass_context
def _made(context: _Context, value: object) -> object:
    context.fuel.burn_for(value)
    return value


@pass_context
def _body(context: _Context, nothing: str, cost: int) -> str:
    context.fuel.burn(cost)
    return nothing


@pass_context
def _output(context: _Context, value: object) -> object:
    if type(value) is str:
        context.fuel.burn(STEP + len(value))
    else:
        context.fuel.burn(STEP + _walked(value, {}))
    return value


@pass_context
def _compared(context: _Context, left: Any, right: Any, how: str) -> Any:
    if how in ("in", "notin"):
        return _COMPARISONS[how](left, _searchable(context.fuel, left, right))
    _pay_to_compare(context.fuel, left, right)
    return _COMPARISONS[how](left, right)


@pass_context
def _subtracted(context: _Context, left: Any, right: Any) -> Any:
    if not isinstance(left, int | float) or not isinstance(right, int | float):  # views of mappings are sets
        context.fuel.burn(_walked(left, {}) + _walked(right, {}))
    return left - right


@pass_context
def _key(context: _Context, key: object) -> object:
    """Pay to hash a subscript."""
    if not isinstance(key, _SCALARS):
        context.fuel.burn(_walked(key, {}))
    return key


def _pay_to_compare(fuel: Fuel, left: object, right: object) -> None:
    """A comparison goes through both, at most as far as the shorter one."""
    if isinstance(left, _SCALARS) or isinstance(right, _SCALARS):
        both_text = isinstance(left, str) and isinstance(right, str)
        fuel.burn(STEP + (min(len(left), len(right)) if both_text else 0))  # type: ignore[arg-type]
    elif isinstance(left, Sized) and isinstance(right, Sized):
        fuel.burn(_walked(left, {}))


def _searchable(fuel: Fuel, item: object, items: Any) -> Any:
    """Pay to look for an item. An iterator is used up, and so becomes a list."""
    match items:
        case str() | bytes():
            fuel.burn(STEP + len(items))
        case Mapping() | KeysView():
            fuel.burn(STEP if isinstance(item, str) else _walked(item, {}))
        case list() | tuple() if type(item) is str:
            fuel.burn(STEP + len(items) * (8 + len(item) // 16))
        case list() | tuple() | ValuesView() | ItemsView():
            fuel.burn(_walked(item, {}) + _walked(items, {}))
        case range():
            fuel.burn(STEP if type(item) is int else STEP * len(items))
        case Iterator():
            items = list(items)
            fuel.burn(_walked(item, {}) + _walked(items, {}))
    return items


def _metered_test(how: str) -> Callable[..., Any]:
    @pass_context
    def test(context: _Context, left: Any, right: Any) -> Any:
        return _compared(context, left, right, how)

    return test


def _parity(remainder: int) -> Callable[[Any], bool]:
    def test(value: Any) -> bool:
        if not isinstance(value, int | float):  # of a text this would be formatting
            raise SecurityError("asks whether something that is no number is odd")
        return value % 2 == remainder

    return test


def _metered(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a filter pay, and go on giving it the argument that jinja passes to it first."""
    wanted = getattr(getattr(function, "jinja_pass_arg", None), "name", None)
    printing, sorting, foreseen = name in _PRINTING, name in _SORTING, name not in ("default", "d")

    @wraps(function)
    def pay(context: _Context, value: Any = None, *args: Any, **kwargs: Any) -> Any:
        fuel = context.fuel
        if name == "list":
            value = list(value) if isinstance(value, Iterator) else value
            fuel.burn(_size(value) * (8 if isinstance(value, list | tuple) else STEP))
        elif type(value) is str and not (args or kwargs):
            fuel.burn(len(value))
        else:
            if isinstance(value, Iterator) and (sorting or name in ("join", "sum")):
                value = list(value)
            if printing:
                for argument in (value, *args, *kwargs.values()):
                    fuel.burn_for_printing(argument)
            elif sorting:
                fuel.burn(_walked(value, {}) * (1 + _size(value).bit_length()))
            if foreseen:
                fuel.burn(_foreseen(name, value, (*args, *kwargs.values())))
            if name == "tojson" and (args or kwargs):
                lines, depth = _lines(value, {})
                fuel.burn(lines * depth)
        made = function(*first(context), value, *args, **kwargs)
        if isinstance(made, Iterator):
            made = _paid(fuel, made)
        fuel.burn(STEP + _bytes(made))
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


def _around(name: str, inner: nodes.Node | None, *arguments: nodes.Expr, lineno: int) -> nodes.Filter:
    return nodes.Filter(inner, name, list(arguments), [], None, None, lineno=lineno)


class _Meter(NodeTransformer):
    """Rewrite what jinja would compile to unmetered code.

    A comparison for equality with a constant stays as it is: it ends after as many characters as that has.
    """

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802 (jinja's name)
        cost = _written(node)
        self.generic_visit(node)
        node.iter = _around(_TURNS, node.iter, nodes.Const(cost), lineno=node.lineno)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Macro:  # noqa: N802
        cost = _written(node)
        self.generic_visit(node)
        pays = _around(_BODY, nodes.Const(""), nodes.Const(cost), lineno=node.lineno)
        node.body = [nodes.Output([pays], lineno=node.lineno), *node.body]
        return node

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.AssignBlock:  # noqa: N802
        self.generic_visit(node)
        node.filter = _around(_MADE, node.filter, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:  # noqa: N802
        self.generic_visit(node)
        return _around(_JOINED, nodes.List(node.nodes, lineno=node.lineno), lineno=node.lineno)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Expr:  # noqa: N802
        left, how, right = node.expr, node.ops[0].op, node.ops[0].expr
        if len(node.ops) > 1:
            cheap = False
        elif how in ("in", "notin"):
            cheap = _constant(right)
        elif how in ("eq", "ne"):
            cheap = isinstance(left, nodes.Const) or isinstance(right, nodes.Const)
        else:
            cheap = isinstance(right, nodes.Const) and isinstance(right.value, int | float)
        if cheap:
            node.expr = self.visit(left)
            node.ops[0].expr = right if _constant(right) else self.visit(right)
            return node
        self.generic_visit(node)
        if len(node.ops) > 1:  # which no template has that runs in this process
            return node
        left, right = node.expr, node.ops[0].expr
        return _around(_COMPARED, left, right, nodes.Const(how), lineno=node.lineno)

    def visit_Sub(self, node: nodes.Sub) -> nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        if isinstance(node.left, nodes.Const) or isinstance(node.right, nodes.Const):
            return node
        return _around(_SUBTRACTED, node.left, node.right, lineno=node.lineno)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            return _around(_MADE, node, lineno=node.lineno)
        if not isinstance(node.arg, nodes.Const | nodes.Neg) and node.ctx == "load":
            node.arg = _around(_KEY, node.arg, lineno=node.lineno)
        return node

    def visit_List(self, node: nodes.List) -> nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        return _around(_MADE, node, lineno=node.lineno) if node.items else node

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        if node.ctx != "load" or _constant(node):
            return node
        return _around(_MADE, node, lineno=node.lineno)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        for pair in node.items:
            if not isinstance(pair.key, nodes.Const):
                pair.key = _around(_KEY, pair.key, lineno=node.lineno)
        return _around(_MADE, node, lineno=node.lineno)


def _written(node: nodes.Node) -> int:
    """Return the literal text in a body and the steps that it may take, inner loops included."""
    cost = 0
    for inner in node.find_all(nodes.Node):
        cost += len(inner.data) if isinstance(inner, nodes.TemplateData) else NODE
    return cost


def _constant(node: nodes.Expr) -> bool:
    match node:
        case nodes.Const():
            return True
        case nodes.List() | nodes.Tuple():
            return all(isinstance(item, nodes.Const) for item in node.items)
    return False


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
        self.filters |= {_TURNS: _turns, _JOINED: _joined, _MADE: _made, _BODY: _body, _COMPARED: _compared}
        self.filters |= {_SUBTRACTED: _subtracted, _KEY: _key}
        self.tests |= {name: _metered_test(how) for name, how in _COMPARING_TESTS.items() if name in self.tests}
        self.tests |= {"odd": _parity(1), "even": _parity(0)}
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
        if type(obj) is Namespace or type(obj) is LoopContext:
            return not attr.startswith("_")  # as jinja finds out in many steps
        if attr in _REFUSED_METHODS and not isinstance(obj, Undefined):
            return False
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
            case "+", int() | float(), int() | float():
                pass
            case "+", _, _:
                fuel.burn(_bytes(left) + _bytes(right))
            case ("*", int(), int()) if left.bit_length() + right.bit_length() > MAX_BITS:
                raise SecurityError("computes too large a number")
            case ("**", int(), int()) if left.bit_length() * abs(right) > MAX_BITS:
                raise SecurityError("computes too large a number")
            case ("*", int(times), Sized() as repeated) | ("*", Sized() as repeated, int(times)):
                fuel.burn(max(0, times) * _bytes(repeated))
            case ("%", str(), _):
                named = left.count("%(") if isinstance(right, Mapping) else 1
                fuel.burn(len(left) + max(1, named) * _walked((right,), {}))
                fuel.burn(_foreseen("format", left, ()))
        made = super().call_binop(context, operator, left, right)
        fuel.burn_for(made)
        return made

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        assert isinstance(__context, _Context)
        fuel = __context.fuel
        owner = getattr(__obj, "__self__", None)
        if owner is not None:
            _pay_to_call(fuel, owner, getattr(__obj, "__name__", ""), args, kwargs)
        elif isinstance(__obj, LoopContext):
            if args:
                args = (_Turns(fuel, args[0], STEP), *args[1:])
        elif __obj is dict or __obj is Namespace:
            for argument in args:
                if not isinstance(argument, Mapping | list | tuple):
                    raise SecurityError("makes a mapping of something that is none")
                fuel.burn(_walked(argument, {}))
        elif isinstance(__obj, FunctionType):  # strftime_now, raise_exception
            fuel.burn((1 if __obj is _raise_exception else STRFTIME) * _walked((args, kwargs), {}))
        made = super().call(__context, __obj, *args, **kwargs)
        fuel.burn_for(made)
        return made


def _pay_to_call(fuel: Fuel, owner: object, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Pay for a method before it runs."""
    match owner:
        case str() | bytes():
            if name in ("format", "format_map"):
                fuel.burn((len(owner) + owner.count("{")) * _walked((args, kwargs), {}))  # type: ignore[arg-type]
                return
            value, *given = (*args, owner) if name == "join" and args else (owner, *args)
            if name == "join" and not isinstance(value, Mapping | list | tuple | str | Iterator):
                fuel.burn_for_printing(value)
            fuel.burn(len(owner) + _foreseen(name, value, (*given, *kwargs.values())))
            for argument in args:
                fuel.burn_for_printing(argument)
        case list() | tuple() | ValuesView() | ItemsView() | KeysView():
            fuel.burn(_walked(owner, {}) + _walked(args, {}))
        case LoopContext() if name == "changed":
            fuel.burn(_walked(args, {}))
        case Mapping():
            fuel.burn(sum(STEP if isinstance(key, _SCALARS) else _walked(key, {}) for key in args[:1]))
            if name == "copy":
                fuel.burn(_bytes(owner))
