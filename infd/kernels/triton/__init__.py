"""Kernel families in Triton, for GPUs. One file per family: kernels first, then the class that `select.py` names.

No kernel makes the host wait for the device: shapes never depend on values in device memory. Kernels compute in
float32; only the inputs of matrix products may be narrower, because Triton's interpreter, which runs the kernels on a
CPU, rounds other bfloat16 arithmetic wrongly.
"""
