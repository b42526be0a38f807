"""Attention by FlashInfer, where its kernels take what a model needs. Like Triton's it never waits for the device."""
