"""Decide which templates and tokenizers of a checkpoint may run in the daemon's process, without running them.

Each module returns its first objection, or None. An objection is not an error: the
template or tokenizer runs in a worker process, which can be killed (`text/apart.py`).
"""

from infd.text.vetting import templates, tokenizers

__all__ = ("templates", "tokenizers")
