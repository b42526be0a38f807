"""Kernel families by FlashInfer; unsupported cases are delegated to Triton. Nothing waits for the device."""
