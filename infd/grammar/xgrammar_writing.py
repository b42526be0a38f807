"""Write a constraint as the text of one grammar of xgrammar.

This module parses schemas and regular expressions of clients. Parsing holds the GIL, so the daemon runs this module in
another process, see `xgrammar_trial`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from infd.errors import GrammarFailed
from infd.grammar import constraint_rules, gbnf, rules
from infd.grammar.rules import ROOT, Reference, Repeated, Sequence, Text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from infd.constraint import Constraint
    from infd.grammar.protocol import Limits

_TEXT_BYTES: Final = 2**20  # most bytes of a written grammar


def write(constraint: Constraint, limits: Limits, marks: Mapping[str, int], *, drop_space: bool) -> str:
    """Return the text of a constraint's grammar. Raises GrammarFailed.

    marks       mark -> token id, for those marks of the constraint that a single token spells
    drop_space  whether the decoder drops a space that begins the answer
    """
    found = constraint_rules.write(constraint, limits, marks.get)
    if drop_space:
        # The decoder drops the space that begins an answer: the tokens of " x" decode to "x". So if the constraint
        # allows a leading space, the grammar requires one space before the answer; otherwise the space is optional.
        least = int(rules.begins(found, ord(" ")))
        answer = found.pop(ROOT)
        found = {ROOT: Sequence((Repeated(Text(" "), least, 1), Reference("answer"))), "answer": answer, **found}
    text = gbnf.write(found)
    if len(text) > _TEXT_BYTES:
        raise GrammarFailed(f"{len(text):,} bytes of grammar; at most {_TEXT_BYTES:,}", code="grammar_too_large")
    return text
