"""Encode answers, streamed and whole, one file per API."""
