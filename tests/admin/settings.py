"""Settings of a daemon under test that has no files."""

from __future__ import annotations

from infd.config import Config, Environment, LiveConfig
from infd.daemon.reload import Reloader, Replacement
from infd.offload import Offload
from infd.telemetry.events import Events


def fixed(live: LiveConfig | None = None) -> Reloader:
    """The built-in settings, or `live`; every change is refused."""
    return Reloader(live or LiveConfig(Config()), None, Environment(), Offload(), Events(), _keep)


async def _keep(replacement: Replacement) -> None:
    """Change nothing."""
