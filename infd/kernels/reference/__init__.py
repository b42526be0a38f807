"""Every kernel family in plain torch, on any device: what the families mean, and the oracle of all others."""
