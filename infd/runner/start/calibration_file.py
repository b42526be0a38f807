"""Store calibrations for later starts of the same model on the same machine.

The file is stored beside the compiled kernels. A calibration's key is a digest of everything that determines the
durations: the model, the settings, the versions of infd and torch, the kernels, the machine and the number of threads.
A start uses the calibration with its key if the shortest step still lasts about as long as when the calibration was
measured (`calibration.still_valid`); otherwise the start measures steps again.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import torch
from msgspec.structs import replace

from infd import files
from infd.kernels.cpu.library import built_from
from infd.runner.start.calibration import Calibration
from infd.runner.start.resolve import CPUINFO
from infd.version import __version__

if TYPE_CHECKING:
    from collections.abc import Mapping

    from infd.config import Config
    from infd.runner.start.setup import ModelSetup

log = logging.getLogger("infd.runner")

NAME: Final = "calibration.json"
MOST: Final = 64  # most calibrations in the file; the oldest are removed
LARGEST_BYTES: Final = 2**20
PROCESSOR: Final = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags")  # lines of CPUINFO


class CalibrationFile:
    """A file of calibrations, and the key of this start's calibration."""

    def __init__(self, path: Path, key: str) -> None:
        self.path = path
        self._key = key

    @classmethod
    def of(
        cls, config: Config, setup: ModelSetup, described: Mapping[str, Any], *, rows: int, tokens: int
    ) -> CalibrationFile | None:
        """Return the file, and the key of a start; None if calibrations are not stored.

        described  content of config.json
        rows       most running sequences
        tokens     tokens of the largest step that can be measured
        """
        if not config.device.kernel_cache:
            return None
        determinants = (
            __version__,
            str(torch.__version__),
            built_from(),
            _machine(setup.device),
            torch.get_num_threads(),
            described,
            replace(config.model, path=""),
            config.cache,
            config.scheduler,
            config.device,
            setup.pooling,
            str(setup.dtype),
            setup.ops.describe(),
            setup.max_len,
            rows,
            tokens,
        )
        encoded = msgspec.json.encode(determinants, enc_hook=dict, order="sorted")  # dict: of read-only mappings
        digest = hashlib.blake2b(encoded, digest_size=16)
        return cls(Path(config.device.kernel_cache) / NAME, digest.hexdigest())

    def find(self) -> Calibration | None:
        """Return the calibration stored by an earlier start, or None."""
        return self._read().get(self._key)

    def store(self, calibration: Calibration) -> None:
        """Write the calibration to the file. If that fails, the next start measures steps again."""
        others = {key: each for key, each in self._read().items() if key != self._key}
        newest = dict([*others.items(), (self._key, calibration)][-MOST:])
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            files.replace(self.path, msgspec.json.format(msgspec.json.encode(newest)))
        except OSError as error:
            log.info("%s cannot be written; the next start measures steps again: %s", self.path, error.strerror)

    def _read(self) -> dict[str, Calibration]:
        try:
            with self.path.open("rb") as file:
                return msgspec.json.decode(file.read(LARGEST_BYTES), type=dict[str, Calibration])
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            log.warning("%s cannot be read; this start measures steps: %s", self.path, error)
            return {}


def _machine(device: torch.device) -> list[str]:
    if device.type == "cuda":
        return [torch.cuda.get_device_name(device)]
    first = CPUINFO.read_text().partition("\n\n")[0].splitlines()
    return [line for line in first if line.partition("\t")[0].strip() in PROCESSOR]
