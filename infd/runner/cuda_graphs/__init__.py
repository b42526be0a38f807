"""Capture decoding steps of a few batch sizes as CUDA graphs and replay them: one launch per step.

A decoding step computes and samples one token per sequence. The step is padded to the next captured size with the
scratch row. Inputs that differ between steps are in persistent buffers; sampled tokens are read from `Rows` within the
graph. A step of an uncaptured size launches the graph's kernels on these buffers one by one, with equal results.

1. capture      captures work as a CUDA graph
2. buffers      the input buffers, and the captured sizes
3. padded_step  computes the decoding steps of one size
4. decoding     selects each step's size, and decides when a size is captured
"""
