"""The stages that choose a token from logits, in this order.

1. scores       computes requested log-probabilities, from logits that no stage has changed
2. penalties    repetition, then presence and frequency, then DRY
3. bias         adds logit_bias
4. floor        forbids end ids until min_tokens are generated
5. words        forbids the last token of a bad word
6. mask         forbids tokens outside the grammar's mask or allowed_token_ids
7. narrow       limits of llama.cpp and mirostat, with the temperature; rows without them skip it
The token is then the argmax, or a random sample: temperature, min-p, top-k, top-p, noise. Of a span with drafts the
samples are kept up to the first that a draft did not anticipate (acceptance).

Stages 2 to 7 change the logits of the rows that request them, in place (`runner/shaper.py`). Scores, bias, floor, words
and mirostat have a file here; penalties, mask, narrowing, argmax and random samples are kernels of the family `draw`.
"""
