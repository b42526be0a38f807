"""Kernel families in Triton, for GPUs. One file per family: kernels first, then the class that `select.py` names.

The host never waits for the device here, and shapes never depend on values in device memory. Arithmetic is in float32,
except the inputs of matrix products: Triton's interpreter, which runs these files on a CPU, rounds other bfloat16
arithmetic wrongly.
"""
