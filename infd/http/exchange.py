"""The state of one HTTP request, and the interface through which its streamed events are sent."""

from __future__ import annotations

import secrets
from contextlib import ExitStack
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct, field

from infd.http.accounts import Account
from infd.http.formats.openai import OPENAI_ERRORS

if TYPE_CHECKING:
    from infd.engine.admission.ticket import Ticket
    from infd.errors import RequestError
    from infd.http.auth import Key
    from infd.http.formats.base import Errors
    from infd.http.pieces import Pieces


class Events(Protocol):
    """The sender of a streamed answer. Every call sends whole events.

    writable  whether `write` may be called: the response has begun, and no earlier bytes are buffered
    begun     whether the response has begun; errors are then sent as events
    """

    begun: bool

    @property
    def writable(self) -> bool: ...

    def write(self, events: bytes) -> None: ...

    async def send(self, events: bytes) -> None:
        """Send events; wait for a slow reader. Raises ConnectionError if the client has disconnected."""

    async def send_pieces(self, events: Pieces) -> None:
        """Send events too large to be joined. No other bytes are sent between the pieces."""


class Exchange(Struct):
    """One HTTP request: its key, ids and ticket.

    account  limits and usage of the key
    error    the error reported to the client
    errors   encodes errors in the API's format; once the request is queued, in the answer's format
    place    the request's place under its key's cap; released when the handler returns, unless passed on by `pop_all`
    held     what the answer holds of `Backend.held`; released when the handler returns, unless `send` takes it over
    """

    client_id: str | None = None
    key: Key | None = None
    account: Account = field(default_factory=Account)
    ticket: Ticket | None = None
    error: RequestError | None = None
    errors: Errors = OPENAI_ERRORS
    place: ExitStack = field(default_factory=ExitStack)
    held: ExitStack = field(default_factory=ExitStack)
    _own_id: str = ""  # until the request has a ticket

    def begin(self, ticket: Ticket, client_id: str | None) -> None:
        """Set the ticket. The request id in the X-Request-Id header takes precedence over `client_id` from the body."""
        self.ticket = ticket
        self.client_id = self.client_id or client_id

    @property
    def id(self) -> str:
        """The request id in the X-Request-Id header and in the log."""
        if self.client_id:
            return self.client_id
        if self.ticket is not None:
            return self.ticket.id
        if not self._own_id:
            self._own_id = secrets.token_hex(12)
        return self._own_id

    @property
    def queued(self) -> bool:
        """Whether the request was queued. An error before queueing is a refusal."""
        return self.ticket is not None and bool(self.ticket.choices)

    @property
    def client(self) -> str:
        return "" if self.key is None else self.key.name

    def priority(self, requested: int | None) -> int:
        """Return the request's priority. Raises InvalidRequest below the key's smallest priority."""
        return requested or 0 if self.key is None else self.key.priority_of(requested)

    @property
    def tenant(self) -> str:
        return "" if self.key is None else self.key.tenant
