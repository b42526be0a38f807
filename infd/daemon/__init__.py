"""The daemon. components.py builds the components and daemon.py runs them; the other files support CLI and systemd."""
