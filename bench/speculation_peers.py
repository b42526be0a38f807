"""Other servers that answer the requests of bench/speculation.jsonl with drafts of their own."""

from __future__ import annotations

import json
import shlex
import time
from contextlib import closing
from http.client import HTTPConnection
from typing import TYPE_CHECKING, Any

from server_process import ServerProcess, free_port
from speculation_figures import Answered, Count
from speculation_requests import asked

if TYPE_CHECKING:
    from pathlib import Path

WARMING = 4  # answers of a peer that are not measured: vLLM's first ones are slow


class Peer:
    """A running server of OpenAI's API, which answers one request at a time. Its drafts are set by its command."""

    def __init__(self, server: ServerProcess) -> None:
        self.name = server.name
        self._server = server
        with closing(self._connection()) as connection:
            connection.request("GET", "/v1/models")
            self._model = json.loads(connection.getresponse().read())["data"][0]["id"]
        for _ in range(WARMING):
            self.answer([asked({"prompt": "Count from one to a hundred."}, 64)])

    def close(self) -> None:
        self._server.thaw()

    def _connection(self) -> HTTPConnection:
        # A server closes idle connections while it is stopped, so each request has its own.
        return HTTPConnection(self._server.url.removeprefix("http://"))

    def answer(self, requests: list[dict[str, Any]]) -> Answered:
        """Answer a request. The tokens are empty if the server does not report them."""
        (body,) = requests
        streamed = {"stream": True, "stream_options": {"include_usage": True}, "cache_prompt": False}
        sent = json.dumps({**body, **streamed, "model": self._model})
        self._server.thaw()
        arrived, tokens, told = [], [], {}
        with closing(self._connection()) as connection:
            connection.request("POST", "/v1/chat/completions", sent, {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise SystemExit(f"{self.name}: {response.status} {response.read().decode()}")
            for line in response:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line.removeprefix(b"data: "))
                told |= {name: event[name] for name in ("usage", "timings") if event.get(name)}
                for choice in event["choices"]:
                    tokens += choice.get("token_ids") or []
                    # The end's token has no text.
                    if choice["delta"].get("content") or choice.get("finish_reason"):
                        arrived.append(time.perf_counter())
        self._server.freeze()
        generated, took, drafts = told["usage"]["completion_tokens"], arrived[-1] - arrived[0], (0, 0)
        if (timings := told.get("timings")) is not None:
            generated, took = timings["predicted_n"], timings["predicted_ms"] / 1000
            drafts = timings.get("draft_n", 0), timings.get("draft_n_accepted", 0)
        # Spans with drafts are not reported.
        return Answered(Count(generated - 1 if took else 0, took, 0, *drafts), [tokens] if tokens else [])


def described_server(described: str, logs: Path) -> ServerProcess:
    """Return the server of NAME=COMMAND, not started."""
    name, command = described.split("=", 1)
    port = free_port()
    words = [word.replace("$port", str(port)) for word in shlex.split(command)]
    return ServerProcess(name, words, port, ready="/health", start_s=300, log=logs / f"{name}.log")
