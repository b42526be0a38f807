"""What the tests of one syntax need to know of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tests.text.transcripts import Message

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Write = Callable[[Sequence[tuple[str, str]]], str]


class Family(NamedTuple):
    """The tests of one syntax.

    transcripts  answers and the messages expected, by a few words that say what is special
    templates    published templates (`templates.published`) for which "auto" chooses the syntax; random calls that they
                 write are read back
    schemas      JSON text of the schemas of the tools offered, by name
    lossy        templates that lose some values of random calls, with the reason; their calls hold texts alone
    """

    transcripts: Mapping[str, tuple[str, Message]]
    templates: tuple[str, ...] = ()
    schemas: Mapping[str, bytes] = {}
    lossy: Mapping[str, str] = {}


PARIS, ROME, NOW = ("weather", '{"city": "Paris"}'), ("weather", '{"city": "Rome"}'), ("now", "{}")
ODD = r'{"a": "}]\"\\</x>[", "b": [{"c": "é🙂"}, []], "d": {}, "e": "7", "f": -1.5e3, "g": null}'


def standard(write: Write, *, marks: Sequence[str], bare: bool = False) -> dict[str, tuple[str, Message]]:
    """Return transcripts of a syntax whose arguments are JSON, as the model writes it.

    write  writes calls: names and arguments
    marks  marks of the syntax, which strings of arguments may hold
    bare   whether a call can only be the beginning of the answer
    """
    held = '{"a": "' + " ".join(mark.replace('"', '\\"').replace("\n", "\\n") for mark in marks) + '"}'
    cut = write([("f", '{"a": "bcd"}')])
    found = {
        "nothing but text": ("Four < five | [six].", Message("Four < five | [six].")),
        "one call": (write([PARIS]), Message(calls=(PARIS,))),
        "two calls": (write([PARIS, ROME]), Message(calls=(PARIS, ROME))),
        "a call without arguments, then another": (write([NOW, PARIS]), Message(calls=(NOW, PARIS))),
        "arguments of every kind": (write([("f", ODD)]), Message(calls=(("f", ODD),))),
        "marks within a text": (write([("f", held), NOW]), Message(calls=(("f", held), NOW))),
        "a text after the call": (write([PARIS]) + "\nDone.", Message("Done.", calls=(PARIS,))),
        "cut within the arguments": (cut[: cut.index("bcd") + 1], Message(calls=(("f", '{"a": "b'),))),
        "cut at the name": (cut[: cut.index("f")], Message(cut[: cut.index("f")])),
        "space before the call": (f" \n{write([PARIS])}", Message(calls=(PARIS,))),
    }
    if not bare:
        found["a text before two calls"] = (
            f"Let me see.\n{write([PARIS, NOW])}",
            Message("Let me see.", calls=(PARIS, NOW)),
        )
    return found
