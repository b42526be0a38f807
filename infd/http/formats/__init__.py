"""How an answer looks on the wire, streamed and whole, one file per API."""
