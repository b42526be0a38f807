"""The daemon, and `infd config check`, `models` and `warm`. components.py builds components, daemon.py runs them."""
