"""How a request becomes a Generation, one file per API."""
