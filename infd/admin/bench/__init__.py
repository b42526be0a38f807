"""A load generator for any OpenAI-compatible endpoint. It shares no code with the server that it measures."""
