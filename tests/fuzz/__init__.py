"""Fuzzing with coverage feedback: `python -m tests.fuzz TARGET --seconds 3600` (extra `fuzz`).

targets.py defines each target's inputs and assertions. Inputs worth keeping are
in seeds/TARGET and are replayed by the ordinary suite.
"""
