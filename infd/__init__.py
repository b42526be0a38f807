"""infd: one long-running process that serves a language model."""

__version__ = "0.1.0"
