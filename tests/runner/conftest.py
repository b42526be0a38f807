from tests.tiny import tiny

__all__ = ["tiny"]
