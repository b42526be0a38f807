"""A client of MCP servers (Model Context Protocol) over streamable HTTP: their tools, listed and called."""
