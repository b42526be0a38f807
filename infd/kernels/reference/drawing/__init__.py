"""Token sampling in plain torch: the oracle of the family `draw`.

`draw` runs `temperature`, then `truncation` (min-p, then top-k, then top-p), then `choice`: Gumbel-max with the noise
of `noise`. `narrowing` applies the same limits and those of llama.cpp to the logits in place.
"""
