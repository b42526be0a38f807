"""The models that ship with infd, so that it answers on a machine without a checkpoint.

A Qwen3 in miniature that chats, thinks and calls tools; a draft of it for
speculative decoding; two LoRA adapters. MODEL_CARD.md says what they can do,
`recipe/` made them.
"""

from __future__ import annotations

from pathlib import Path

_HERE = Path(__file__).parent


def path() -> Path:
    """Return the checkpoint's directory."""
    return _HERE / "model"


def draft() -> Path:
    """Return the directory of a smaller checkpoint of the same vocabulary."""
    return _HERE / "draft"


def adapters() -> dict[str, Path]:
    """Return the directories of the adapters, by name."""
    return {directory.name: directory for directory in sorted((_HERE / "adapters").iterdir())}
