"""The models that ship with infd, for use without a checkpoint.

A tiny Qwen3 that chats, thinks and calls tools; a draft model for speculative
decoding; two LoRA adapters. MODEL_CARD.md describes their abilities; `recipe/`
trains them.
"""

from __future__ import annotations

from pathlib import Path

_HERE = Path(__file__).parent


def path() -> Path:
    """Return the directory of the main model's checkpoint."""
    return _HERE / "model"


def draft() -> Path:
    """Return the draft model's directory. The draft model shares the main model's vocabulary."""
    return _HERE / "draft"


def adapters() -> Path:
    """Return the directory that contains the adapters' directories."""
    return _HERE / "adapters"
