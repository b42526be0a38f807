"""`infd chat`: a conversation with a running daemon, in a terminal or a pipe."""
