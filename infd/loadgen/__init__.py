"""A load generator for OpenAI-compatible endpoints, used by `infdctl bench` and bench/. Imports no server code."""
