"""Hostile constraints against a daemon: each is answered or refused, and /readyz and memory stay as they were.

`make test-all` asks 500, `make soak` 2,000.

A seed reproduces the constraints: INFD_HOSTILE_SEED, printed by a failing test. INFD_SOAK=1 also checks times.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.clients import FULL, idle_status, resident_kib
from tests.e2e.test_own_process import DEVICE
from tests.thorough import among

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.e2e.process import Daemon
    from tests.e2e.test_pause import Start

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(1200)]

COUNT = among(500, 500, 2000)
SEED = int(os.environ.get("INFD_HOSTILE_SEED", "18"))
GROWTH_KIB = 512 * 1024
READY_S = 0.25
SLOWEST_S = 30


def nested(depth: int, wrap: Callable[[Any], Any], inner: Any) -> Any:
    for _ in range(depth):
        inner = wrap(inner)
    return inner


def doubling(levels: int) -> str:
    rules = "".join(f"a{level}: a{level + 1} a{level + 1}\n" for level in range(levels))
    return f'start: a0\n{rules}a{levels}: "x"?\n'


def referring(number: int) -> dict[str, Any]:
    """Definitions that refer to each other, all of them nullable."""
    return {
        "$ref": "#/$defs/d0",
        "$defs": {
            f"d{at}": {"anyOf": [{"$ref": f"#/$defs/d{(at + 1) % number}"}, {"$ref": f"#/$defs/d{(at * 7) % number}"}]}
            for at in range(number)
        },
    }


SCHEMAS: tuple[Callable[[random.Random], Any], ...] = (
    lambda rng: {"type": "object", "properties": {f"p{i}": {} for i in range(rng.choice((390, 500, 1001, 5000)))}},
    lambda rng: {"enum": [f"v{i}" for i in range(rng.choice((9_999, 20_000, 200_000)))]},
    lambda rng: {"enum": ["x" * 10_000] * rng.choice((2, 20))},
    lambda rng: {"type": "object", "required": [f"p{i}" for i in range(10_000)]},
    lambda rng: {"$ref": "#"},
    lambda rng: {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]},
    lambda rng: {"allOf": [{"$ref": "#"}, {"type": "object"}]},
    lambda rng: {"not": {"$ref": "#"}},
    lambda rng: {"if": {"$ref": "#"}, "then": {"$ref": "#"}, "else": False},
    lambda rng: referring(rng.choice((2, 50, 500))),
    lambda rng: {
        "$ref": rng.choice(("#/a/b", "#/~2", "http://127.0.0.1:1/x", "file:///etc/passwd", "#x", "", "#/$defs/%"))
    },
    lambda rng: {"$dynamicRef": "#x", "$dynamicAnchor": "x"},
    lambda rng: {"$id": "urn:x", "$ref": "urn:x"},
    lambda rng: nested(rng.choice((20, 63, 100, 400)), lambda inner: {"items": inner}, {}),
    lambda rng: nested(
        rng.choice((5, 20, 60)),
        lambda inner: {"allOf": [inner, inner]} if rng.random() < 0.1 else {"allOf": [inner]},
        {},
    ),
    lambda rng: nested(12, lambda inner: {"anyOf": [inner, {"type": "array", "items": inner}]}, {"type": "null"}),
    lambda rng: nested(9, lambda inner: {"oneOf": [inner, inner, {"const": 1}]}, {"type": "string"}),
    lambda rng: nested(10, lambda inner: {"not": inner}, {"enum": [1, 2, "a"]}),
    lambda rng: {
        "type": "integer",
        "minimum": -(10 ** rng.choice((18, 19, 30, 400))),
        "maximum": 10 ** rng.choice((18, 19, 30, 400)),
    },
    lambda rng: {"type": "number", "multipleOf": rng.choice((1e-300, 0, -1, 1e300, 0.1, 7, 2**64))},
    lambda rng: {"type": "array", "minItems": rng.choice((10**6, 10**18, 2**64, -1, 1.5)), "items": {"type": "null"}},
    lambda rng: {"type": "array", "uniqueItems": True, "items": {"enum": list(range(rng.choice((3, 6, 7, 1000))))}},
    lambda rng: {
        "type": "array",
        "contains": {"const": 1},
        "minContains": rng.choice((2, 10**6)),
        "maxContains": 10**9,
    },
    lambda rng: {
        "type": "string",
        "minLength": rng.choice((10**6, 10**18, 2**64)),
        "maxLength": rng.choice((5, 10**6)),
    },
    lambda rng: {"type": "string", "pattern": pattern(rng)},
    lambda rng: {"type": "object", "patternProperties": {pattern(rng): {}, pattern(rng): {"type": "null"}}},
    lambda rng: {"type": "object", "propertyNames": {"pattern": pattern(rng)}, "additionalProperties": {"$ref": "#"}},
    lambda rng: {"type": "object", "minProperties": 5, "properties": {"a": {}}, "additionalProperties": False},
    lambda rng: {
        "type": "object",
        "dependentRequired": {f"p{i}": [f"p{i + 1}"] for i in range(rng.choice((3, 12, 40)))},
        "properties": {f"p{i}": {} for i in range(41)},
    },
    lambda rng: {
        "type": "object",
        "dependentSchemas": {f"p{i}": {"required": [f"p{i + 1}"]} for i in range(rng.choice((3, 14)))},
        "properties": {f"p{i}": {"enum": [1, 2]} for i in range(15)},
    },
    lambda rng: {
        "type": "object",
        "unevaluatedProperties": False,
        "allOf": [{"properties": {f"p{i}": {}}} for i in range(rng.choice((2, 300)))],
    },
    lambda rng: {
        "allOf": [{"anyOf": [{"required": [f"a{i}"]}, {"required": [f"b{i}"]}]} for i in range(rng.choice((2, 8, 16)))]
    },
    lambda rng: {"const": nested(rng.choice((10, 62, 300)), lambda inner: [inner], 1)},
    lambda rng: {"const": "\ud800"},
    lambda rng: {"properties": {"\udfff\x00": {"const": "\x00"}}},
    lambda rng: {"type": rng.choice(("thing", ["string", "thing"], [], 3, None, {}))},
    lambda rng: {"properties": rng.choice(([], 3, None, "a", {"a": 3}, {"a": []}))},
    lambda rng: {"enum": rng.choice(([], 3, {}, [{}], [[]], [None, None], [1e400]))},
    lambda rng: {
        rng.choice(("items", "anyOf", "allOf", "required", "$defs", "format", "pattern", "not")): rng.choice(
            (None, 3, "x", [], {}, [3], True)
        )
    },
    lambda rng: {"type": "string", "format": rng.choice(("date-time", "uri", "idn-email", "regex", "x" * 10_000, ""))},
    lambda rng: {"x-guidance": {"lenient": True, "whitespace_pattern": "(.*)*", "coerce_one_of": 3}, "type": "object"},
    lambda rng: rng.choice((True, False, None, 3, "", "x", [], [[]], {}, "{", '"a"', "null", "NaN", '{"enum": [NaN]}')),
)
PATTERNS = (
    "(a|aa){1,500}{1,500}",
    "(x+x+)+y",
    ".*a.{200}",
    ".*a.{20000}",
    "(.*)*",
    "((a*)*)*b",
    "a{1000000}",
    "a{1000}{1000}",
    "a{0}",
    "a{5,2}",
    "(?=a)b",
    "(?<!a)b",
    r"(a)\1",
    "(?P<n>a)(?P=n)",
    "\x00",
    r"\x00",
    r"\0",
    "\ud800",
    r"\ud800",
    r"\u{110000}",
    r"\p{L}{50}",
    r"\p{Nope}",
    r"[\w\W]{100}",
    "[z-a]",
    "[",
    "(",
    ")",
    "*",
    "a**",
    "a{",
    "\\",
    "(?i)ß",
    "(?x) # c",
    "^a$",
    "a^b$c",
    "(" * 63 + ")" * 63,
    "(" * 500 + ")" * 500,
    "|" * 5000,
    "(a|b|c|d)" * 2000,
    "[" + "a-z" * 5000 + "]",
    "x" * 200_000,
    r"\/",
    "/",
    "\n",
    "",
    r"[^\x00-\U0010ffff]",
    "(a?){60}a{60}",
    "(?:a{1,50}b{1,50}){1,50}",
    "((((a{1,9}){1,9}){1,9}){1,9}){1,9}",
    r"(\d+\s*){40}$",
    r"&&",
    r"[a&&b]",
    r"a&b",
    r"~a",
)
LARKS: tuple[Callable[[random.Random], str], ...] = (
    lambda rng: "start: " + " | ".join(f'"a{i}"' for i in range(rng.choice((9_000, 20_000)))),
    lambda rng: doubling(rng.choice((10, 30, 60))),
    lambda rng: "start: start",
    lambda rng: 'start: start "a" | start start | ""',
    lambda rng: 'start: ("" | start)* start?',
    lambda rng: "start: a\na: b\nb: a | a b | b",
    lambda rng: 'start: ((("a"?)*)+)*',
    lambda rng: f'start: "a"{{{rng.choice((10, 10**6, 10**20))}}}',
    lambda rng: f"start: {'(' * rng.choice((60, 500))}" + '"a"',
    lambda rng: f"start: /{pattern(rng)}/",
    lambda rng: f"start: T\nT: /{pattern(rng)}/ & ~/a/",
    lambda rng: f"start: %json {json.dumps(schema(rng))}",
    lambda rng: rng.choice(
        (
            "start: %json {",
            "start: %json",
            'start: %json {"a": 1} %json',
            "%llguidance {}",
            "%llguidance []\nstart: /a/",
        )
    ),
    lambda rng: '%llguidance {"no_forcing": true, "x": 1}\nstart: /a/',
    lambda rng: rng.choice(
        (
            "start: @answer",
            "start: @0",
            "start: <|im_end|>",
            "start: <[0-99999999]>",
            "start: <[^0]>",
            "start: <>",
            "start: <no>",
        )
    ),
    lambda rng: rng.choice(
        (
            "start[max_tokens=5]: /.*/",
            "start[lazy]: /.*/",
            'start[stop="x", temperature=3]: /.*/',
            "start[capture]: /a/",
        )
    ),
    lambda rng: rng.choice(
        (
            "",
            " ",
            "start",
            ":",
            "start:",
            "other: /a/",
            "\x00",
            "start: \x00",
            "#",
            "//",
            "%import common.INT\nstart: INT",
        )
    ),
    lambda rng: rng.choice(
        ('%ignore /.*/\nstart: "a"', '%ignore ""\nstart: "a"', "%declare A\nstart: A", "%override start: /a/")
    ),
    lambda rng: "".join(f"r{i}: r{i + 1} | r{i + 2}\n" for i in range(2000)) + "start: r0\nr2000: /a/\nr2001: /b/",
    lambda rng: 'root ::= "a" | root root',
    lambda rng: "root ::= root",
    lambda rng: "root ::= " + "(" * rng.choice((50, 500)),
    lambda rng: 'root ::= [^"]* ' + rng.choice(("{1,1000000}", "{99999999999}", "{5,2}", "{,3}", "{")),
    lambda rng: "root ::= [\\x00-\\U0010FFFF]{100} | <|im_end|>",
    lambda rng: "root ::= " + " | ".join(f'"{i}"' for i in range(20_000)),
    lambda rng: 'root ::= "a"{' + rng.choice(" 1,") * 3000,
    lambda rng: 'root ::= "a"{' + "1" * 5000 + "}",
    lambda rng: 'start: "' + '\\"' * 20_000,
    lambda rng: "start: /" + "\\/" * 20_000,
    lambda rng: "start: " + "a[" * 20_000,
    lambda rng: "start: " + " | ".join(f"%json {json.dumps(schema(rng))}" for _ in range(rng.choice((3, 30)))),
    lambda rng: "\n".join(f'r{i} ::= r{i + 1} r{i + 1} | "a"' for i in range(500)) + '\nr500 ::= r0 | "x"\nroot ::= r0',
    lambda rng: 'root ::= root "a" | "b"',
    lambda rng: "::=",
    lambda rng: "a ::= b\nb ::= a\nroot ::= a?",
)
CHOICES: tuple[Callable[[random.Random], Any], ...] = (
    lambda rng: [""],
    lambda rng: ["", "", "a"],
    lambda rng: ["a" * (i + 1) for i in range(rng.choice((5, 900)))],
    lambda rng: [f"{i}" for i in range(rng.choice((9_999, 50_000)))],
    lambda rng: ["\x00", "\ud800", "\U0010ffff"],
    lambda rng: ["<|im_end|>", "<|endoftext|>", "</think>", " "],
    lambda rng: ["x" * 100_000] * 3,
    lambda rng: rng.choice(([], [3], "a", {}, [None], [[]], [["a"]], 3)),
    lambda rng: ['"', "\\", "\n", "/", "\r\n", "\u2028", "é" * 50],
)


def pattern(rng: random.Random) -> str:
    return rng.choice(PATTERNS)


def schema(rng: random.Random) -> Any:
    made = rng.choice(SCHEMAS)(rng)
    if rng.random() < 0.2:
        made = {"type": "object", "properties": {"a": made, "b": rng.choice(SCHEMAS)(rng)}, "required": ["a"]}
    return made


def constraint(rng: random.Random) -> dict[str, Any]:
    """Return the fields of a request."""
    kind = rng.choice(("schema", "schema", "schema", "pattern", "grammar", "choice", "tag"))
    if kind == "schema":
        value = schema(rng)
        return rng.choice(
            (
                {"guided_json": value},
                {"json_schema": value},
                {"structured_outputs": {"json": value, "disable_any_whitespace": rng.random() < 0.5}},
                {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": value}}},
                {"response_format": {"type": "json_object", "schema": value}},
            )
        )
    if kind == "pattern":
        return rng.choice(
            ({"guided_regex": pattern(rng)}, {"regex": pattern(rng)}, {"structured_outputs": {"regex": pattern(rng)}})
        )
    if kind == "grammar":
        text = rng.choice(LARKS)(rng)
        return rng.choice(
            ({"guided_grammar": text}, {"grammar": text}, {"ebnf": text}, {"structured_outputs": {"grammar": text}})
        )
    if kind == "choice":
        options = rng.choice(CHOICES)(rng)
        return rng.choice(({"guided_choice": options}, {"structured_outputs": {"choice": options}}))
    tag = rng.choice(
        (
            {"structures": [{"begin": "<f>", "schema": schema(rng), "end": "</f>"}], "triggers": ["<f>"]},
            {"structures": [], "triggers": []},
            {"structures": [{"begin": "", "schema": {}, "end": ""}], "triggers": [""]},
            {"format": {"type": "sequence", "elements": [{"type": "json_schema", "json_schema": schema(rng)}]}},
            {
                "format": nested(
                    rng.choice((3, 60)),
                    lambda inner: {"type": "or", "elements": [inner, inner][: 1 + (rng.random() < 0.05)]},
                    {"type": "any_text"},
                )
            },
            {
                "structures": [
                    {"begin": f"<f{i}>", "schema": schema(rng) if i < 3 else {"type": "integer"}, "end": f"</f{i}>"}
                    for i in range(rng.choice((100, 3000)))
                ],
                "triggers": rng.choice((["<f"], [f"<f{i}>" for i in range(3000)])),
            },
            {"format": 3},
        )
    )
    return rng.choice(
        ({"response_format": {"type": "structural_tag", **tag}}, {"structured_outputs": {"structural_tag": tag}})
    )


# Fields beside a constraint that leave few tokens or none, end the answer early or never, or want more of it.
BESIDE: tuple[dict[str, Any], ...] = (
    {"min_tokens": 8},
    {"stop": ["a", "{", "<"]},
    {"logit_bias": {str(token): -100 for token in range(2, 300)}},
    {"bad_words": ["a", "{", "x", "<"]},
    {"allowed_token_ids": [64, 90]},
    {"ignore_eos": True},
    {"logprobs": 3, "prompt_logprobs": 3, "echo": True},
    {"n": 128, "max_tokens": 1},
    {"best_of": 4, "n": 2},
    {"stream": True},
)


def body_of(number: int) -> bytes:
    """Return the request body with this number."""
    rng = random.Random(f"{SEED} {number}")
    fields = constraint(rng) if rng.random() < 0.95 else {**constraint(rng), **constraint(rng)}
    asked = {
        "prompt": "x",
        "temperature": 1.5,
        "max_tokens": rng.choice((1, 8, 24)),
        "n": rng.choice((1, 1, 1, 3)),
        **fields,
        **(rng.choice(BESIDE) if rng.random() < 0.3 else {}),
    }
    body = json.dumps(asked).encode()
    if rng.random() < 0.1:  # bytes that are not UTF-8, or no JSON
        at = rng.randrange(len(body))
        body = (
            body[:at]
            + rng.choice((b"\xff", b"\xed\xa0\x80", b"\x00", b"{", b'"', b"\\"))
            + body[at + rng.choice((0, 1, 5)) :]
        )
    return body[:2_000_000]


# Asks /readyz all the time, and prints the longest answer and the statuses. Not a thread: this process is busy.
PROBE = """
import http.client, select, sys, time
longest, statuses = 0.0, set()
while not select.select([sys.stdin], [], [], 0.02)[0]:
    began = time.monotonic()
    connection = http.client.HTTPConnection(sys.argv[1], int(sys.argv[2]), timeout=60)
    connection.request("GET", "/readyz")
    statuses.add(connection.getresponse().status)
    connection.close()
    longest = max(longest, time.monotonic() - began)
print(longest, *statuses)
"""


def post(daemon: Daemon, body: bytes) -> tuple[int, float, bytes]:
    """Return the answer's status, its seconds and its body."""
    connection = http.client.HTTPConnection(*daemon.address, timeout=120)
    began = time.monotonic()
    try:
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, time.monotonic() - began, answer.read()
    finally:
        connection.close()


def text_of(daemon: Daemon, body: bytes) -> str:
    """Return the text of an answer."""
    status, _, answer = post(daemon, body)
    assert status == 200, answer
    text: str = json.loads(answer)["choices"][0]["text"]
    return text


NEIGHBOURS = tuple(
    json.dumps({"prompt": "once", "seed": 5, "temperature": 0.9, "max_tokens": 60, **fields}).encode()
    for fields in ({"ignore_eos": True}, {"guided_regex": "[a-z ]{50,55}"})
)


def test_hostile_constraints_are_answered_or_refused_and_nothing_else_suffers(start_daemon: Start):
    bodies = [body_of(number) for number in range(COUNT)]
    daemon = start_daemon(*DEVICE, "--set", "grammar.cache_bytes=16M").ready()
    assert post(daemon, b'{"prompt": "x", "guided_regex": "a", "max_tokens": 1}')[0] == 200
    before = resident_kib(daemon)
    host, port = daemon.address
    probe = subprocess.Popen(
        [sys.executable, "-c", PROBE, host, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    alone = [text_of(daemon, body) for body in NEIGHBOURS]
    with ThreadPoolExecutor(17) as pool:
        answering = [pool.submit(post, daemon, body) for body in bodies]
        beside = []
        while not answering[-1].done():
            beside.append([text_of(daemon, body) for body in NEIGHBOURS])
        answers = [each.result() for each in answering]
    longest, *statuses = map(float, probe.communicate("\n", timeout=60)[0].split())
    failed = [(n, status, text[:300]) for n, (status, _, text) in enumerate(answers) if status not in (200, 400, 413)]
    slow = sorted(((seconds, number) for number, (_, seconds, _) in enumerate(answers)), reverse=True)[:5]
    growth = resident_kib(daemon) - before
    served = sum(status == 200 for status, _, _ in answers)
    print(f"seed {SEED}: {served} served, slowest {slow}, readyz {longest:.3f} s, memory {growth} KiB more")
    assert not failed, (SEED, failed)
    assert beside
    assert all(each == alone for each in beside), "a neighbour's token changed"
    assert served > COUNT // 20, "constraints so hostile test no answer"
    assert statuses == [200]
    assert growth < GROWTH_KIB
    assert idle_status(daemon).pages_referenced == 0
    if FULL:
        assert slow[0][0] < SLOWEST_S
        assert longest < READY_S
