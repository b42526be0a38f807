"""Hostile requests get the documented errors, and concurrent requests lose no token.

Every test runs `infd start` with a well-behaved stream beside the attack. The
stream's tokens equal those of the stream alone, and afterwards the daemon holds
no resource that it did not hold before.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import resource
import signal
import socket
import struct
import subprocess
import sys
from contextlib import contextmanager
from http.client import HTTPConnection
from typing import TYPE_CHECKING, Any

import pytest

from infd import embedded
from infd.admin.ctl.client import AdminClient
from infd.admin.protocol import Requests, Status
from tests.e2e.clients import FULL, resident_kib

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.e2e.process import Daemon, Events

    Start = Callable[..., Daemon]

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "hi"}
QUICK = ("--set", "device.null_step_ms=2")
SLOW = ("--set", "device.null_step_ms=100")
NEIGHBOUR = {"prompt": "the neighbour", "max_tokens": 250, "seed": 11, "return_token_ids": True}
RESET = struct.pack("ii", 1, 0)  # SO_LINGER of no time: the peer sees a reset
PATIENCE_S = 60.0  # only a test that fails waits this long


# A concurrent stream, and checks after an attack


def tokens_of(events: Events) -> list[int]:
    tokens: list[int] = []
    for event in (events.first, *events):
        assert "error" not in event
        tokens += event["choices"][0].get("token_ids", [])
    assert events.done
    return tokens


def descriptors(daemon: Daemon) -> int:
    return len(os.listdir(f"/proc/{daemon.process.pid}/fd"))


def come_to_rest(daemon: Daemon, most_descriptors: int) -> Status:
    """Wait until all accepted requests have ended and connections are closed, polling the daemon's status."""
    client = AdminClient([str(daemon.admin_socket)], timeout_s=PATIENCE_S)
    for _ in range(10_000):
        status = client.get("/v1/status", Status)
        busy = status.running or status.waiting or client.get("/v1/requests", Requests).requests
        if not busy and descriptors(daemon) <= most_descriptors:
            return status
    raise AssertionError(f"it does not come to rest: {status}, {descriptors(daemon)} descriptors")


@contextmanager
def unharmed(daemon: Daemon) -> Iterator[None]:
    """Run the block beside a stream; then check the stream's tokens, and resources still held."""
    with daemon.stream(**NEIGHBOUR) as events:
        alone = tokens_of(events)
    before = descriptors(daemon)
    with daemon.stream(**NEIGHBOUR) as events:
        yield
        assert tokens_of(events) == alone
    status = come_to_rest(daemon, before)
    assert len(alone) == NEIGHBOUR["max_tokens"]
    assert status.accepted == sum(status.terminal.values())
    assert status.pages_referenced == 0
    assert status.waiting_tokens == 0
    assert status.terminal["error"] == 0
    assert "Traceback" not in daemon.log_text()


# Requests


def post(connection: HTTPConnection, path: str, body: Any, headers: dict[str, str] | None = None) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request("POST", path, data, {"Content-Type": "application/json", **(headers or {})})
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())


def refusal(connection: HTTPConnection, path: str, body: Any, headers: dict[str, str] | None = None) -> tuple[Any, ...]:
    """Return status, param and code of an error answer."""
    status, answer = post(connection, path, body, headers)
    assert set(answer) == {"error"}, (body, answer)
    error = answer["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return status, error["param"], error["code"]


@contextmanager
def connected(daemon: Daemon) -> Iterator[HTTPConnection]:
    connection = HTTPConnection(*daemon.address, timeout=PATIENCE_S)
    try:
        yield connection
    finally:
        connection.close()


def written(path: str, body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    return b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (path.encode(), len(data), data)


def answers_to(daemon: Daemon, data: bytes) -> bytes:
    """Send bytes, and return all bytes received until the connection closes."""
    with socket.create_connection(daemon.address, timeout=PATIENCE_S) as client:
        client.sendall(data)
        return everything_from(client)


def everything_from(client: socket.socket) -> bytes:
    return b"".join(iter(lambda: client.recv(65536), b""))


def statuses(answers: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.[01] (\d{3}) ", answers)]


COMPLETION = b'{"prompt": "a", "max_tokens": 1}'
TABLE: list[tuple[str, Any, int, str | None, str | None]] = [
    # malformed
    (COMPLETIONS, b"", 400, None, "invalid_json"),
    (COMPLETIONS, b"{", 400, None, "invalid_json"),
    (COMPLETIONS, b"[]", 400, None, None),
    (COMPLETIONS, COMPLETION + b"{}", 400, None, "invalid_json"),
    (COMPLETIONS, b"\xef\xbb\xbf" + COMPLETION, 400, None, "invalid_json"),
    (COMPLETIONS, COMPLETION.decode().encode("utf-16"), 400, None, "invalid_json"),
    (COMPLETIONS, b'{"prompt": "\xff"}', 400, None, "invalid_json"),
    (COMPLETIONS, b'{"prompt": "\xed\xa0\x80"}', 400, None, "invalid_json"),
    (COMPLETIONS, rb'{"prompt": "\ud800"}', 400, None, "invalid_json"),
    (COMPLETIONS, rb'{"prompt": "a", "cache_salt": "\udfff"}', 400, None, "invalid_json"),
    (COMPLETIONS, b'{"prompt": "a", "temperature": NaN}', 400, None, "invalid_json"),
    (COMPLETIONS, b'{"prompt": "a", "temperature": -Infinity}', 400, None, "invalid_json"),
    (COMPLETIONS, b'{"prompt": "a", "temperature": 1e999}', 400, "temperature", None),
    (COMPLETIONS, b'{"prompt": "a", "x": %b}' % (b"[" * 128 + b"]" * 128), 400, None, "json_too_deep"),
    (COMPLETIONS, b"[" * 1_000_000, 400, None, "json_too_deep"),
    (COMPLETIONS, b'{"a":' * 100_000, 400, None, "json_too_deep"),
    (COMPLETIONS, b'{"prompt": "a", "n": 1, "n": 129}', 400, "n", None),  # the last of equal keys counts
    *(
        (COMPLETIONS, b'{"prompt": "a", "suffix": %b}' % value, 400, "suffix", code)
        for value, code in ((b"1e999", None), (b"9" * 5000, None))
    ),
    *(
        (COMPLETIONS, b'{"prompt": "a", "suffix": %b}' % value, 400, None, "invalid_json")
        for value in (b'"\xff"', b'{"\xff": 1}')
    ),
    # out of range
    (COMPLETIONS, {"prompt": [-1]}, 400, "prompt[0]", None),
    (COMPLETIONS, {"prompt": [3072]}, 400, "prompt", None),
    (COMPLETIONS, b'{"prompt": [%b]}' % (b"9" * 5000), 400, "prompt[0]", None),
    (COMPLETIONS, {"prompt": "a", "stop_token_ids": [3072]}, 400, "stop_token_ids", None),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"3072": 1}}, 400, "logit_bias", None),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"-1": 1}}, 400, "logit_bias.-1", None),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"1": 101}}, 400, "logit_bias", None),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"a": 1}}, 400, "logit_bias.a", None),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {str(i): 1 for i in range(1025)}}, 400, "logit_bias", None),
    (COMPLETIONS, {"prompt": "a", "n": 129}, 400, "n", None),
    (COMPLETIONS, {"prompt": "a", "stop": ["a"] * 17}, 400, "stop", None),
    (COMPLETIONS, {"prompt": "a", "stop": "a" * 257}, 400, "stop", None),
    (COMPLETIONS, {"prompt": "a", "cache_salt": "a" * 129}, 400, "cache_salt", None),
    (COMPLETIONS, {"prompt": "a", "request_id": "a b"}, 400, "request_id", None),
    (COMPLETIONS, {"prompt": "a", "request_id": "a\n"}, 400, "request_id", None),
    (COMPLETIONS, {"prompt": ["a"] * 4097}, 400, "prompt", None),
    (COMPLETIONS, {"prompt": [1] * 2048}, 400, "prompt", "context_length_exceeded"),
    (COMPLETIONS, {"prompt": "a b " * 100_000}, 400, "prompt", "context_length_exceeded"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 2048}, 400, "max_tokens", "context_length_exceeded"),
    (CHAT, {"messages": [{**USER, "content": "a b " * 5000}]}, 400, "messages", "context_length_exceeded"),
    (CHAT, {"messages": [{**USER, "role": "x"}]}, 400, "messages[0].role", None),
    (CHAT, {"messages": [USER, {**USER, "content": 1}]}, 400, "messages[1].content", None),
    # contradictory, or not supported
    (CHAT, {"messages": []}, 400, "messages", None),
    (CHAT, {"messages": [USER], "tools": []}, 400, "tools", None),
    (CHAT, {"messages": [USER], "stream_options": {}}, 400, "stream_options", None),
    (CHAT, {"messages": [USER], "chat_template_kwargs": {"messages": []}}, 400, "chat_template_kwargs.messages", None),
    (CHAT, {"messages": [USER], "chat_template": "{{ 1 }}"}, 400, "chat_template", "unsupported"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]},
        400,
        "messages[0].content[0].type",
        "unsupported",
    ),
    (COMPLETIONS, {"prompt": ["a", 1]}, 400, "prompt", None),
    (COMPLETIONS, {"prompt": ""}, 400, "prompt", None),
    (COMPLETIONS, {"prompt": "a", "model": "nobody"}, 404, "model", "model_not_found"),
    ("/tokenize", {"prompt": "a", "messages": [USER]}, 400, "prompt", None),
    ("/detokenize", {"tokens": [3072]}, 400, "tokens", None),
    ("/v1/nothing", {}, 404, None, "unknown_path"),
    ("/v1/models", {}, 405, None, "method_not_allowed"),
]


def test_each_bad_request_gets_its_error(start_daemon: Start) -> None:
    daemon = start_daemon(*QUICK).ready()
    with unharmed(daemon), connected(daemon) as connection:
        for path, body, *expected in TABLE:
            assert [*refusal(connection, path, body)] == expected, (path, str(body)[:200])


def test_constraints_that_allow_no_token_are_the_clients_error(start_daemon: Start) -> None:
    daemon = start_daemon(*QUICK, "--device", "cpu", "--set", "device.threads=1").ready()
    asked = {"prompt": "a", "max_tokens": 4, "min_tokens": 3, "allowed_token_ids": [5]}
    with connected(daemon) as connection:
        at_once = {**asked, "stop_token_ids": [5]}
        assert refusal(connection, COMPLETIONS, at_once) == (400, "allowed_token_ids", None)
        (five,) = post(connection, "/detokenize", {"tokens": [5]})[1].values()
        later = {**asked, "bad_words": [five]}
        assert refusal(connection, COMPLETIONS, later) == (400, None, "nothing_allowed")
    assert "Traceback" not in daemon.log_text()


def test_a_wrong_type_in_any_field_is_refused_by_its_name(start_daemon: Start) -> None:
    whole, real, flag, text = (1, 1.5, True, "x")
    absurd: tuple[Any, ...] = ({"a": 1}, [[]], [None], 10**30, -(10**30), 1e308)
    wrong: dict[str, tuple[Any, ...]] = {
        "model": (whole, flag, []),
        "stream_options": (whole, flag, text, []),
        "logit_bias": (whole, flag, text, [[1, 2]]),
        "stop": (whole, real, flag, ""),
        "stop_token_ids": (whole, flag, text, ["a"]),
        "cache_salt": (whole, flag, []),
        "request_id": (whole, flag, [], ""),
        "prompt": (None, whole, real, flag, [], [real], [flag]),
    }
    wrong |= dict.fromkeys(("n", "top_k", "seed", "max_tokens", "min_tokens", "priority"), (real, flag, text, []))
    wrong |= dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty"), (-1, flag, text, []))
    wrong |= dict.fromkeys(("presence_penalty", "frequency_penalty"), (-3, flag, text, []))
    wrong |= dict.fromkeys(("stream", "ignore_eos", "skip_special_tokens", "return_token_ids"), (0, 1, text, []))
    daemon = start_daemon(*QUICK).ready()
    with unharmed(daemon), connected(daemon) as connection:
        for field, values in wrong.items():
            for value in (*values, *absurd):
                status, param, _ = refusal(connection, COMPLETIONS, {"prompt": "a", "max_tokens": 1, field: value})
                assert status == 400
                assert re.split(r"[.\[]", param or "")[0] == field, (field, value)


def test_bytes_that_could_be_read_in_two_ways_are_not_read_at_all(start_daemon: Start) -> None:
    chunked = b"%x\r\n%b\r\n0\r\n\r\n" % (len(COMPLETION), COMPLETION)
    length = b"%d" % len(COMPLETION)
    shapes = [
        (b"Content-Length: 5\r\nTransfer-Encoding: chunked", chunked),
        (b"Transfer-Encoding: chunked, chunked", chunked),
        (b"Transfer-Encoding: xchunked", chunked),
        (b"Transfer-Encoding: identity", COMPLETION),
        (b"Transfer-Encoding : chunked", chunked),
        (b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity", chunked),
        (b"Transfer-Encoding: \x0bchunked", chunked),
        (b"Content-Length: %b\r\nContent-Length: %b" % (length, length), COMPLETION),
        (b"Content-Length: %b, %b" % (length, length), COMPLETION),
        (b"Content-Length: +" + length, COMPLETION),
        (b"Content-Length: -1", COMPLETION),
        (b"Content-Length: 0x10", COMPLETION),
        (b"Content-Length: " + b"9" * 30, COMPLETION),
        (b"Content-Length:", COMPLETION),
        (b"X: a\r\n folded", b""),
        (b"X: a\nY: b", b""),
        (b"X: a\rY: b", b""),
        (b"X: a\0b", b""),
        (b"no colon", b""),
        (b"Host: y", b""),
        (b"X: " + b"a" * 17_000, b""),
        (b"X" * 17_000 + b": a", b""),
        (b"\r\n".join(b"X%d: a" % i for i in range(120)), b""),
        (b"Transfer-Encoding: chunked", b"-1\r\n"),
        (b"Transfer-Encoding: chunked", b"f" * 17 + b"\r\n"),
        (b"Transfer-Encoding: chunked", b"0x1\r\na\r\n0\r\n\r\n"),
        (b"Transfer-Encoding: chunked", b"1\na\n0\n\n"),
        (b"Transfer-Encoding: chunked", b"1;a\nb\r\na\r\n0\r\n\r\n"),
        (b"Transfer-Encoding: chunked", b"1\r\naXX0\r\n\r\n"),
        (b"Transfer-Encoding: chunked", b"1\r\na\r\n0\r\n" + b"X: y\r\n" * 10_000 + b"\r\n"),
    ]
    whole = [b"\x16\x03\x01\x02\0\x01\0\x01\xfc", b"GET /livez\r\n\r\n"]
    whole += [b"GET %b HTTP/1.1\r\nHost: x\r\n\r\n" % target for target in (b"livez", b"http:///livez", b"/\xff", b"")]
    whole += [b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n%b\r\n\r\n%b" % shape for shape in shapes]
    smuggled = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
    daemon = start_daemon(*QUICK).ready()
    with unharmed(daemon):
        for data in whole:
            answers = answers_to(daemon, data + smuggled)
            assert statuses(answers) == [400], (data[:100], answers)
            assert json.loads(answers.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"


def test_no_unusual_path_bypasses_the_key(start_daemon: Start) -> None:
    daemon = start_daemon(*QUICK, INFD_API_KEY="secret").ready()
    paths = (
        *(
            "/v1/models",
            "/v1/models/embedded",
            "/metrics",
            "/load",
            "/v1/nothing",
            "/",
            "//livez",
            "/livez/",
            "/livez;x",
        ),
        *("/livez/../v1/models", "/livez%2f..%2fv1/models", "/livez%3f/../v1/models", "/livez#/v1/models", "/%6civez"),
        *("/v1/%6dodels", "/V1/models", "/./v1/models", "http://x/v1/models", "http://x/livez/../v1/models"),
        *("http://livez/v1/models?/livez", "//livez/v1/models", "/metrics?/livez"),
    )
    keys = ("", "Bearer", "Bearer ", "Bearer secre", "Bearer secret2", "Basic secret", "secret", "Bearer secret, x")
    for path in paths:
        asked = f"GET {path} HTTP/1.1\r\nHost: /livez\r\nConnection: close\r\n\r\n"
        assert statuses(answers_to(daemon, asked.encode())) == [401], path
    for key in keys:
        asked = f"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: {key}\r\n\r\n"
        assert statuses(answers_to(daemon, asked.encode())) == [401], key
    for path in ("/livez", "/readyz?verbose", "/health", "/ping", "/version", "/livez?/../v1/models"):
        assert daemon.get(path)[0] == 200


def test_an_expectation_is_no_way_around_the_key(start_daemon: Start) -> None:
    daemon = start_daemon(*QUICK, INFD_API_KEY="secret").ready()
    body = b"Content-Length: %d\r\n\r\n%b" % (len(COMPLETION), COMPLETION)
    heard = {
        ("POST /v1/completions", "x", ""): [401],
        ("POST /v1/completions", "x", "secret"): [417],
        ("POST /v1/completions", "100-continue", ""): [401],
        ("POST /v1/completions", "100-Continue", "secret"): [100, 200],
        ("GET /v1/completions", "100-continue", "secret"): [405],
        ("POST /v1/nothing", "x", ""): [401],
        ("POST /v1/nothing", "x", "secret"): [417],
        ("POST /v1/nothing", "100-continue", "secret"): [404],
    }
    for (asked, expectation, key), expected in heard.items():
        head = f"{asked} HTTP/1.1\r\nHost: x\r\nExpect: {expectation}\r\nAuthorization: Bearer {key}\r\n"
        answer = answers_to(daemon, head.encode() + b"Connection: close\r\n" + body)
        assert statuses(answer) == expected, (asked, expectation, key)
        assert b"X-Request-Id: " in answer
        assert ("error" in json.loads(answer.rpartition(b"\r\n\r\n")[2])) == (expected[-1] != 200)


def test_bodies_too_large_or_compressed_are_refused_unread(start_daemon: Start) -> None:
    daemon = start_daemon(*QUICK, "--set", "server.max_body_bytes=100000").ready()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
    with unharmed(daemon), connected(daemon) as connection:
        for encoding in ("gzip", "GZIP", "deflate", "br", "identity, gzip", "x"):
            body = gzip.compress(b" " * 10**6 + COMPLETION)
            assert refusal(connection, COMPLETIONS, body, {"Content-Encoding": encoding}) == (400, None, None)
        for coding in (b"gzip, chunked", b"gzip\r\nTransfer-Encoding: chunked"):
            coded = b"Connection: close\r\nTransfer-Encoding: %b\r\n\r\n%x\r\n%b\r\n0\r\n\r\n"
            assert statuses(answers_to(daemon, head + coded % (coding, len(COMPLETION), COMPLETION))) == [400]
        with socket.create_connection(daemon.address, timeout=PATIENCE_S) as client:
            client.sendall(head + b"Content-Length: 999999999\r\n\r\n")
            assert statuses(client.recv(65536)) == [413]
        for size, status in ((100_001, 413), (50_000, 200)):
            body = b"".join(b"1\r\n%c\r\n" % byte for byte in COMPLETION.ljust(size))
            chunked = b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n" + body + b"0\r\n\r\n"
            assert statuses(answers_to(daemon, head + chunked)) == [status]


def test_refused_bodies_of_a_megabyte_leave_memory_as_it_was(start_daemon: Start) -> None:
    large = "x" * 1_000_000
    refused = [
        (COMPLETIONS, json.dumps({"prompt": large, "temperature": 9}).encode(), 400),
        (COMPLETIONS, json.dumps({"prompt": large})[:-1].encode(), 400),
        (CHAT, json.dumps({"messages": [{**USER, "content": large}], "max_tokens": -1}).encode(), 400),
        ("/nowhere", large.encode(), 404),
    ]
    daemon = start_daemon(*QUICK).ready()
    with connected(daemon) as connection:
        for path, body, status in refused:
            assert refusal(connection, path, body)[0] == status
    before = resident_kib(daemon)
    with unharmed(daemon), connected(daemon) as connection:
        for _ in range(100 if FULL else 15):
            for path, body, _ in refused:
                refusal(connection, path, body)

    assert resident_kib(daemon) - before < 20 * 1024


def test_too_many_choices_or_ids_are_refused_before_any_work(start_daemon: Start) -> None:
    daemon = start_daemon(
        *SLOW, "--set", "scheduler.max_waiting=1024", "--set", "scheduler.max_waiting_tokens=100000"
    ).ready()
    choices = {"prompt": ["a"] * 8, "n": 128, "max_tokens": 100, "stream": True}
    ids = {"prompt": [[token_id] * 2000 for token_id in range(60)], "max_tokens": 40, "stream": True}
    with connected(daemon) as connection:
        before = descriptors(daemon) + 1
        for flood in (choices, ids):
            with daemon.stream(**flood):
                for _ in range(5):
                    connection.request("POST", COMPLETIONS, json.dumps(flood), {"Content-Type": "application/json"})
                    answer = connection.getresponse()
                    error = json.loads(answer.read())["error"]
                    assert (answer.status, error["type"], error["code"]) == (429, "overloaded_error", "queue_full")
                    assert int(answer.headers["Retry-After"]) >= 1
            status = come_to_rest(daemon, before)
            assert status.accepted == sum(status.terminal.values())
            assert status.pages_referenced == 0


def test_pipelined_requests_are_answered_in_order(start_daemon: Start) -> None:
    daemon = start_daemon(*QUICK).ready()
    probe = b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"
    stream = written(COMPLETIONS, {"prompt": "a", "max_tokens": 20, "stream": True, "ignore_eos": True})
    last = b"GET /v1/nothing HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    with unharmed(daemon):
        answers = answers_to(daemon, probe + stream + written(COMPLETIONS, {"n": 0}) + probe * 200 + last)
        assert statuses(answers) == [200, 200, 400, *[200] * 200, 404]
        assert answers.count(b"data: [DONE]") == 1


def test_clients_that_are_killed_reset_or_half_closed_leave_nothing(start_daemon: Start) -> None:
    daemon = start_daemon(*QUICK, "--set", "scheduler.max_num_seqs=16").ready()
    long = {"prompt": "x", "max_tokens": 1500, "ignore_eos": True}
    streamed = written(COMPLETIONS, {**long, "stream": True})
    holding = (
        "import socket, sys\n"
        "clients = [socket.create_connection(('127.0.0.1', int(sys.argv[1]))) for _ in range(50)]\n"
        "for client in clients: client.sendall(bytes.fromhex(sys.argv[2]))\n"
        "clients[0].recv(1)\n"
        "print(flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", holding, str(daemon.address[1]), streamed.hex()]
    with unharmed(daemon):
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as clients:
            assert clients.stdout is not None
            assert clients.stdout.readline() == b"\n"
            clients.kill()
        for sent in (streamed, written(COMPLETIONS, long), streamed[:-5], streamed[:40], b""):
            for farewell in ("reset", "half", "close"):
                with socket.create_connection(daemon.address, timeout=PATIENCE_S) as client:
                    client.sendall(sent)
                    if sent == streamed:
                        assert client.recv(1) == b"H"
                    if farewell == "reset":
                        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                    elif farewell == "half":
                        client.shutdown(socket.SHUT_WR)


def test_many_signals_of_operators_disturb_no_request(start_daemon: Start) -> None:
    daemon = start_daemon(*QUICK).ready()
    with unharmed(daemon):
        for _ in range(50):
            for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGPIPE, signal.SIGWINCH):
                daemon.signal(number)
    assert daemon.process.poll() is None


def test_without_descriptors_streams_go_on_and_with_them_clients_are_served_again(start_daemon: Start) -> None:
    daemon = start_daemon(*QUICK).ready()
    with unharmed(daemon):
        _, hard = resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE, (descriptors(daemon) + 4, hard))
        clients = [socket.create_connection(daemon.address, timeout=PATIENCE_S) for _ in range(20)]
        turned_away = 0
        for client in clients:
            client.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
            try:
                turned_away += not client.recv(65536)
            except ConnectionError:
                turned_away += 1
        assert 0 < turned_away < len(clients)
        for client in clients:
            client.close()
        resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE, (hard, hard))
        assert daemon.get("/readyz")[0] == 200


def test_malformed_admin_requests_change_nothing_and_leak_nothing(start_daemon: Start) -> None:
    daemon = start_daemon(*QUICK).ready()
    asked = [
        (b"POST /v1/drain HTTP/1.1\r\nHost: x\r\nOrigin: http://page\r\n", 403),
        (b"GET /v1/drain HTTP/1.1\r\nHost: x\r\n", 405),
        (b"GET /v1/nothing HTTP/1.1\r\nHost: x\r\n", 404),
        (b"POST /v1/requests/%ff%0a/abort HTTP/1.1\r\nHost: x\r\n", 404),
        (b"POST /v1/requests/..%2f..%2fdrain/abort HTTP/1.1\r\nHost: x\r\n", 404),
        (b"POST /v1/requests/" + b"a" * 5000 + b"/abort HTTP/1.1\r\nHost: x\r\n", 404),
    ]
    with unharmed(daemon):
        for head, expected in asked:
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(daemon.admin_socket))
                client.sendall(head + b"Connection: close\r\n\r\n")
                answer = everything_from(client)
            assert statuses(answer) == [expected], head
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["status"] == expected
        for sent in (b"", b"GET /v1/sta", b"POST /v1/drain HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n"):
            for _ in range(20):
                with socket.socket(socket.AF_UNIX) as client:
                    client.connect(str(daemon.admin_socket))
                    client.sendall(sent)
    assert daemon.get("/readyz") == (200, b'{"state":"ready"}')


def test_extreme_sampling_parameters_change_no_neighbours_token(start_daemon: Start) -> None:
    """On a real model, one row's sampling parameters do not change other rows' tokens."""
    daemon = start_daemon("--device", "cpu", "--dtype", "float32", "--set", "device.threads=1").ready()
    everything = {str(token_id): 100 for token_id in range(512)}
    extremes: list[dict[str, Any]] = [
        {"logit_bias": everything, "repetition_penalty": 100},
        {"logit_bias": dict.fromkeys(everything, -100), "logprobs": 20},
        {"repetition_penalty": 1e-300, "logprobs": 20},
        {"repetition_penalty": 1e-38, "temperature": 0},
        {"temperature": 1e-300},
        {"temperature": 2, "top_p": 1e-320},
        {"top_k": 1, "min_p": 1, "top_p": 1e-9},
        {"presence_penalty": -2, "frequency_penalty": 2, "seed": -(2**63)},
        {"stop_token_ids": list(range(512))},
        {"min_tokens": 20, "stop": ["a", "e", " ", "\ufffd"] * 4, "include_stop_str_in_output": True},
        {"n": 64, "logprobs": 20},
    ]
    with unharmed(daemon), connected(daemon) as connection:
        for extreme in extremes:
            status, answer = post(connection, COMPLETIONS, {"prompt": "once", "max_tokens": 20, **extreme})
            assert status == 200, (extreme, answer)
            reasons = {choice["finish_reason"] for choice in answer["choices"]}
            assert reasons <= {"stop", "length"}, extreme


@pytest.mark.exhaustive
def test_a_damaged_checkpoint_exits_78_and_names_the_file(start_daemon: Start, tmp_path: Path) -> None:
    whole = {path.name: path.read_bytes() for path in embedded.path().iterdir()}
    weights = whole["model.safetensors"]
    size = struct.unpack("<Q", weights[:8])[0]
    header = json.loads(weights[8 : 8 + size])
    config = json.loads(whole["config.json"])
    layers = config["num_hidden_layers"]
    name = next(name for name, tensor in header.items() if name != "__metadata__" and len(tensor["shape"]) == 2)

    def with_header(**changed: Any) -> bytes:
        data = json.dumps(header | {name: {**header[name], **changed}}).encode()
        return struct.pack("<Q", len(data)) + data + weights[8 + size :]

    damages = {
        "truncated": ("model.safetensors", weights[:-100], "the header describes"),
        "reshaped": ("model.safetensors", with_header(shape=header[name]["shape"][::-1]), name),
        "another": ("config.json", json.dumps({**config, "num_hidden_layers": layers + 1}).encode(), "missing"),
    }
    daemons = {}
    for kind, (file, data, _) in damages.items():
        directory = tmp_path / kind
        directory.mkdir()
        for path, content in (whole | {file: data}).items():
            (directory / path).write_bytes(content)
        daemons[kind] = start_daemon("--device", "cpu", "--model", str(directory), "--set", "device.threads=1")
    for kind, daemon in daemons.items():
        assert daemon.exit_code() == 78, daemon.log_text()
        assert damages[kind][2] in daemon.log_text(), kind
        assert "Traceback" not in daemon.log_text()
