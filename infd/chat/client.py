"""Client of a chat endpoint with streamed answers."""

from __future__ import annotations

import http.client
import ssl
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from infd.errors import KeyRefused, NotAnswered, RequestRefused, UsageError
from infd.sockets.tls import failed_handshake
from infd.unixhttp import UnixConnection

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence
    from pathlib import Path

    from infd.config import ServerConfig

UNIX: Final = "unix:"
PATIENCE_S: Final = 60.0  # a live infd server sends an event or a ping at least every 15 s
LONGEST_LINE: Final = 2**24
_DATA: Final = b"data:"
_DONE: Final = b"[DONE]"
_START: Final = "start a daemon with `infd start`, or name another with --url"


def address(server: ServerConfig) -> str:
    """Return the URL at which a client on this machine reaches a server with these settings."""
    host = server.host[0]
    if host.startswith(UNIX):
        return host
    host = host.removeprefix("[").removesuffix("]")
    if host in ("0.0.0.0", "::"):
        host = "localhost"
    scheme = "https" if server.tls_certificate else "http"
    return f"{scheme}://[{host}]:{server.port}" if ":" in host else f"{scheme}://{host}:{server.port}"


def read_key(file: Path) -> str:
    """Return the API key in a file. Raises UsageError for a file that cannot be read or is not ASCII."""
    try:
        return file.read_text(encoding="ascii").strip()
    except OSError as error:
        raise UsageError(f"--key-file {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"--key-file {file}: it contains more than a key") from error


class Turn(Struct, frozen=True, omit_defaults=True):
    """One message of a conversation."""

    role: str
    content: str


class AnswerPart(Struct, frozen=True):
    """New text of an answer: part of the thought, of the content, or of both."""

    thought: str = ""
    content: str = ""


class Ending(Struct, frozen=True):
    """The end of an answer.

    finish    finish_reason; empty if the server reports none
    tokens    number of tokens; None: not reported by the server
    tokens_s  tokens per second; None: not reported by the server
    """

    finish: str = ""
    tokens: int | None = None
    tokens_s: float | None = None


class _Delta(Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Usage(Struct):
    completion_tokens: int = 0


class _Timings(Struct):
    predicted_per_second: float | None = None


class _Error(Struct):
    message: str = ""


class _Choice(Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)
    finish_reason: str | None = None
    error: _Error | None = None


class _Chunk(Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    timings: _Timings | None = None
    error: _Error | None = None


class _Model(Struct):
    id: str


class _Models(Struct):
    data: list[_Model]


class ChatClient:
    """Client of the server at an http://, https:// or unix:/path URL; an HTTP URL may end with /v1."""

    def __init__(self, url: str, key: str = "", tls: ssl.SSLContext | None = None) -> None:
        """Parse `url`, without connecting. `tls`: for https; None: http.client's.

        Raises UsageError for a URL of another scheme or without a host.
        """
        self.url = url
        self._tls = tls
        self._headers = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        if url.startswith(UNIX):
            self._prefix = "/v1"
            return
        try:
            parts = urlsplit(url)
            usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:
            usable = False
        if not usable:
            raise UsageError(f"--url {url}: expected http://HOST:PORT, https://HOST or unix:/PATH")
        self._prefix = parts.path.rstrip("/").removesuffix("/v1") + "/v1"

    def models(self) -> list[str]:
        """Return the names of the served models. Raises NotAnswered."""
        connection = self._connect()
        try:
            body = self._request(connection, "GET", "/models", None).read()
            return [model.id for model in msgspec.json.decode(body, type=_Models).data]
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise NotAnswered(f"{self.url} is not an OpenAI-compatible server: {error}") from None
        except (OSError, http.client.HTTPException) as error:
            raise self._lost(error) from None
        finally:
            connection.close()

    def ask(self, messages: Sequence[Turn], options: dict[str, Any]) -> Generator[AnswerPart | Ending]:
        """Yield the answer's parts, then its Ending. Closing the iterator cancels the request. Raises NotAnswered."""
        asked = {"messages": messages, "stream": True, "stream_options": {"include_usage": True}, **options}
        connection = self._connect()
        try:
            response = self._request(connection, "POST", "/chat/completions", msgspec.json.encode(asked))
            yield from self._read(response)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise NotAnswered(f"{self.url} sent an event that is not a chat's: {error}") from None
        except (OSError, http.client.HTTPException) as error:
            raise self._lost(error) from None
        finally:
            connection.close()

    def _read(self, response: http.client.HTTPResponse) -> Generator[AnswerPart | Ending]:
        finish, tokens, tokens_s = "", None, None
        while line := response.readline(LONGEST_LINE):
            data = line.removeprefix(_DATA).strip()
            if not line.startswith(_DATA) or not data:
                continue
            if data == _DONE:
                break
            chunk = msgspec.json.decode(data, type=_Chunk)
            if chunk.error is not None:
                raise NotAnswered(chunk.error.message)
            if chunk.usage is not None:
                tokens = chunk.usage.completion_tokens
            if chunk.timings is not None:
                tokens_s = chunk.timings.predicted_per_second
            for choice in chunk.choices[:1]:
                finish = choice.finish_reason or finish
                delta = choice.delta
                thought, content = delta.reasoning_content or delta.reasoning or "", delta.content or ""
                if thought or content:
                    yield AnswerPart(thought, content)
                if choice.error is not None:
                    raise NotAnswered(choice.error.message)
        else:
            raise NotAnswered(f"{self.url} broke off in the middle of its answer")
        yield Ending(finish, tokens, tokens_s)

    def _connect(self) -> http.client.HTTPConnection:
        if self.url.startswith(UNIX):
            return UnixConnection(self.url.removeprefix(UNIX), PATIENCE_S)
        parts = urlsplit(self.url)
        host = parts.hostname or ""
        if parts.scheme == "https":
            return http.client.HTTPSConnection(host, parts.port, timeout=PATIENCE_S, context=self._tls)
        return http.client.HTTPConnection(host, parts.port, timeout=PATIENCE_S)

    def _request(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None
    ) -> http.client.HTTPResponse:
        """Send a request and return the response if its status is 200. Raises NotAnswered."""
        try:
            connection.connect()
        except ssl.SSLError as error:
            raise self._lost(error) from None
        except OSError as error:
            raise NotAnswered(f"no daemon answers at {self.url} ({error.strerror or error}); {_START}") from None
        connection.request(method, self._prefix + path, body, self._headers)
        response = connection.getresponse()
        if response.status == http.HTTPStatus.OK:
            return response
        try:
            refusal = msgspec.json.decode(response.read(), type=_Chunk).error
        except (msgspec.MsgspecError, UnicodeDecodeError):
            refusal = None
        reason = refusal.message if refusal is not None and refusal.message else f"{response.status} {response.reason}"
        if response.status == http.HTTPStatus.BAD_REQUEST or (
            response.status == http.HTTPStatus.NOT_FOUND and refusal is not None  # a model that is not served
        ):
            raise RequestRefused(reason)
        if response.status == http.HTTPStatus.UNAUTHORIZED:
            raise KeyRefused(f"{reason}; give a key in INFD_API_KEY or with --key-file")
        if response.status == http.HTTPStatus.FORBIDDEN:
            raise KeyRefused(reason)
        raise NotAnswered(reason)

    def _lost(self, error: Exception) -> NotAnswered:
        if isinstance(error, ssl.SSLError):
            return NotAnswered(f"{self.url} answers, but {failed_handshake(error)}")
        if isinstance(error, TimeoutError):
            return NotAnswered(f"{self.url} has sent nothing for {PATIENCE_S:g} s")
        advice = ""
        if isinstance(error, http.client.RemoteDisconnected) and self.url.startswith("http:"):
            advice = "; if it speaks TLS, write https:// in place of http://"
        elif isinstance(error, ConnectionError) and self.url.startswith("https:"):
            advice = "; if it asks for a client's certificate, give one with --cert and --key"
        return NotAnswered(f"lost the connection to {self.url}: {str(error) or type(error).__name__}{advice}")
