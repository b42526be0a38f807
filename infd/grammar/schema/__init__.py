"""Rewrite a client's JSON Schema into keywords that llguidance enforces exactly; the entry is `rewriting.prepare`."""
