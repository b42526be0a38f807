"""Convert an API's request to a `Generation`, one file per API."""
