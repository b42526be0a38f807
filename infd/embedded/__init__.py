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


def adapters() -> Path:
    """Return the directory that holds the adapters, each in one of its own."""
    return _HERE / "adapters"
