"""What the tests of one syntax need to know of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.text.transcripts import Message


class Family(NamedTuple):
    """The tests of one syntax.

    transcripts  answers and the messages expected, by a few words that say what is special
    templates    published templates (`templates.published`) for which "auto" chooses the syntax
    schemas      JSON text of the schemas of the tools offered, by name
    written      published templates that need this syntax by name, because "auto" cannot tell it from another
    ends         what templates write after the calls of a turn; removed before the turn is read back
    plain        whether `written` calls must be of plain JSON: templates that lose some values, with the reason
    """

    transcripts: Mapping[str, tuple[str, Message]]
    templates: tuple[str, ...] = ()
    schemas: Mapping[str, bytes] = {}
    written: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    plain: str = ""
