"""One request while it is answered, and where its events go."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct, field

from infd.http.formats.openai import OPENAI_ERRORS

if TYPE_CHECKING:
    from infd.engine.admission.ticket import Ticket
    from infd.errors import RequestError
    from infd.http.auth import Key
    from infd.http.formats.base import Errors
    from infd.http.pieces import Pieces


class Events(Protocol):
    """Sends a streamed answer. Every call takes whole events.

    writable  whether `write` may be called: the reader has taken everything written before
    begun     whether anything has been sent: from then on errors are events
    """

    begun: bool

    @property
    def writable(self) -> bool: ...

    def write(self, events: bytes) -> None: ...

    async def send(self, events: bytes) -> None:
        """Send, waiting for a reader that lags. Raises ConnectionError when it is gone."""

    async def send_pieces(self, events: Pieces) -> None:
        """Send events too large to be joined; nothing comes between their pieces."""


class Exchange(Struct):
    """One request: its key, its ids, its ticket.

    error   that was reported to the client
    errors  how errors are reported: in the API's format, then in the answer's
    """

    internal_id: str = field(default_factory=lambda: secrets.token_hex(12))
    client_id: str | None = None
    key: Key | None = None
    ticket: Ticket | None = None
    error: RequestError | None = None
    errors: Errors = OPENAI_ERRORS

    def begin(self, ticket: Ticket, client_id: str | None) -> None:
        """Note the ticket. An id in a header takes precedence over one in the body."""
        self.ticket = ticket
        self.client_id = self.client_id or client_id

    @property
    def id(self) -> str:
        """The request's id in the X-Request-Id header and in the log."""
        return self.client_id or (self.internal_id if self.ticket is None else self.ticket.id)

    @property
    def queued(self) -> bool:
        """Whether the request was queued; whatever ends it before is a refusal."""
        return self.ticket is not None and bool(self.ticket.choices)

    @property
    def client(self) -> str:
        return "" if self.key is None else self.key.name

    def priority(self, asked: int | None) -> int:
        """Return the priority that the request gets. Raises InvalidRequest."""
        return asked or 0 if self.key is None else self.key.place(asked)

    @property
    def tenant(self) -> str:
        return "" if self.key is None else self.key.tenant
