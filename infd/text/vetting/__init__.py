"""Which of a checkpoint's text may run in the daemon's process, found out by reading it, running nothing.

Each module returns its first objection, None where there is none. What is
objected to is not wrong: it runs in a worker, which can be killed
(`text/apart.py`).
"""

from infd.text.vetting import templates, tokenizers

__all__ = ("templates", "tokenizers")
