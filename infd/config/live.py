"""The settings in force of a running daemon, which a reload replaces."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from infd.config.tree import Config


class LiveConfig:
    """Holds the settings in force.

    A component keeps this object and reads `now` each time it needs a setting; it copies none of them, because a copy
    would outlive a reload. Only settings marked `live` ever differ from those at the start.
    """

    __slots__ = ("now",)

    def __init__(self, config: Config) -> None:
        self.now = config
