"""The state shared by all routes: backend, API keys, event streams, stored responses, bytes of received bodies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from infd.http.accounts import Accounts
from infd.http.auth import InFlight
from infd.http.backend import Backend
from infd.http.background import Background
from infd.http.cors import Origins
from infd.http.proxies import Proxies
from infd.http.sse import Streams

if TYPE_CHECKING:
    from infd.config import LiveConfig
    from infd.engine.engine import Engine
    from infd.http.auth import Keys
    from infd.http.store.entry import Store
    from infd.mcp.servers import Servers
    from infd.offload import Offload
    from infd.telemetry.metrics import Metrics


# The default limit of a body grows with the context length: five characters per token, each escaped in six bytes.
BODY_BYTES: Final = 2**20
POOLED_BODY_BYTES: Final = 2**23  # 2,048 inputs of 512 tokens, each token of eight bytes
BODY_BYTES_BESIDES: Final = 2**16
BODY_BYTES_PER_TOKEN: Final = 32


class Service(Backend):
    """The backend, and the state of the HTTP server."""

    def __init__(
        self,
        engine: Engine,
        live: LiveConfig,
        metrics: Metrics,
        keys: Keys,
        offload: Offload,
        store: Store,
        tool_servers: Servers,
    ) -> None:
        super().__init__(engine, live, offload)
        self.tool_servers = tool_servers
        self.metrics = metrics
        self.keys = keys
        self.streams = Streams()
        self.store = store
        self.background = Background(store, live)
        self.origins = Origins(live)
        self.proxies = Proxies(live)
        self.in_flight = InFlight()
        self.accounts = Accounts(live, metrics)
        self.bodies_bytes = 0  # received bytes of all bodies that are not decoded yet

    @property
    def largest_body_bytes(self) -> int:
        """Maximum size of a body: the setting, or a bound for the longest possible prompt.

        A decoded body can take fifty times its size, so an unnecessarily high limit would let clients exhaust memory.
        """
        if (configured := self.config.server.max_body_bytes) is not None:
            return configured
        if self.served is None:
            return BODY_BYTES
        least = BODY_BYTES if self.served.generates else POOLED_BODY_BYTES
        return max(least, BODY_BYTES_BESIDES + BODY_BYTES_PER_TOKEN * self.served.max_model_len)
