"""Capture decoding steps of a few batch sizes as CUDA graphs and replay them: one launch per step.

A decoding step computes and samples one token per sequence. The scratch row pads the step to the next size. Inputs that
differ between steps are in persistent buffers; within the graph, the tokens to compute are read from `Rows`. While a
size is not captured, the same kernels are launched on these buffers one by one, with equal results.

1. capture      captures work as a CUDA graph
2. buffers      the input buffers, and the captured sizes
3. padded_step  computes the decoding steps of one size
4. decoding     selects the size of each step, and decides when a size is captured
"""
