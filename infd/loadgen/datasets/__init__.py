"""Requests to send: random ones of given lengths, and those of a user's files."""
