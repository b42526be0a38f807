"""A load generator for any OpenAI-compatible endpoint, shared by `infdctl bench` and bench/. No server code in it."""
