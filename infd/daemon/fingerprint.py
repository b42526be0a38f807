"""Identify a checkpoint's weights and infd's version, for `system_fingerprint` in answers.

Equal files must give equal fingerprints on every machine, so file times are not hashed. Reading all weights would delay
the start, so only samples are hashed; training that changes all layers changes the samples too.
"""

from __future__ import annotations

import os
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

from infd.gguf import is_gguf
from infd.gguf.file import parts
from infd.pooling import M3_FILES
from infd.untrusted import open_regular
from infd.version import __version__

if TYPE_CHECKING:
    from pathlib import Path

_SAMPLES: Final = 64  # approximate number of samples, of all files together
_SAMPLE_BYTES: Final = 4096


def fingerprint(directory: Path) -> str:
    """Return the fingerprint of the weights in a checkpoint's directory or GGUF file. Raises CheckpointError."""
    digest = blake2b(__version__.encode(), digest_size=6)
    if is_gguf(directory):
        files = parts(directory)
    else:
        files = sorted(path for path in directory.iterdir() if path.suffix == ".safetensors" or path.name in M3_FILES)
    for path in files:
        descriptor = open_regular(path)
        try:
            size = os.fstat(descriptor).st_size
            digest.update(f"{path.name}\0{size}\0".encode())
            step = max(_SAMPLE_BYTES, size * len(files) // _SAMPLES)
            for offset in range(0, size, step):
                digest.update(os.pread(descriptor, _SAMPLE_BYTES, offset))
        finally:
            os.close(descriptor)
    return f"fp_{digest.hexdigest()}"
