"""HTTP clients: requests generated from bytes, their cuts and ends, and a parser of the answers."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tests.fuzz.grammar import Chooser

LAST: Final = b"GET /livez HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"

# The first few of each are ordinary: a server must answer them and keep the connection.
VERSIONS: Final = ("1.1", "1.1", "1.0", "0.9", "2.0", "1.2", "3.0", "1.", "11.1", "1.1 ", "")
COMPLETIONS: Final = "/v1/completions"
TARGETS: Final = (
    ("POST", COMPLETIONS),
    ("GET", "/livez"),
    ("POST", "/v1/chat/completions"),
    ("GET", "/v1/models"),
    ("POST", "/tokenize"),
    ("GET", "/metrics"),
    ("POST", "/nowhere"),
    ("GET", COMPLETIONS),
    ("OPTIONS", COMPLETIONS),
    ("DELETE", "/load"),
    ("HEAD", "/livez"),
    ("HEAD", "/nowhere"),
    ("OPTIONS", "*"),
    ("CONNECT", "a:1"),
    ("GET", "http://a/livez"),
    ("GET", "//"),
    ("GET", "/%"),
    ("GET", "/\x7f"),
    ("PRI", "*"),
    ("get", "/livez"),
    ("M-SEARCH", "/"),
    ("GET", "/" + "x" * 17_000),
)
ORDINARY_TARGETS: Final = 10
HEADERS: Final = (
    "X-Request-Id: mine",
    "Origin: http://b\r\nAccess-Control-Request-Method: POST",
    "Authorization: Bearer secret",
    "Accept-Encoding: gzip, br",
    "Expect: 100-continue",
    "Connection: keep-alive",
    "Content-Encoding: gzip",
    "X-Empty:",
    "Connection: close",
    "Upgrade: websocket\r\nConnection: Upgrade",
    "Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA",
    "Expect: a-miracle",
    "Host: b",
    "Transfer-Encoding: gzip",
    "Content-Length: 3",
    "Bad Header",
    " folded",
    "X-Nul: \0",
    "X-Long: " + "x" * 17_000,
    "\r\n".join(["X-Many: x"] * 120),
    "Sec-WebSocket-Key1: x",
    "X-Bytes: \xff\xfe",
)
ORDINARY_HEADERS: Final = 6
BODIES: Final = (
    b'{"prompt":[5,6,7],"max_tokens":2,"seed":0}',
    b'{"prompt":[5,6,7],"max_tokens":3,"stream":true,"seed":0}',
    b'{"messages":[{"role":"user","content":"hi"}],"max_tokens":3,"stream":true,"seed":0}',
    b'{"prompt":"a","n":3,"max_tokens":3}',
    b"",
    b"{",
    b'{"prompt":' + b" " * 70_000 + b"[5],",
    b" " * 200_000,
)
LENGTHS: Final = ("%d", "%d", "0%d", "+%d", "-%d", "%d, %d", "%d0", "99999999999999999999", "0x%x", " %d ", "")


def made(choose: Chooser) -> tuple[bytes, int | None]:
    """Return a few pipelined requests, and the number of answers required if all are ordinary."""
    sent, count = b"", 1 + choose.below(3)
    ordinary = True
    for _ in range(count):
        request, usual = _request(choose)
        sent += request
        ordinary = ordinary and usual
    return sent, count if ordinary else None


def _request(choose: Chooser) -> tuple[bytes, bool]:
    """Return a request, and whether it is ordinary. Most parts are, so that a rare one meets ordinary ones."""
    odd = choose.below(8)  # selects the part that may be unusual
    version = choose.pick(VERSIONS) if odd == 1 else "1.1"
    method, target = choose.pick(TARGETS if odd == 2 else TARGETS[:ORDINARY_TARGETS])
    among = HEADERS if odd == 3 else HEADERS[:ORDINARY_HEADERS]
    headers = [choose.pick(among) for _ in range(choose.below(4))]
    body = choose.pick(BODIES) if method == "POST" or odd == 4 else b""
    framing, framed, whole = _framed(body, choose, odd=odd == 5)
    # A refusal before the last chunk closes the connection.
    whole = whole and ((method == "POST" and target != "/nowhere") or "chunked" not in str(framing))
    host = [] if odd == 6 and choose.below(2) else ["Host: a"]
    lines = [f"{method} {target} HTTP/{version}" if version else f"{method} {target}", *host, *headers, *framing]
    end = "\n" if odd == 7 and choose.below(2) else "\r\n"
    head = (end.join(lines) + end + end).encode("latin-1")
    return head + framed, odd in (0, 4) and whole and "Expect" not in str(headers)


def _framed(body: bytes, choose: Chooser, *, odd: bool) -> tuple[list[str], bytes, bool]:
    """Return headers that frame a body, the framed body, and whether the frame is valid."""
    if choose.below(2) == 0:
        if not odd:
            return ([f"Content-Length: {len(body)}"] if body else []), body, True
        length = choose.pick(LENGTHS)
        cut = choose.below(3)
        size = length % ((len(body),) * length.count("%")) if "%" in length else length
        return [f"Content-Length: {size}"], body[: len(body) // cut] if cut else body, False
    small = max(1 + choose.below(255), len(body) // 4096)  # instrumented, a chunk takes about 50 us
    piece = (len(body), small, 5000, 1)[choose.below(4 if len(body) < 1000 else 3)] or 1
    chunks = [body[at : at + piece] for at in range(0, len(body), piece)]
    how = choose.below(12) if odd else choose.below(3)
    coding = ("chunked", "gzip, chunked", "chunked, chunked", "identity", "xchunked", "")[choose.below(6) if odd else 0]
    sizes = ("%x", "%X", "000%x", "%x;a=b", '%x;a="\xff"', "%x ", "0x%x", "-%x", "%xz", "%x\n", "f%x", "%x\r\n")
    framed = b"".join(sizes[how].encode("latin-1") % len(chunk) + b"\r\n" + chunk + b"\r\n" for chunk in chunks)
    ends = (b"0\r\n\r\n", b"0\r\nTrailer: x\r\n\r\n", b"", b"0\r\n", b"0\r\nBad\r\n\r\n", b"00\r\n\r\n", b"zz\r\n")
    end = ends[choose.below(len(ends)) if odd else 0]
    return [f"Transfer-Encoding: {coding}"], framed + end, not odd


def cut(sent: bytes, how: int) -> list[bytes]:
    """Cut bytes: nowhere, at every byte, at one place, or into equal pieces."""
    match how & 3:
        case 0:
            return [sent]
        case 1 if len(sent) <= 1024:
            return [sent[at : at + 1] for at in range(len(sent))]
        case 2:
            at = len(sent) * (how >> 2) // 64
            return [piece for piece in (sent[:at], sent[at:]) if piece]
        case _:
            size = max(1 + (how >> 2) ** 2, len(sent) // 100)
            return [sent[at : at + size] for at in range(0, len(sent), size)]


_HEAD: Final = re.compile(rb"HTTP/1\.1 (\d{3}) [^\r\n]*\r\n((?:[!-9;-~]+: ?[^\r\n]*\r\n)*)\r\n")
_LENGTH: Final = re.compile(rb"^content-length: (\d+)\r\n", re.IGNORECASE | re.MULTILINE)
_CHUNKED: Final = re.compile(rb"^transfer-encoding: chunked\r\n", re.IGNORECASE | re.MULTILINE)
_CHUNK: Final = re.compile(rb"([0-9a-f]+)\r\n")


def statuses(said: bytes, *, cut_off: bool) -> list[int]:
    """Parse the answers on one connection; return their statuses, without 100 Continue.

    cut_off  whether the last answer may be incomplete, because the client closed its side

    Raises AssertionError for bytes that are not HTTP/1.1.
    """
    found, at = [], 0
    while at < len(said):
        head = _HEAD.match(said, at)
        if head is None:
            assert cut_off, f"no status line and headers: {said[at : at + 200]!r}"
            assert b"\r\n\r\n" not in said[at:], f"no HTTP/1.1 head: {said[at : at + 200]!r}"
            break
        status, at = int(head[1]), head.end()
        if status == 100:
            continue
        found.append(status)
        if length := _LENGTH.search(head[2]):
            # An answer to HEAD has no body.
            if at < len(said) and not said.startswith(b"HTTP/1.1 ", at):
                at += int(length[1])
        elif _CHUNKED.search(head[2]):
            at = _after_chunks(said, at)
        elif status not in (204, 304):
            at = len(said)
        assert at <= len(said) or cut_off, f"an answer is incomplete: {said[-200:]!r}"
    return found


def _after_chunks(said: bytes, at: int) -> int:
    """Return the end of the chunks that begin here; beyond the data if chunks are missing."""
    while chunk := _CHUNK.match(said, at):
        size = int(chunk[1], 16)
        at = chunk.end() + size + 2
        assert said[at - 2 : at] in (b"\r\n", b"\r", b""), f"a chunk has no end: {said[:at][-200:]!r}"
        if not size:
            return at
    assert at >= len(said) or _CHUNK.match(said[at:] + b"0\r\n"), f"no chunk: {said[at : at + 200]!r}"
    return len(said) + 1
