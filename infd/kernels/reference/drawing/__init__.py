"""Choosing tokens at random, in plain torch: what the family `draw` means.

`temperature`, then `truncation` (min-p, then top-k, then top-p), then `choice`:
Gumbel-max with the noise of `noise`. `draw` puts them together.
"""
