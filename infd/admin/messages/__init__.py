"""Arguments and answers of the admin socket, by subject; see `protocol.py`."""
