"""What each endpoint does: decode, submit, send."""
