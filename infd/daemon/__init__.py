"""The daemon: parts.py chooses what it is made of, daemon.py runs it, the rest tells the world how it is."""
