from __future__ import annotations

import ssl
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec
import pytest

from infd.loadgen.stream import RequestFailed, not_connected, read, text_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def event(fields: dict[str, object]) -> bytes:
    return b"data: " + msgspec.json.encode(fields) + b"\n\n"


def chunk(text: str, **more: object) -> bytes:
    return event({"choices": [{"delta": {"content": text}, **more}]})


async def arriving(clock: Clock, pieces: list[tuple[float, bytes]]) -> AsyncIterator[bytes]:
    for at, piece in pieces:
        clock.now = 100.0 + at
        yield piece


async def test_times_count_from_the_due_time_and_gaps_between_chunks_with_text() -> None:
    clock = Clock()
    usage = {"prompt_tokens": 9, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4}}
    pieces = [
        (0.10, event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})),
        (0.25, chunk("a")),
        (0.30, chunk("b")),
        (0.50, chunk("c", finish_reason="stop")),
        (0.75, event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n"),
    ]
    kept: list[bytes] = []
    sample = await read(arriving(clock, pieces), 99.5, kept, clock)

    assert sample.ttft_s == pytest.approx(0.75)
    assert sample.gaps_s == pytest.approx([0.05, 0.2])
    assert sample.e2e_s == pytest.approx(1.25)
    assert sample.per_token_s == pytest.approx(0.5 / 4)
    assert (sample.input_tokens, sample.cached_tokens, sample.output_tokens) == (9, 4, 5)
    assert sample.finish == "stop"
    assert text_of(kept) == "abc"


async def test_a_chunk_cut_by_the_network_counts_when_its_line_is_whole() -> None:
    clock = Clock()
    whole = chunk("a")
    pieces = [(0.1, whole[:20]), (0.2, whole[20:]), (0.3, b"data: [DONE]\n\n")]

    assert (await read(arriving(clock, pieces), 100.0, None, clock)).ttft_s == pytest.approx(0.2)


async def test_an_answer_without_text_fails_by_name() -> None:
    clock = Clock()
    with pytest.raises(RequestFailed, match="no text: the model ended its answer at once"):
        await read(arriving(clock, [(0.1, b"data: [DONE]\n\n")]), 100.0, None, clock)
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":8}}\n\n'
    with pytest.raises(RequestFailed, match="no text: the answer's 8 tokens are no text"):
        await read(arriving(clock, [(0.1, usage), (0.2, b"data: [DONE]\n\n")]), 100.0, None, clock)


@pytest.mark.parametrize("content", [b"[]", b'"\xff"', b'"\\u12"'])
def test_a_line_whose_text_cannot_be_read_fails_by_name(content: bytes) -> None:
    with pytest.raises(RequestFailed, match="malformed event"):
        text_of([b'{"choices":[{"delta":{"content":%b}}]}' % content])


def test_a_handshake_that_fails_is_logged_with_its_reason_and_the_remedy() -> None:
    untrusted = ssl.SSLCertVerificationError(1, "certificate verify failed")
    untrusted.verify_message = "self-signed certificate"
    plain = ssl.SSLError(1, "[SSL] record layer failure")
    key: Any = None
    told = [
        str(not_connected(aiohttp.ClientConnectorCertificateError(key, untrusted), "https://u")),
        str(not_connected(aiohttp.ClientConnectorSSLError(key, plain))),
        str(not_connected(aiohttp.ClientConnectorError(key, OSError(111, "x")), "http://u")),
    ]

    assert told[0].startswith(
        "no TLS connection: https://u answers, but its certificate is not trusted (self-signed cert"
    )
    assert told[0].endswith("name its authority with --cacert, or accept any with --insecure")
    assert told[1].startswith("no TLS connection: it does not speak TLS ([ssl] record layer failure); if it speaks")
    assert told[2] == "unreachable: http://u: Connection refused"
