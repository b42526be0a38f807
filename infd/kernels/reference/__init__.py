"""Every kernel family in plain torch, on any device: the oracle that all other implementations are tested against."""
