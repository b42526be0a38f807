"""The families that write calls in braces, with marks around strings."""

from __future__ import annotations

import json

from tests.text.syntaxes.family import NOW, PARIS, ROME, Family
from tests.text.transcripts import Message

LONG = "x" * 300


def transcripts(opening: str, closing: str, quote: str) -> dict[str, tuple[str, Message]]:
    def call(name: str, arguments: str) -> str:
        return f"{opening}call:{name}{{{arguments}}}{closing}"

    def text(content: str) -> str:
        return f"{quote}{content}{quote}"

    paris, rome = call("weather", f"city:{text('Paris')}"), call("weather", f"city:{text('Rome')}")
    every = f"a:{text('}],:{')},b:[{{c:{text('é🙂')}}},[],],d:{{}},e:-1.5e3,f:true,g:None,h: a b ,{text('i')}:7"
    read = '{"a": "}],:{", "b": [{"c": "é🙂"}, []], "d": {}, "e": -1.5e3, "f": true, "g": null, "h": "a b", "i": 7}'
    held = f'{opening} {closing} " \\ \n <| {quote[:-1]} call:f{{'
    return {
        "nothing but text": ("Four < five | {six}.", Message("Four < five | {six}.")),
        "one call": (paris, Message(calls=(PARIS,))),
        "no arguments, then more": (f"{call('now', '')}\n{rome}", Message(calls=(NOW, ROME))),
        "text around calls": (f"Hm.\n{paris}{rome}\nDone.", Message("Hm.\nDone.", calls=(PARIS, ROME))),
        "arguments of every kind": (call("f", every), Message(calls=(("f", read),))),
        "marks within a text": (
            call("f", f"a:{text(held)},b:1"),
            Message(calls=(("f", f'{{"a": {json.dumps(held)}, "b": 1}}'),)),
        ),
        "JSON": (
            call("f", '"a": {"b": ["c\\"\\u00e9", true]}, d: "x"'),
            Message(calls=(("f", '{"a": {"b": ["c\\"\\u00e9", true]}, "d": "x"}'),)),
        ),
        "a word of 300 letters": (call("f", f"a:{LONG},b:1"), Message(calls=(("f", f'{{"a": "{LONG}", "b": 1}}'),))),
        "no brace at the end": (
            f"{opening}call:f{{a:[1,2{closing}Done.",
            Message("Done.", calls=(("f", '{"a": [1, 2]}'),)),
        ),
        "no mark at the end": (f"{opening}call:f{{a:1}} Done.", Message("Done.", calls=(("f", '{"a": 1}'),))),
        "no call": (f"{opening}f{{a:1}}", Message(f"{opening}f{{a:1}}")),
        "cut within a text": (f"{opening}call:f{{a:{quote}bc", Message(calls=(("f", '{"a": "bc'),))),
        "cut within a number": (f"{opening}call:f{{a:1,b:[2,3", Message(calls=(("f", '{"a": 1, "b": [2, 3'),))),
        "cut within the name": (f"{opening}call:wea", Message(f"{opening}call:wea")),
    }


FAMILIES = {
    "gemma4": Family(
        transcripts("<|tool_call>", "<tool_call|>", '<|"|>'),
        templates=(*("llama.cpp/google-gemma-4-31B-it", "llama.cpp/google-gemma-4-31B-it-interleaved", "vllm/gemma4"),),
    ),
    "functiongemma": Family(
        transcripts("<start_function_call>", "<end_function_call>", "<escape>"),
        templates=("vllm/functiongemma",),
        lossy={"vllm/functiongemma": "the template writes every value as Python prints it"},
    ),
}
