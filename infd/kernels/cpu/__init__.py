"""Kernel families in C++ for x86-64 CPUs: the sources are in `native/`; `library.py` loads the compiled library."""
