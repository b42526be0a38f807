"""Structured output of a daemon with the embedded model: every field that constrains, and everything around it."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import jsonschema
import lark
import pytest

from tests.e2e.clients import ask, idle_status, vanish
from tests.e2e.process import PATIENCE_S, ROOT, Daemon
from tests.e2e.test_own_process import DEVICE, OWN, worker_of
from tests.e2e.test_pause import infdctl

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.e2e.test_pause import Start

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["circle", "square"]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
        "note": {"anyOf": [{"type": "string", "maxLength": 8}, {"type": "null"}]},
    },
    "required": ["kind", "sizes", "note"],
    "additionalProperties": False,
}
PATTERN = r"(north|south) [0-9]{1,3} km"
OPTIONS = ["circle", "circle of fire", "square"]
LARK = 'start: "go" (" " step)~1..3\nstep: ("left" | "right") " " /[0-9]/\n'
TAG = {
    "format": {
        "type": "sequence",
        "elements": [
            {"type": "const_string", "value": "It is "},
            {"type": "tag", "begin": "<km>", "content": {"type": "regex", "pattern": "[0-9]{1,3}"}, "end": "</km>"},
            {"type": "tag", "begin": "<f>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</f>"},
        ],
    }
}
UNKNOWN_TAG = {"format": {"type": "any_text"}}
RULES = 'root ::= "go" (" " step){1,3}\nstep ::= ("left" | "right") " " [0-9]\n'
UNSATISFIABLE = {"type": "object", "minProperties": 3, "maxProperties": 2}
LONG = {"guided_regex": "[a-z ]{300}", "max_tokens": 1000}


def is_object(text: str) -> None:
    assert isinstance(json.loads(text), dict)


def follows_schema(text: str) -> None:
    jsonschema.validate(json.loads(text), SCHEMA)


def follows_pattern(text: str) -> None:
    assert re.fullmatch(PATTERN, text)


def is_option(text: str) -> None:
    assert text in OPTIONS


def follows_grammar(text: str) -> None:
    lark.Lark(LARK).parse(text)


def has_both_tags(text: str) -> None:
    match = re.fullmatch(r"It is <km>[0-9]{1,3}</km><f>(.*)</f>", text, re.DOTALL)
    assert match
    follows_schema(match[1])


# The answer's check, the request's field, and, if there is one, a body that is refused and the error's param.
CASES: list[tuple[Callable[[str], None], dict[str, Any], dict[str, Any] | None, str]] = [
    (
        is_object,
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json"}},
        "response_format.type",
    ),
    (
        follows_schema,
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {"response_format": {"type": "json_object", "schema": 3}},
        "response_format.schema",
    ),
    (
        follows_schema,
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": UNSATISFIABLE}}},
        "response_format.json_schema.schema",
    ),
    (
        follows_schema,
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
        {"structured_outputs": {"json": "{"}},
        "structured_outputs.json",
    ),
    (
        follows_pattern,
        {"structured_outputs": {"regex": PATTERN}},
        {"structured_outputs": {"regex": "(?=a)b"}},
        "structured_outputs.regex",
    ),
    (
        is_option,
        {"structured_outputs": {"choice": OPTIONS}},
        {"structured_outputs": {"choice": []}},
        "structured_outputs.choice",
    ),
    (
        follows_grammar,
        {"structured_outputs": {"grammar": LARK}},
        {"structured_outputs": {"grammar": "start: none"}},
        "structured_outputs.grammar",
    ),
    (
        follows_grammar,
        {"structured_outputs": {"grammar": RULES}},
        {"structured_outputs": {"grammar": "root ::= none"}},
        "structured_outputs.grammar",
    ),
    (is_object, {"structured_outputs": {"json_object": True}}, {"structured_outputs": {}}, "structured_outputs"),
    (follows_schema, {"guided_json": SCHEMA}, {"guided_json": {"type": "thing"}}, "guided_json"),
    (follows_pattern, {"guided_regex": PATTERN}, {"guided_regex": "("}, "guided_regex"),
    (is_option, {"guided_choice": OPTIONS}, {"guided_choice": [3]}, "guided_choice[0]"),
    (follows_grammar, {"guided_grammar": LARK}, {"guided_grammar": ""}, "guided_grammar"),
    (follows_schema, {"json_schema": SCHEMA}, {"json_schema": False}, "json_schema"),
    (follows_pattern, {"regex": PATTERN}, {"regex": "[z-a]"}, "regex"),
    (follows_grammar, {"grammar": RULES}, {"grammar": "root ::= ("}, "grammar"),
    (follows_grammar, {"ebnf": RULES}, {"ebnf": "other ::= 'a'"}, "ebnf"),
    (
        has_both_tags,
        {"structured_outputs": {"structural_tag": TAG}},
        {"structured_outputs": {"structural_tag": UNKNOWN_TAG}},
        "structured_outputs.structural_tag",
    ),
    (
        has_both_tags,
        {"response_format": {"type": "structural_tag", **TAG}},
        {"response_format": {"type": "structural_tag", **UNKNOWN_TAG}},
        "response_format",
    ),
]


def post(daemon: Daemon, body: dict[str, Any], path: str = "/v1/chat/completions") -> tuple[int, Any]:
    connection = http.client.HTTPConnection(*daemon.address, timeout=PATIENCE_S)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def question(**fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Give JSON: draw a circle."}]
    return {"messages": messages, "temperature": 0, "max_tokens": 300, **fields}


def text_of(daemon: Daemon, **fields: Any) -> str:
    with daemon.stream(ignore_eos=False, **{"temperature": 0, "prompt": "Where is it?", **fields}) as events:
        return "".join(choice["text"] for event in [events.first, *events] for choice in event["choices"])


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    daemon = Daemon(tmp_path_factory.mktemp("structured"), DEVICE, {})
    try:
        yield daemon.ready()
    finally:
        daemon.close()


@pytest.mark.parametrize(
    ("check", "fields", "wrong", "param"), CASES, ids=[str(fields)[:60] for _, fields, _, _ in CASES]
)
def test_every_field_of_a_constraint_is_kept_or_refused(
    daemon: Daemon, check: Callable[[str], None], fields: dict[str, Any], wrong: dict[str, Any], param: str
):
    status, body = post(daemon, question(**fields))
    assert status == 200, body
    assert body["choices"][0]["finish_reason"] == "stop"
    check(body["choices"][0]["message"]["content"])

    status, body = post(daemon, question(**wrong))
    assert (status, body["error"]["param"]) == (400, param), body


def test_a_response_keeps_structured_outputs(daemon: Daemon):
    for check, fields, _, param in CASES:
        if param in ("structured_outputs.regex", "structured_outputs.choice"):
            status, body = post(daemon, {"input": "Where?", "temperature": 0, **fields}, "/v1/responses")
            assert status == 200, body
            check(body["output"][-1]["content"][0]["text"])


@pytest.mark.parametrize("fields", [CASES[2][1], CASES[4][1], CASES[5][1], CASES[6][1], CASES[7][1]], ids=str)
def test_a_stream_has_the_same_text(daemon: Daemon, fields: dict[str, Any]):
    status, whole = post(
        daemon, {"prompt": "Where is it?", "temperature": 0, "max_tokens": 300, **fields}, "/v1/completions"
    )
    assert status == 200, whole
    assert text_of(daemon, max_tokens=300, **fields) == whole["choices"][0]["text"]


def test_each_of_several_choices_is_constrained(daemon: Daemon):
    status, body = post(daemon, question(n=3, temperature=1.5, seed=5, guided_json=SCHEMA))
    assert status == 200
    texts = [choice["message"]["content"] for choice in body["choices"]]
    for text in texts:
        follows_schema(text)
    assert len(set(texts)) > 1


def test_several_answers_at_temperature_zero_are_equal(daemon: Daemon):
    status, body = post(daemon, question(n=3, temperature=0, max_tokens=12))

    assert status == 200
    assert len({choice["message"]["content"] for choice in body["choices"]}) == 1
    assert body["system_fingerprint"].startswith("fp_")


def test_infd_chat_prints_an_answer_that_satisfies_a_schema(daemon: Daemon, tmp_path: Path):
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(SCHEMA))
    host, port = daemon.address
    command = [sys.executable, "-m", "infd", "chat", "--url", f"http://{host}:{port}", "--schema", str(file)]
    done = subprocess.run(command, input="Draw a circle.", capture_output=True, text=True, check=True, cwd=ROOT)

    follows_schema(done.stdout)
    assert done.stderr == ""


def test_infd_chat_ends_with_the_code_of_bad_input_for_a_schema_that_the_server_refuses(daemon: Daemon, tmp_path: Path):
    file = tmp_path / "schema.json"
    file.write_text('{"type": "thing"}')
    host, port = daemon.address
    command = [sys.executable, "-m", "infd", "chat", "--url", f"http://{host}:{port}", "--schema", str(file)]
    done = subprocess.run(command, input="Draw a circle.", capture_output=True, text=True, check=False, cwd=ROOT)

    assert done.returncode == os.EX_DATAERR
    assert "type" in done.stderr


async def test_a_client_that_leaves_ends_its_constrained_choices(daemon: Daemon):
    before = (await asyncio.to_thread(idle_status, daemon)).terminal["disconnect"]
    body = {"prompt": "once", "stream": True, "n": 2, **LONG}
    reader, writer = await ask(daemon.address, "/v1/completions", body)
    async for line in reader:
        if line.startswith(b"data: "):
            break
    vanish(writer)

    status = await asyncio.to_thread(idle_status, daemon)
    assert status.terminal["disconnect"] == before + 2
    assert status.pages_referenced == 0


def test_constrained_neighbours_change_no_token_of_others(daemon: Daemon):
    free = [{"prompt": f"Once upon {number} times", "max_tokens": 40, "ignore_eos": True} for number in range(16)]
    bound = [{"prompt": f"Number {number}", "max_tokens": 300, **CASES[2 + number % 15][1]} for number in range(16)]

    def answer(fields: dict[str, Any]) -> Any:
        return post(daemon, {"temperature": 0, "return_token_ids": True, **fields}, "/v1/completions")

    alone = [answer(fields)[1]["choices"][0]["token_ids"] for fields in free]
    with ThreadPoolExecutor(32) as pool:
        mixed = [each for pair in zip(free, bound, strict=True) for each in pair]
        answers = list(pool.map(answer, mixed))

    assert [status for status, _ in answers] == [200] * 32
    assert [body["choices"][0]["token_ids"] for _, body in answers[::2]] == alone
    assert {body["choices"][0]["finish_reason"] for _, body in answers[1::2]} <= {"stop", "length"}


def test_constraints_that_panic_or_nest_deeper_than_a_stack_are_refused_and_others_go_on(daemon: Daemon):
    links = {f"d{number}": {"items": {"$ref": f"#/$defs/d{number + 1}"}} for number in range(1200)}
    panics = {"guided_regex": "([b-cé]|[è-é]|a)|[è-é]"}
    deep = {"guided_json": {"$defs": {**links, "d1200": {}}, "$ref": "#/$defs/d0"}}
    bound = {"guided_regex": "[a-z ]{60}", "max_tokens": 200}
    whole = text_of(daemon, **bound)
    with daemon.stream(ignore_eos=False, temperature=0, prompt="Where is it?", **bound) as events:
        refused = [post(daemon, question(**fields)) for fields in (panics, deep)]
        rest = list(events)

    assert [(status, body["error"]["code"]) for status, body in refused] == [
        (400, "unsupported_grammar"),
        (400, "grammar_too_large"),
    ]
    panicked, nested = (body["error"]["message"] for _, body in refused)
    assert "written as one class" in panicked
    assert "nest too deep" in nested
    assert "".join(choice["text"] for event in [events.first, *rest] for choice in event["choices"]) == whole
    assert text_of(daemon, guided_regex="still here") == "still here"


@pytest.mark.parametrize(
    ("stop", "go"),
    [(["pause", "--mode", "keep"], ["resume"]), (["sleep", "--level", "1", "--mode", "keep"], ["wake"])],
    ids=["pause", "sleep"],
)
def test_a_constrained_answer_goes_on_after_a_pause(daemon: Daemon, stop: list[str], go: list[str]):
    whole = text_of(daemon, **LONG)
    with daemon.stream(ignore_eos=False, temperature=0, prompt="Where is it?", **LONG) as events:
        infdctl(daemon, *stop, "--wait")
        infdctl(daemon, *go, "--wait")
        rest = list(events)
    assert "".join(choice["text"] for event in [events.first, *rest] for choice in event["choices"]) == whole
    assert re.fullmatch(LONG["guided_regex"], whole)


def test_masks_reach_a_device_process_and_its_loss_ends_the_answer(daemon: Daemon, start_daemon: Start):
    own = start_daemon(*OWN).ready()
    for fields in ({"guided_json": SCHEMA, "max_tokens": 300}, LONG):
        assert text_of(own, **fields) == text_of(daemon, **fields)
    with own.stream(prompt="Where is it?", ignore_eos=False, **LONG) as events:
        os.kill(worker_of(own), signal.SIGKILL)
        *_, last = events
    assert "error" in last
    assert own.exit_code() == 70


def test_the_work_on_grammars_is_counted_and_its_library_named(daemon: Daemon):
    for _ in range(2):
        text_of(daemon, guided_regex="counted [0-9]")
    page = daemon.get("/metrics")[1].decode()
    found = dict(re.findall(r"^(infd_grammar_\w+)(?:{[^}]*})? (\S+)$", page, re.MULTILINE))

    assert float(found["infd_grammar_compiles_total"]) >= 1
    assert float(found["infd_grammar_cache_hits_total"]) >= 1
    assert 0 < float(found["infd_grammar_compile_seconds_total"]) < PATIENCE_S
    assert float(found["infd_grammar_cache_bytes"]) > 0
    assert float(found["infd_grammar_mask_seconds_count"]) >= 2
    (row,) = [row for row in infdctl(daemon, "ops")["ops"] if row["family"] == "grammar"]
    assert row["chosen"].startswith("llguidance ")
