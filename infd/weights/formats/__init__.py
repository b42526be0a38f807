"""How checkpoints store weights: one file per format."""
