"""The types of request and response bodies: Structs whose field types check the bounds that are not configurable."""
