"""The objects on which `generate` depends, for every API: engine, settings, threads and served model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from infd.engine.lifecycle.state import State
from infd.errors import NotReady
from infd.http.held import Held

if TYPE_CHECKING:
    from infd.config import Config, LiveConfig
    from infd.engine.engine import Engine
    from infd.http.served_model import ServedModel
    from infd.offload import Offload


class Backend:
    """Engine, settings, threads and served model. `served` is None until a model is loaded."""

    def __init__(self, engine: Engine, live: LiveConfig, offload: Offload) -> None:
        self.engine = engine
        self.live = live
        self.offload = offload
        self.served: ServedModel | None = None
        self.held = Held(live)

    @property
    def config(self) -> Config:
        """The settings in force."""
        return self.live.now

    def model(self) -> ServedModel:
        """Return the served model. Raises NotReady while no model is loaded."""
        if self.served is None:
            lifecycle = self.engine.lifecycle
            # The engine may be ready a moment before `served` is set.
            state = State.STARTING if lifecycle.state is State.READY else lifecycle.state
            raise NotReady(state.value, lifecycle.reason)
        return self.served

    def fingerprint(self) -> str:
        """Return the `system_fingerprint`, which changes with the weights in use and with infd's version."""
        generation = self.engine.weights_generation
        return self.model().fingerprint + (f"_{generation}" if generation else "")
