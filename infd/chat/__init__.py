"""`infd chat`: a conversation with a running server, on a terminal or in a pipe."""
