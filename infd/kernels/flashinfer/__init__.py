"""Kernel families by FlashInfer; unsupported cases are delegated to Triton. The host never waits for the device."""
