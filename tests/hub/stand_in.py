"""A hub of our own: the few addresses of huggingface.co that fetching a model needs, on this machine."""

from __future__ import annotations

import hashlib
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

COMMIT = "c" * 40


class StandIn(ThreadingHTTPServer):
    """Serves repositories from memory.

    files    repository to its files: path to content
    gated    repositories whose terms are not accepted
    tokens   accepted tokens; empty: no token is required
    broken   every answer is a 500
    asked    requests: (method, path)
    held     files are not sent until this is set
    waiting  set once a request waits for a file
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, Mapping[str, bytes]] = {}
        self.gated: set[str] = set()
        self.tokens: set[str] = set()
        self.broken = False
        self.asked: list[tuple[str, str]] = []
        self.held = threading.Event()
        self.held.set()
        self.waiting = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def fetched(self) -> set[str]:
        """Return the names of files whose content was asked for."""
        return {path.partition("/resolve/")[2].partition("/")[2] for verb, path in self.asked if verb == "GET"} - {""}


class Handler(BaseHTTPRequestHandler):
    server: StandIn

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.asked.append((self.command, path))
        if self.server.broken:
            return self._send(500, b"out of order")
        if path.startswith("/api/models/"):
            org, name, *rest = path.removeprefix("/api/models/").split("/")
        else:
            org, name, *rest = path.removeprefix("/").split("/")
        repository = f"{org}/{name}"
        files = self.server.files.get(repository)
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if files is None or (self.server.tokens and token not in self.server.tokens):
            return self._send(401, b"{}", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
        if repository in self.server.gated and rest[0] == "resolve":
            return self._send(403, b"{}", {"X-Error-Code": "GatedRepo", "X-Error-Message": "restricted"})
        revision = rest[1] if len(rest) > 1 else "main"
        if revision not in ("main", COMMIT):
            return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound", "X-Error-Message": "Invalid rev"})
        if path.startswith("/api/"):
            return self._send(200, json.dumps(_tree(files) if rest[0] == "tree" else _info(repository, files)).encode())
        file = "/".join(rest[2:])
        if file not in files:
            return self._send(404, b"{}", {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"})
        self.server.waiting.set()
        self.server.held.wait()
        self._send(200, files[file], {"ETag": f'"{_id(files[file])}"', "X-Repo-Commit": COMMIT})
        return None

    def _send(self, status: int, content: bytes, headers: Mapping[str, str] = {}) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


def _id(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


def _tree(files: Mapping[str, bytes]) -> list[dict[str, object]]:
    return [
        {"type": "file", "path": path, "size": len(content), "oid": _id(content)} for path, content in files.items()
    ]


def _info(repository: str, files: Mapping[str, bytes]) -> dict[str, object]:
    siblings = [{"rfilename": path} for path in files]
    return {"id": repository, "sha": COMMIT, "private": False, "tags": [], "downloads": 0, "siblings": siblings}


@contextmanager
def stand_in() -> Iterator[StandIn]:
    """Run a StandIn."""
    server = StandIn()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, name="stand-in")
    thread.start()
    try:
        yield server
    finally:
        server.held.set()
        server.shutdown()
        server.server_close()
        thread.join()
