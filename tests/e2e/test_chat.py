"""`infd chat` and `infd models` as processes: on a terminal, in a pipe, and without a server."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import stat
import subprocess
import sys
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.e2e.process import PATIENCE_S, ROOT, Daemon

if TYPE_CHECKING:
    from collections.abc import Iterator

STEERING = re.compile(r"\x1b(\[[0-9;?]*[A-Za-z]?)?")
INFD = [sys.executable, "-m", "infd"]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    directory = tmp_path_factory.mktemp("chat")
    arguments = ["--host", f"unix:{directory}/http.sock", "--set", "device.null_step_ms=50"]
    with closing(Daemon(directory, arguments, {"INFD_API_KEY": "secret"})) as daemon:
        yield daemon.ready()


def environment(home: Path) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "HOME": str(home), "XDG_STATE_HOME": str(home / "state"), "TERM": "xterm"}


def chat(daemon: Daemon, *arguments: str) -> list[str]:
    return [*INFD, "chat", "--url", f"unix:{daemon.directory}/http.sock", *arguments]


def test_in_a_pipe_a_question_gets_its_answer_alone(daemon: Daemon, tmp_path: Path):
    key = tmp_path / "key"
    key.write_text("secret\n")
    asked = chat(daemon, "--key-file", str(key), "--max-tokens", "8", "--system", "Be brief.", "--no-thinking")

    done = subprocess.run(
        asked, input="hi", capture_output=True, text=True, env=environment(tmp_path), check=True, cwd=ROOT
    )

    assert done.stdout.endswith("\n")
    assert done.stderr == "cut off by length\n"


def test_without_a_key_or_a_daemon_the_error_names_the_remedy(daemon: Daemon, tmp_path: Path):
    for arguments, code, says in (
        (chat(daemon), os.EX_NOPERM, "INFD_API_KEY or with --key-file"),
        ([*INFD, "chat", "--url", f"unix:{tmp_path}/none"], os.EX_UNAVAILABLE, "start a daemon with `infd start`"),
    ):
        done = subprocess.run(
            arguments, input="hi", capture_output=True, text=True, env=environment(tmp_path), check=False, cwd=ROOT
        )
        assert (done.returncode, done.stdout) == (code, "")
        assert done.stderr.startswith("infd: ")
        assert says in done.stderr


class Typist:
    """A user at a pseudo-terminal."""

    def __init__(self, command: list[str], variables: dict[str, str]) -> None:
        self._terminal, theirs = pty.openpty()
        self.process = subprocess.Popen(
            command,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=variables,
            start_new_session=True,
            cwd=ROOT,
            # A background job may have SIGINT ignored.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 (no threads yet)
        )
        os.close(theirs)
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def see(self, text: str) -> None:
        """Wait until the terminal shows the text, after the output seen so far."""
        while text not in self.seen:
            self._look(text)
        self.seen = self.seen.partition(text)[2]

    def _look(self, awaited: str) -> None:
        ready, _, _ = select.select([self._terminal], [], [], PATIENCE_S)
        assert ready, f"never showed {awaited!r}: {self.seen!r}"
        try:
            data = os.read(self._terminal, 65536)
        except OSError:
            raise AssertionError(f"ended without {awaited!r}: {self.seen!r}") from None
        self.seen += data.decode(errors="replace")

    def see_more(self) -> None:
        """Wait until the terminal shows words, without counting control sequences."""
        while len(STEERING.sub("", self.seen).split()) < 5:  # an answer is on its way, not the end of a line
            self._look("words")

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def waits(self) -> None:
        """Wait until the process waits for a key: the line editor defers signals while drawing."""
        status = Path(f"/proc/{self.process.pid}/stat")
        while status.read_text().rpartition(") ")[2][0] != "S":
            self.process.poll()

    def gone(self) -> int:
        """Wait for the process's end, reading its output."""
        with suppress(AssertionError):
            while True:
                self._look("an end")
        return self.process.wait(PATIENCE_S)

    def close(self) -> None:
        os.close(self._terminal)
        self.process.kill()
        self.process.wait()


def test_on_a_terminal_a_user_chats_interrupts_an_answer_and_quits(daemon: Daemon, tmp_path: Path):
    variables = environment(tmp_path) | {"INFD_API_KEY": "secret"}
    with closing(Typist(chat(daemon), variables)) as typist:
        typist.see("embedded at unix:")
        typist.see("> ")
        typist.type("hello\r")
        typist.see("hello\r\n")
        typist.see_more()
        typist.interrupt()
        typist.see("(stopped)")
        typist.see("> ")
        typist.type("/thinking off\r")
        typist.see("it answers at once")
        typist.see("> ")  # before the prompt, the line editor would read ^D as a key
        typist.type("\x04")
        assert typist.gone() == 0

    history = tmp_path / "state" / "infd" / "chat_history"
    assert history.read_text().splitlines() == ["hello", "/thinking off"]
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    assert stat.S_IMODE(history.parent.stat().st_mode) == 0o700
    with closing(Typist(chat(daemon), variables)) as again:
        again.see("> ")
        again.type("\x1b[A\x1b[A")  # up, up
        again.see("hello")
        again.waits()
        again.interrupt()
        again.see("> ")
        again.type("/quit\r")
        assert again.gone() == 0


def test_models_lists_the_embedded_one(tmp_path: Path):
    done = subprocess.run(
        [*INFD, "models", "--json"], capture_output=True, env=environment(tmp_path), check=True, cwd=ROOT
    )

    assert [model["name"] for model in json.loads(done.stdout)] == ["embedded"]
