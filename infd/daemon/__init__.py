"""The daemon: components.py builds its components, daemon.py runs them, the other files check, report and warm."""
