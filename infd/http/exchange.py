"""What is known of one request while it is answered."""

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
    """Where a streamed answer goes. Every call takes whole events.

    writable  whether `write` may be called: the reader has taken all that was written before
    begun     whether anything has been sent: an error is an event then, no response of its own
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
    """One request: who asks, under which id, and the work it caused.

    error   what the client was told
    errors  how the client is told: by its API, later by its answer's format
    """

    internal_id: str = field(default_factory=lambda: secrets.token_hex(12))
    client_id: str | None = None
    key: Key | None = None
    ticket: Ticket | None = None
    error: RequestError | None = None
    errors: Errors = OPENAI_ERRORS

    def begin(self, ticket: Ticket, client_id: str | None) -> None:
        """Note that work begins. An id in a header takes precedence over one in the body."""
        self.ticket = ticket
        self.client_id = self.client_id or client_id

    @property
    def id(self) -> str:
        """What the client sees as X-Request-Id and what the log knows the request by."""
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
