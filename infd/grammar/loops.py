"""Write a rule that refers to itself at one end only as a repetition, which needs no recursion."""

from __future__ import annotations

from typing import TYPE_CHECKING

from infd.grammar.rules import (
    EMPTY,
    Alternatives,
    Reference,
    Repeated,
    Sequence,
    alternatives,
    references,
    sequence,
)

if TYPE_CHECKING:
    from infd.grammar.rules import Expression


def without_loops(name: str, expression: Expression) -> Expression:
    """Return an equivalent expression of a rule, without recursion if the rule refers to itself only at one end.

    `x ::= a x | b` becomes `a* b`, and `x ::= x a | b` becomes `b a*`.
    """
    if name not in references(expression):
        return expression
    for last in (True, False):
        if (found := _beside(name, expression, last=last)) is not None:
            loops, others = found
            if loops and others:
                loop, once = Repeated(alternatives(loops), 0, None), alternatives(others)
                return sequence((loop, once) if last else (once, loop))
    return expression


def _beside(name: str, expression: Expression, *, last: bool) -> tuple[list[Expression], list[Expression]] | None:
    """Split the options of a rule: the rest of those that end or begin with the rule itself, and the other options.

    last  whether the options end with the rule

    None: the rule occurs elsewhere too.
    """
    if name not in references(expression):
        return [], [expression]
    match expression:
        case Reference():
            return [EMPTY], []
        case Alternatives(options):
            several = [_beside(name, option, last=last) for option in options]
            found = [each for each in several if each is not None]
            if len(found) < len(several):
                return None
            return [one for each in found for one in each[0]], [one for each in found for one in each[1]]
        case Repeated(item, 0, 1) if (found_one := _beside(name, item, last=last)) is not None:
            return found_one[0], [*found_one[1], EMPTY]
        case Sequence(items):
            beside, end = (items[:-1], items[-1]) if last else (items[1:], items[0])
            if any(name in references(each) for each in beside):
                return None
            if (found_end := _beside(name, end, last=last)) is None:
                return None
            loops, others = (
                [sequence((*beside, each) if last else (each, *beside)) for each in some] for some in found_end
            )
            return loops, others
    return None
