"""Kernel families in C++ for x86-64 CPUs: `native/` is their source, `library.py` finds what was built of it."""
