"""Kernel families in Triton, for GPUs. One file per family: kernels first, then the class that `select.py` names.

No kernel makes the host wait for the device: shapes never depend on values in device memory. Arithmetic is in float32,
except the inputs of matrix products: Triton's interpreter, which runs the kernels on a CPU, rounds other bfloat16
arithmetic wrongly.
"""
