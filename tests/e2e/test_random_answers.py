"""Answers of a daemon to random constraints, over sockets: each keeps its constraint, and no neighbour's token changes.

Many clients at a time, temperature 1.5, one to three choices, whole and streamed answers. Each tenth request is an
unconstrained greedy one, whose tokens are compared with those that it got alone. Cut answers are finished along a
shortest path and judged like others. INFD_SOAK=1 runs 2,000 constraints with each engine, in four parts: `-k
part3` runs a quarter.
"""

from __future__ import annotations

import http.client
import json
import os
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from msgspec import Struct

from infd import embedded
from infd.constraint import Choice, Constraint, Ebnf, JsonObject, JsonSchema, Lark, Regex, StructuralTag
from infd.text.tokenizer import Tokenizer
from tests.e2e.clients import idle_status
from tests.e2e.process import Daemon, Events
from tests.e2e.random_models import checkpoint
from tests.grammar import engines
from tests.grammar.finishing import Finisher
from tests.grammar.random_constraints import Case, draw_case

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.test_pause import Start

SHARES = {"embedded": 0.2, "byte_level": 0.35, "sentencepiece": 0.35, "large": 0.1}
PARTS = 4 if os.environ.get("INFD_SOAK") == "1" else 1
AT_ONCE = 24
LIMIT_S = 300.0
CLOSERS = (b'"', b"}", b"]", b'"}', b'"]', b"}}", b"</", b";")
REFUSALS = ("invalid_grammar", "unsupported_grammar", "grammar_too_large")


class Served(Struct):
    """A model: its directory, the bytes of its tokens, whether a text loses its first space, and its end ids."""

    directory: Path
    spelled: list[bytes]
    drop_space: bool
    end_ids: list[int]

    def bias(self) -> dict[str, float]:
        """Return biases towards ends and closing marks."""
        closing = [token for token, piece in enumerate(self.spelled) if piece.strip() in CLOSERS]
        return {str(token): 8.0 for token in closing[:900]} | {str(token): 12.0 for token in self.end_ids}


class Asked(Struct):
    """A request, and the case that judges its answers; None: a neighbour."""

    body: dict[str, Any]
    case: Case | None


class Answer(Struct):
    """The status, and choices or an error."""

    status: int
    choices: list[dict[str, Any]]
    error: dict[str, Any]


def served(kind: str, folder: Path) -> Served:
    if kind == "embedded":
        directory = embedded.path()
    else:
        (directory := folder / kind).mkdir()
        checkpoint(kind, directory)
    tokenizer = Tokenizer.load(directory)
    spelled = tokenizer.spellings()
    assert spelled is not None
    ids = json.loads((directory / "generation_config.json").read_text())["eos_token_id"]
    return Served(directory, spelled, tokenizer.drops_space, ids if isinstance(ids, list) else [ids])


def fields(draw: random.Random, constraint: Constraint) -> dict[str, Any]:
    """Return request fields that set a constraint."""
    match constraint:
        case JsonSchema(text, whitespace):
            schema = json.loads(text)
            options = [{"structured_outputs": {"json": schema, "disable_any_whitespace": not whitespace}}]
            if whitespace:
                named = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
                options += [{"response_format": named}, {"guided_json": schema}, {"json_schema": text}]
        case JsonObject(whitespace):
            options = [{"structured_outputs": {"json_object": True, "disable_any_whitespace": not whitespace}}]
            if whitespace:
                options.append({"response_format": {"type": "json_object"}})
        case Regex(pattern):
            options = [{"structured_outputs": {"regex": pattern}}, {"guided_regex": pattern}, {"regex": pattern}]
        case Choice(texts):
            options = [{"structured_outputs": {"choice": list(texts)}}, {"guided_choice": list(texts)}]
        case Lark(grammar) | Ebnf(grammar):
            options = [{"structured_outputs": {"grammar": grammar}}, {"guided_grammar": grammar}, {"grammar": grammar}]
        case StructuralTag(description):
            tag = json.loads(description)
            options = [
                {"structured_outputs": {"structural_tag": tag}},
                {"response_format": {"type": "structural_tag", **tag}},
            ]
        case _:
            raise TypeError(constraint)
    return draw.choice(options)


def request(draw: random.Random, bias: dict[str, float]) -> Asked:
    case = draw_case(draw)
    rare: dict[str, Any] = {
        "top_k": 20,
        "top_p": 0.9,
        "min_p": 0.02,
        "repetition_penalty": 1.2,
        "min_tokens": 5,
        "logprobs": 2,
    }
    body = {
        "prompt": [draw.randrange(200, 500) for _ in range(draw.choice([1, 3, 20]))],
        "max_tokens": draw.choice([min(case.tokens, 400)] * 9 + [20]),
        "temperature": 1.5,
        "seed": draw.randrange(2**31),
        "n": draw.choice([1, 1, 1, 2, 3]),
        "logit_bias": bias if draw.random() < 0.97 else {},
        "stream": draw.random() < 0.3,
        "return_token_ids": True,
        **{name: value for name, value in rare.items() if draw.random() < 0.05},
        **fields(draw, case.constraint),
    }
    return Asked(body, case)


def answer(address: tuple[str, int], body: dict[str, Any]) -> Answer:
    connection = http.client.HTTPConnection(*address, timeout=LIMIT_S)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        got = connection.getresponse()
        if got.status != 200:
            return Answer(got.status, [], json.loads(got.read())["error"])
        if not body.get("stream"):
            return Answer(200, json.loads(got.read())["choices"], {})
        return Answer(200, *_gathered(got, body["n"]))
    finally:
        connection.close()


def _gathered(stream: http.client.HTTPResponse, number: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    choices: list[dict[str, Any]] = [{"text": "", "token_ids": [], "finish_reason": None} for _ in range(number)]
    error: dict[str, Any] = {}
    for event in Events(stream):
        error = event.get("error") or error
        for delta in event.get("choices", ()):
            choice = choices[delta["index"]]
            choice["text"] += delta["text"]
            choice["token_ids"] += delta.get("token_ids") or []
            choice["finish_reason"] = delta["finish_reason"] or choice["finish_reason"]
    return choices, error


class Proof:
    """Asks a daemon, judges, and counts.

    found       outcomes by name
    wrong       broken promises: request, answer, reason
    unfinished  cut answers of which the search found no end: constraint, answer
    """

    def __init__(self, model: Served) -> None:
        self.found: Counter[str] = Counter()
        self.wrong: list[tuple[str, str, str]] = []
        self.unfinished: list[tuple[str, str]] = []
        self._model = model
        self.finisher = Finisher()

    def judge(self, asked: Asked, got: Answer, alone: Answer | None) -> None:
        if asked.case is None:
            self.found["neighbours"] += 1
            if got != alone:
                self.wrong.append((json.dumps(asked.body), repr(got), f"alone it was {alone}"))
            return
        kind = type(asked.case.constraint).__name__
        self.found["constraints"] += 1
        self.found[kind] += 1
        # A stream that waits long for its grammar has begun with a ping: then its refusal is an event.
        if (got.status == 400 or asked.body["stream"]) and got.error.get("code") in REFUSALS:
            self.found["refused"] += 1
            self.found[f"{kind} refused"] += 1
            return
        if got.status != 200 or got.error:
            self.wrong.append((json.dumps(asked.body), "", f"status {got.status}: {got.error}"))
            return
        for choice in got.choices:
            self.found["finished" if choice["finish_reason"] == "stop" else "cut"] += 1
            shown = choice["text"]
            try:
                if choice["finish_reason"] != "stop":
                    assert choice["finish_reason"] == "length"
                    shown = self._finished(asked.case, choice["token_ids"])
                if shown is not None:
                    asked.case.judge(shown)
            except Exception as error:
                reason = f"{choice['finish_reason']}: {type(error).__name__}: {str(error)[:300]}"
                self.wrong.append((json.dumps(asked.body), repr(shown), reason))

    def _finished(self, case: Case, tokens: list[int]) -> str | None:
        text = b"".join(self._model.spelled[token] for token in tokens if token not in self._model.end_ids)
        text = text.removeprefix(b" ") if self._model.drop_space else text
        rest = self.finisher.shortest_end(case.constraint, text, case.words, case.alike)
        if rest is None:
            self.unfinished.append((repr(case.constraint), text.decode(errors="replace")))
            return None
        return (text + rest).decode()


def prove(start_daemon: Start, kind: str, constraints: int, folder: Path, seed: int) -> None:
    model, draw = served(kind, folder), random.Random(f"{kind} {seed}")
    daemon: Daemon = start_daemon(
        *("--device", "cpu", "--set", "device.threads=1", "--dtype", "float32", "--set", "scheduler.max_num_seqs=16"),
        *("--grammar-engine", engines.PRESENT.get()),
        *(() if kind == "embedded" else ("--model", str(model.directory))),
    ).ready()
    bias, proof, address = model.bias(), Proof(model), daemon.address

    def greedy(number: int) -> dict[str, Any]:
        prompt = [200 + number, 300 + 7 * number]
        return {"prompt": prompt, "max_tokens": 60, "temperature": 0, "ignore_eos": True, "return_token_ids": True}

    neighbours = [greedy(number) for number in range(10)]
    alone = [answer(address, body) for body in neighbours]
    assert all(len(each.choices[0]["token_ids"]) == 60 for each in alone)
    asked: list[Asked] = []
    for number in range(constraints):
        asked.append(request(draw, bias))
        if number % 10 == 0:
            asked.append(Asked(neighbours[number // 10 % 10], None))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = pool.map(lambda each: answer(address, each.body), asked)
        for each, got in zip(asked, answers, strict=True):
            before = None if each.case is not None else _plain(alone[neighbours.index(each.body)])
            proof.judge(each, got if each.case is not None else _plain(got), before)

    found = proof.found
    ends = dict(proof.finisher.found)
    print(engines.PRESENT.get(), kind, dict(sorted(found.items())), ends, "unfinished", proof.unfinished)
    assert not proof.wrong, "\n".join([f"{len(proof.wrong)} wrong, such as", *map(str, proof.wrong[:8])])
    assert "Traceback" not in daemon.log_text()
    assert idle_status(daemon).pages_referenced == 0
    answered = found["finished"] + found["cut"]
    assert found["finished"] >= (0.8 if answered > 300 else 0.6) * answered
    assert not proof.unfinished


def _plain(got: Answer) -> Answer:
    """Return a neighbour's answer without what names the request."""
    return Answer(got.status, [{name: each[name] for name in ("text", "token_ids")} for each in got.choices], got.error)


@pytest.mark.parametrize(("engine", "constraints"), [("llguidance", 12), ("xgrammar", 8)], indirect=["engine"])
def test_answers_over_sockets_keep_their_constraints(
    start_daemon: Start, tmp_path: Path, engine: str, constraints: int
):
    prove(start_daemon, "embedded", constraints, tmp_path, seed=1)


@pytest.mark.exhaustive
@pytest.mark.timeout(20_000)
@pytest.mark.parametrize("kind", SHARES)
@pytest.mark.parametrize("part", [f"part{number}" for number in range(PARTS)])
def test_many_answers_over_sockets_keep_their_constraints(
    start_daemon: Start, tmp_path: Path, engine: str, kind: str, part: str
):
    total = 2000 if PARTS > 1 else 160
    prove(start_daemon, kind, round(total * SHARES[kind] / PARTS), tmp_path, seed=2 + int(part.removeprefix("part")))
