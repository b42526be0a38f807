"""What every route works with, and what is known of one request while it is answered."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Final

from aiohttp import web
from msgspec import Struct, field

from infd.engine.lifecycle.state import State
from infd.errors import NotReady
from infd.http.auth import InFlight
from infd.http.cors import Origins
from infd.http.sse import Streams

if TYPE_CHECKING:
    from infd.config import Config
    from infd.engine.admission.ticket import Ticket
    from infd.engine.engine import Engine
    from infd.errors import RequestError
    from infd.http.auth import Key, Keys
    from infd.http.served import ServedModel
    from infd.http.sse import EventStream
    from infd.offload import Offload
    from infd.telemetry.metrics import Metrics


# Of a body where no limit is configured. Five characters a token, each escaped in six bytes.
BODY_BYTES: Final = 2**20
BODY_BYTES_BESIDES: Final = 2**16
BODY_BYTES_A_TOKEN: Final = 32


class Service:
    """The engine and all that stands between it and HTTP."""

    def __init__(self, engine: Engine, config: Config, metrics: Metrics, keys: Keys, offload: Offload) -> None:
        self.engine = engine
        self.config = config
        self.metrics = metrics
        self.keys = keys
        self.offload = offload
        self.served: ServedModel | None = None  # the listener is open before the model is loaded
        self.streams = Streams()
        self.origins = Origins(config.server.cors_origins)
        self.in_flight = InFlight()
        self.bodies_bytes = 0  # received of requests that are not decoded yet

    @property
    def largest_body_bytes(self) -> int:
        """How large a body may be: what the settings say, or what the longest prompt could need.

        Decoded, a body can take fifty times its size, so a limit beyond any need is a way to take memory.
        """
        if (configured := self.config.server.max_body_bytes) is not None:
            return configured
        tokens = 0 if self.served is None else self.served.max_model_len
        return max(BODY_BYTES, BODY_BYTES_BESIDES + BODY_BYTES_A_TOKEN * tokens)

    def model(self) -> ServedModel:
        """Return what is served. Raises NotReady while nothing is."""
        if self.served is None:
            lifecycle = self.engine.lifecycle
            # The engine may be ready a moment before its tokenizer is.
            state = State.STARTING if lifecycle.state is State.READY else lifecycle.state
            raise NotReady(state.value, lifecycle.reason)
        return self.served


class Exchange(Struct):
    """One HTTP request: who asks, under which id, and the work it caused."""

    internal_id: str = field(default_factory=lambda: secrets.token_hex(12))
    client_id: str | None = None
    key: Key | None = None
    ticket: Ticket | None = None
    error: RequestError | None = None  # what the client was told
    events: EventStream | None = None  # where its answer goes, if streamed

    def begin(self, ticket: Ticket, client_id: str | None) -> None:
        """Work begins. An id in a header counts more than one in the body."""
        self.ticket = ticket
        self.client_id = self.client_id or client_id

    @property
    def id(self) -> str:
        """What the client sees as X-Request-Id and what the log knows the request by."""
        return self.client_id or (self.internal_id if self.ticket is None else self.ticket.id)

    @property
    def queued(self) -> bool:
        """Whether it got as far as that; before, whatever ends it is a refusal."""
        return self.ticket is not None and bool(self.ticket.choices)

    @property
    def client(self) -> str:
        return "" if self.key is None else self.key.name

    def priority(self, asked: int | None) -> int:
        """Return the place in the queue that the request gets. Raises InvalidRequest."""
        return asked or 0 if self.key is None else self.key.place(asked)

    @property
    def tenant(self) -> str:
        return "" if self.key is None else self.key.tenant


SERVICE = web.AppKey("service", Service)
EXCHANGE = web.RequestKey("exchange", Exchange)
