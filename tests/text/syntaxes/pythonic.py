"""The families that write calls as calls of Python."""

from __future__ import annotations

from tests.text.syntaxes.family import Family
from tests.text.transcripts import Message

LONG = "1" * 300
PARIS, NOW = ("weather", '{"city": "Paris"}'), ("now", "{}")
ODD = (
    """f(a="}])\\\\", b=[{'c': 'é🙂', 'd': ()}, [], (1, 'x',)], e={}, g='7', h=-1.5e3, i=None, j=True, k={1: False}, """
    """l='it\\'s', m="two\\nlines\\u00e9\\x41\\q", n=bare)"""
)
READ = (
    '{"a": "}])\\\\", "b": [{"c": "é🙂", "d": []}, [], [1, "x"]], "e": {}, "g": "7", "h": -1.5e3, '
    '"i": null, "j": true, "k": {"1": false}, "l": "it\'s", "m": "two\\nlineséA\\\\q", "n": "bare"}'
)


def transcripts(begin: str, between: str, end: str, *, bare: bool = False) -> dict[str, tuple[str, Message]]:
    found = {
        "nothing but text": ("Four < five | (six).", Message("Four < five | (six).")),
        "one call": (f'{begin}weather(city="Paris"){end}', Message(calls=(PARIS,))),
        "no arguments, then more": (
            f'{begin}now(){between}weather( city = "Paris", ){end}',
            Message(calls=(NOW, PARIS)),
        ),
        "literals of every kind": (f"{begin}{ODD}{end}", Message(calls=(("f", READ),))),
        "a text after the calls": (f"{begin}now(){end}\nDone.", Message("Done.", calls=(NOW,))),
        "no call": (f"{begin}six{end}", Message(f"{begin}six{end}")),
        "no keywords": (f"{begin}f(1){end}", Message(f"{begin}f(1){end}")),
        "cut within a text": (f"{begin}f(a='bc", Message(calls=(("f", '{"a": "bc'),))),
        "cut within a number": (f"{begin}f(a=1, b=2", Message(calls=(("f", '{"a": 1, "b": 2'),))),
        "cut within the name": (f"{begin}wea", Message(f"{begin}wea")),
        "a number of 300 digits": (
            f"{begin}f(a={LONG}, b=[{LONG}], c={LONG}){end}",
            Message(calls=(("f", f'{{"a": "{LONG}", "b": ["{LONG}"], "c": "{LONG}"}}'),)),
        ),
        "escapes of JSON": (
            f'{begin}f(a="\\ud83d\\ude42 \\u00e9\\/", b="\\ud83d"){end}',
            Message(calls=(("f", '{"a": "\\ud83d\\ude42 é/", "b": "\\ud83d"}'),)),
        ),
        "an empty value": (f"{begin}f(a=, b=2){end}", Message(calls=(("f", '{"a": null, "b": 2}'),))),
    }
    if not bare:
        found["a text before the call"] = (f"Hm.\n{begin}now(){end}", Message("Hm.", calls=(NOW,)))
        found["never closed"] = (f"{begin}now()", Message(calls=(NOW,)))
    return found


BARE = transcripts("[", ", ", "]", bare=True) | {
    "a mark": ("Hm. <|python_start|>[now()]<|python_end|>", Message("Hm.", calls=(NOW,))),
    "a list of texts": ('["a", "b"]', Message('["a", "b"]')),
    "a link": ("[link](f(a=1))", Message("[link](f(a=1))")),
}
UNQUOTED = "the template writes texts without quotes"

FAMILIES = {
    "lfm2": Family(
        transcripts("<|tool_call_start|>[", ", ", "]<|tool_call_end|>"),
        templates=("llama.cpp/LFM2.5-8B-A1B",),
        lossy={"llama.cpp/LFM2.5-8B-A1B": "the template does not escape quotes"},
    ),
    "olmo3": Family(transcripts("<function_calls>", "\n", "</function_calls>")),
    "pythonic": Family(
        BARE,
        templates=("vllm/gemma3_pythonic", "vllm/llama4_pythonic", "vllm/llama3.2_pythonic", "vllm/toolace"),
        lossy=dict.fromkeys(
            ("vllm/gemma3_pythonic", "vllm/llama4_pythonic", "vllm/llama3.2_pythonic", "vllm/toolace"), UNQUOTED
        ),
    ),
}
