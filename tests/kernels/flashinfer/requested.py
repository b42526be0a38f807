"""Print the modules of FlashInfer that a model's first steps request, and the kernels that only other steps request.

A separate program, because FlashInfer keeps built modules in the process: `python -m tests.kernels.flashinfer.requested
CHECKPOINT DIRECTORY CACHED` prints two lines of JSON: the first steps' modules with their paths, and the modules and
Triton kernels that only other steps request. Nothing is compiled.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from infd.kernels.flashinfer import modules
from infd.runner.start import warming
from tests.kernels.triton.requested import noted, others, settings

HOPPER = (9, 0)


def main(checkpoint: str, directory: str, cached: Any) -> None:
    modules.keep(Path(directory), HOPPER)
    from flashinfer.jit.core import JitSpecNvcc

    places: dict[str, str] = {}

    def build(spec: Any, *, need_lock: bool) -> None:
        assert need_lock
        places[spec.name] = str(spec.jit_library_path)

    JitSpecNvcc.build = build
    config = settings(checkpoint, cached, "bfloat16")
    asked: list[str] = []
    with noted() as kernels, modules.building(HOPPER, lambda name, found, seconds: asked.append(name)):
        warming.issue(config, flashinfer=True)
        first, compiled = set(asked), set(kernels)
        print(json.dumps({name: places[name] for name in sorted(first)}))
        warming.first_steps = others
        warming.issue(config, flashinfer=True)
    print(json.dumps(sorted((set(asked) - first) | (kernels - compiled))))


if __name__ == "__main__":
    main(*sys.argv[1:])
