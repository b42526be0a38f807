"""The model that ships with infd, so that it serves something on a machine without a checkpoint.

A Qwen3 in miniature with its own tokenizer, in the files that every checkpoint
has. Its weights are random: it shows that the server works, and says nothing
that makes sense. `make.py` is the recipe; `model/` is what it made.
"""

from __future__ import annotations

from pathlib import Path


def path() -> Path:
    """Return the checkpoint's directory."""
    return Path(__file__).parent / "model"
