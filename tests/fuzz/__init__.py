"""Fuzzing with coverage feedback: `python -m tests.fuzz TARGET --seconds 3600` (extra `fuzz`).

targets.py says what each target feeds and what it must never do. Inputs worth
keeping stand in seeds/TARGET and are replayed by the ordinary suite.
"""
