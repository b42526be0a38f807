"""The handlers of all endpoints."""
