"""The shapes of requests and responses: Structs only, every bound in its type."""
