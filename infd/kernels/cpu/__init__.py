"""Kernel families in C++ for x86-64 CPUs: sources in `native/`, compiled to one library that `library.py` loads."""
