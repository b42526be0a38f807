"""Settings, and the environment of the process.

tree.py declares the settings, settings.py lists them flat, loading.py merges
files, variables and flags; live.py holds those in force; environment.py reads all other variables.
"""

from infd.config.environment import Environment, HubAccess, limit_thread_spinning
from infd.config.live import LiveConfig
from infd.config.loading import Assignment, Loaded, Sources, load
from infd.config.settings import SETTINGS, Setting
from infd.config.tree import (
    AdminConfig,
    CacheConfig,
    Config,
    DeviceConfig,
    GrammarConfig,
    LimitsConfig,
    LogConfig,
    LoraConfig,
    McpConfig,
    MetricsConfig,
    ModelConfig,
    PoolingConfig,
    QuotasConfig,
    SchedulerConfig,
    ServerConfig,
    StoreConfig,
)

__all__ = [
    "SETTINGS",
    "AdminConfig",
    "Assignment",
    "CacheConfig",
    "Config",
    "DeviceConfig",
    "Environment",
    "GrammarConfig",
    "HubAccess",
    "LimitsConfig",
    "LiveConfig",
    "Loaded",
    "LogConfig",
    "LoraConfig",
    "McpConfig",
    "MetricsConfig",
    "ModelConfig",
    "PoolingConfig",
    "QuotasConfig",
    "SchedulerConfig",
    "ServerConfig",
    "Setting",
    "Sources",
    "StoreConfig",
    "limit_thread_spinning",
    "load",
]
