"""Conversations as the families' own code renders them."""
