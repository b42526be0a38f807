"""The stages that choose a token from logits, in this order.

1. scores       computes requested log-probabilities, from logits that no stage has changed
2. penalties    repetition, then presence and frequency
3. bias         adds logit_bias
4. floor        forbids end ids until min_tokens are generated
5. words        forbids the last token of a bad word
6. mask         forbids tokens outside the grammar's mask or allowed_token_ids
The token is then the argmax, or a random sample: temperature, min-p, top-k, top-p, noise. Of a span with drafts the
samples are kept up to the first that a draft did not anticipate (acceptance).

`runner/sampler.py` selects the rows that request a stage. Stages 2 to 6 change the logits of these rows in place.
Scores, bias, floor and words have a file here; penalties, mask, argmax and random samples are kernels of the family
`draw`.
"""
