"""Every setting, in one frozen tree.

Flags, man page, `infd config show` and validation derive from the sections' fields.
Facts derived at run time (pages, step_tokens in force) are not settings.
"""

from __future__ import annotations

from typing import Any

from infd.config.section import Section
from infd.config.sections.device import CacheConfig, DeviceConfig, SchedulerConfig
from infd.config.sections.model import GrammarConfig, LoraConfig, ModelConfig, PoolingConfig
from infd.config.sections.operation import AdminConfig, LogConfig, MetricsConfig
from infd.config.sections.server import LimitsConfig, McpConfig, QuotasConfig, ServerConfig, StoreConfig


class Config(Section, frozen=True, kw_only=True):
    """All of infd's settings."""

    model: ModelConfig = ModelConfig()
    server: ServerConfig = ServerConfig()
    limits: LimitsConfig = LimitsConfig()
    quotas: QuotasConfig = QuotasConfig()
    store: StoreConfig = StoreConfig()
    mcp: McpConfig = McpConfig()
    device: DeviceConfig = DeviceConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    cache: CacheConfig = CacheConfig()
    pooling: PoolingConfig = PoolingConfig()
    grammar: GrammarConfig = GrammarConfig()
    lora: LoraConfig = LoraConfig()
    admin: AdminConfig = AdminConfig()
    log: LogConfig = LogConfig()
    metrics: MetricsConfig = MetricsConfig()

    def value(self, key: str) -> Any:
        """Return the value of `section.name`."""
        section, _, name = key.partition(".")
        return getattr(getattr(self, section), name)
