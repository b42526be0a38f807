"""A client's JSON Schema in the keywords that llguidance keeps exactly; `rewriting.prepare` is the entry."""
