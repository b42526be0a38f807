"""The stages that turn logits into a token, one per file, in this order.

1. scores       computes requested log-probabilities, from logits that no stage has changed
2. penalties    repetition, then presence and frequency
3. bias         adds logit_bias
4. floor        forbids end ids until min_tokens are generated
5. words        forbids the last token of a bad word
6. mask         forbids tokens outside the grammar's mask or allowed_token_ids
The token is then the argmax, or a random sample by the kernel family `draw`:
temperature, min-p, top-k, top-p, noise.

Each stage is a function of logits [n, vocab] float32 and of parameters, both of
the rows that request the stage; `runner/sampler.py` selects the rows. Stages
2 to 6 change the logits in place; 2 and 6, which read a whole vocabulary, are
also kernels of the family `draw`.
"""
