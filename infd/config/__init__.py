"""Settings, and the environment of the process.

sections/ declares the settings, tree.py joins them, settings.py lists them flat, loading.py merges
files, variables and flags; live.py holds those in force; environment.py reads all other variables.
"""

from infd.config.environment import Environment, HubAccess, limit_thread_spinning
from infd.config.live import LiveConfig
from infd.config.loading import Assignment, Loaded, Sources, load
from infd.config.sections.device import CacheConfig, DeviceConfig, SchedulerConfig
from infd.config.sections.model import GrammarConfig, LoraConfig, ModelConfig, PoolingConfig
from infd.config.sections.operation import AdminConfig, LogConfig, MetricsConfig
from infd.config.sections.server import LimitsConfig, McpConfig, QuotasConfig, ServerConfig, StoreConfig
from infd.config.settings import SETTINGS, Setting
from infd.config.tree import Config

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
