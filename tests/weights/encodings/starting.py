"""`infd start` in forks of a process that has imported what a start imports, so that a refused start takes little time.

python -m tests.weights.encodings.starting DIRECTORY    read a path a line; answer with a line of JSON, see `Ended`
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

IMPORTED = (
    "infd.cli",
    "infd.daemon.serve",
    "infd.executors.local",
    "infd.grammar.writing",
    "infd.kernels.cpu.draw",
    "infd.kernels.cpu.lora",
    "infd.kernels.cpu.packed",
    "infd.kernels.cpu.stack",
    "infd.kernels.reference.int4",
    "infd.models.llama",
    "infd.models.qwen3",
    "infd.runner.runner",
    "infd.runner.start.assembly",
    "infd.runner.start.loading",
)
PATIENCE_S = 60  # reached only by a start that is not refused


class Ended(NamedTuple):
    """A start that has ended.

    code    exit code; of a signal: its negative number
    said    what the process wrote
    memory  most resident bytes
    """

    code: int
    said: str
    memory: int


class Starting:
    """The process that forks."""

    def __init__(self, directory: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={"PATH": os.environ["PATH"], "XDG_CACHE_HOME": str(directory / "cache")},
        )

    def start(self, checkpoint: Path) -> Ended:
        """Start infd with a checkpoint, and wait for the end."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{checkpoint}\n")
        self._process.stdin.flush()
        return Ended(*json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        self._process.communicate()


@contextmanager
def starting(directory: Path) -> Iterator[Starting]:
    process = Starting(directory)
    try:
        yield process
    finally:
        process.close()


def _start(checkpoint: str, directory: Path) -> Ended:
    log = directory / "said"
    if (child := os.fork()) == 0:
        signal.alarm(PATIENCE_S)
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        code = 99
        try:
            from infd.cli import main

            (directory / "infd.toml").touch()
            settings = ["--config", str(directory / "infd.toml"), "--set", "device.threads=1"]
            sockets = ["--port", "0", "--admin-socket", str(directory / "admin.sock")]
            main(["start", "--model", checkpoint, "--device", "cpu", "--max-model-len", "64", *settings, *sockets])
        except SystemExit as exit_:
            code = exit_.code if isinstance(exit_.code, int) else 98
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    _, status, used = os.wait4(child, 0)
    return Ended(os.waitstatus_to_exitcode(status), log.read_text(errors="replace"), used.ru_maxrss * 1024)


if __name__ == "__main__":
    from importlib import import_module

    for name in IMPORTED:
        import_module(name)
    for line in sys.stdin:
        print(json.dumps(_start(line.rstrip("\n"), Path(sys.argv[1]))), flush=True)
