"""Kernel families in Triton, for GPUs. One file a family: its kernels first, then the class that `select.py` names.

Nothing here waits for the device, and no shape depends on what only the device
knows. Arithmetic is in float32 but for the inputs of matrix products; Triton's
interpreter, which runs these files on a CPU, gets no other bfloat16 right.
"""
