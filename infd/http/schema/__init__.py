"""The types of request and response bodies: Structs only; fixed bounds are in the types."""
