"""Arguments and answers of the admin socket, shared by the server and `infdctl`.

Answers are JSON objects. Within /v1, new versions may add fields to answers, but never
rename or remove fields; readers skip unknown fields, so that an older `infdctl`
reads a newer daemon's answers. A daemon refuses arguments with unknown fields,
so that no part of a command is ignored.
"""

from infd.admin.messages.adapters import LoadLora, LoraChanged, LoraRow, Loras, UnloadLora
from infd.admin.messages.events import Event, ReadEvents
from infd.admin.messages.exchange import ANSWER_TYPE, FEED_TYPE, PROBLEM_TYPE, NoArguments, Problem, Seconds, Version
from infd.admin.messages.lifecycle import (
    Draining,
    LoadWeights,
    Pause,
    PrefixCacheReset,
    ResetPrefixCache,
    Sleep,
    TransitionResult,
    Wake,
)
from infd.admin.messages.requests import (
    Abort,
    Aborted,
    ReadSlow,
    RequestRow,
    Requests,
    SlowRequest,
    SlowRequests,
    TenantUsage,
    UsageRow,
    UsageRows,
)
from infd.admin.messages.settings import Reloaded, ServerInfo, SetSettings, SettingChange, SettingRow, Settings
from infd.admin.messages.status import (
    STATES,
    Captured,
    Dump,
    ExpertLoad,
    Experts,
    LargePages,
    Ops,
    Selection,
    Stack,
    Status,
)

__all__ = [
    "ANSWER_TYPE",
    "FEED_TYPE",
    "PROBLEM_TYPE",
    "STATES",
    "Abort",
    "Aborted",
    "Captured",
    "Draining",
    "Dump",
    "Event",
    "ExpertLoad",
    "Experts",
    "LargePages",
    "LoadLora",
    "LoadWeights",
    "LoraChanged",
    "LoraRow",
    "Loras",
    "NoArguments",
    "Ops",
    "Pause",
    "PrefixCacheReset",
    "Problem",
    "ReadEvents",
    "ReadSlow",
    "Reloaded",
    "RequestRow",
    "Requests",
    "ResetPrefixCache",
    "Seconds",
    "Selection",
    "ServerInfo",
    "SetSettings",
    "SettingChange",
    "SettingRow",
    "Settings",
    "Sleep",
    "SlowRequest",
    "SlowRequests",
    "Stack",
    "Status",
    "TenantUsage",
    "TransitionResult",
    "UnloadLora",
    "UsageRow",
    "UsageRows",
    "Version",
    "Wake",
]
