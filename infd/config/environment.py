"""The only reading of the environment, apart from the INFD_SECTION__KEY settings that loading.py takes from it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping

    from infd.config.tree import Config


# Fixed, unlike $TMPDIR, so that a daemon and an `infdctl` from two sessions of one user find each other.
TEMPORARY = Path("/tmp")  # noqa: S108 (what is made in it is checked: see `private`)


class HubAccess(Struct, frozen=True, kw_only=True):
    """How the Hugging Face hub is reached. None: as its own library finds out.

    endpoint  another address for it
    token     whose access is used
    cache     where fetched files are kept
    offline   only what is kept there already may be used
    """

    endpoint: str | None = None
    token: str | None = None
    cache: Path | None = None
    offline: bool = False

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> HubAccess:
        home = environ.get("HF_HOME")
        cache = environ.get("HF_HUB_CACHE") or (Path(home).expanduser() / "hub" if home else None)
        return cls(
            endpoint=(environ.get("HF_ENDPOINT") or "").rstrip("/") or None,
            token=environ.get("HF_TOKEN") or None,
            cache=None if cache is None else Path(cache),
            offline=environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"),
        )


def calm_threads(environ: MutableMapping[str, str]) -> None:
    """Keep torch's threads from spinning long at barriers, and numpy from having any, unless the user has said so.

    The event loop and whatever else runs here share their cores: with both of two cores busy, spinning at libgomp's
    default made a token take 4 times longer; in a quiet moment a short spin costs a tiny model about a tenth.
    Nobody here multiplies with numpy, but its OpenBLAS starts threads that spin when it is imported.
    Must be called before torch is, for it is only then that this is read.
    """
    environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if "OMP_WAIT_POLICY" not in environ:
        environ.setdefault("GOMP_SPINCOUNT", "1000")


class Environment(Struct, frozen=True, kw_only=True):
    """What the world told this process, beside settings.

    notify_socket    where systemd wants to hear of readiness
    watchdog_s       how long systemd waits between signs of life; None: it does not
    journal_stream   device:inode of the stream that leads to the journal
    api_key          one key for all clients
    credentials      directory of secrets that systemd decrypted
    runtime          directories for sockets, the best one first
    private          one of them, in everybody's /tmp: not to be trusted unless it is this user's alone
    hub              how the Hugging Face hub is reached
    state            directory for what a user's programs remember; None: there is none
    cache            directory for what can be made again; None: there is none
    inherited        sockets to listen on that systemd passed, descriptors from 3 on
    """

    notify_socket: str = ""
    watchdog_s: float | None = None
    journal_stream: str = ""
    api_key: str = ""
    credentials: Path | None = None
    runtime: tuple[Path, ...] = (Path("/run/infd"),)
    private: Path | None = None
    hub: HubAccess = HubAccess()
    state: Path | None = None
    cache: Path | None = None
    inherited: int = 0

    @classmethod
    def read(cls, environ: Mapping[str, str], *, pid: int, uid: int) -> Environment:
        """Interpret environment variables for process `pid` of user `uid`."""
        # LISTEN_PID and WATCHDOG_PID guard against a parent's variables: they are for the process named alone.
        listen_fds = environ.get("LISTEN_FDS", "") if environ.get("LISTEN_PID") == str(pid) else ""
        watched = environ.get("WATCHDOG_PID", str(pid)) == str(pid)
        watchdog_us = environ.get("WATCHDOG_USEC", "") if watched else ""
        credentials = environ.get("CREDENTIALS_DIRECTORY")
        runtime = []
        if service := _service(environ, "RUNTIME_DIRECTORY"):
            runtime.append(service)
        if session := environ.get("XDG_RUNTIME_DIR"):
            runtime.append(Path(session, "infd"))
        private = TEMPORARY / f"infd-{uid}" if uid else None  # containers, su and cron give a user no other
        if private is not None:
            runtime.append(private)
        return cls(
            notify_socket=environ.get("NOTIFY_SOCKET", ""),
            watchdog_s=int(watchdog_us) / 1e6 if watchdog_us.isdecimal() else None,
            journal_stream=environ.get("JOURNAL_STREAM", ""),
            api_key=environ.get("INFD_API_KEY", ""),
            credentials=Path(credentials) if credentials else None,
            runtime=(*runtime, Path("/run/infd")),
            private=private,
            hub=HubAccess.read(environ),
            state=_own(environ, "XDG_STATE_HOME", ".local/state"),
            cache=_service(environ, "CACHE_DIRECTORY") or _own(environ, "XDG_CACHE_HOME", ".cache"),
            inherited=int(listen_fds) if listen_fds.isdecimal() else 0,
        )

    def admin_socket(self, config: Config) -> Path:
        """Return where the daemon's admin socket belongs."""
        return Path(config.admin.socket) if config.admin.socket else self.runtime[0] / "admin.sock"

    def kernel_cache(self, config: Config) -> Path | None:
        """Return where compiled kernels are kept; None: wherever their compiler keeps them."""
        if config.device.kernel_cache:
            return Path(config.device.kernel_cache)
        return None if self.cache is None else self.cache / "kernels"

    def api_key_file(self, config: Config) -> Path | None:
        """Return the file that holds clients' keys: the configured one, else the credential `api-keys`."""
        if config.server.api_key_file:
            return Path(config.server.api_key_file)
        if self.credentials is not None and (self.credentials / "api-keys").exists():
            return self.credentials / "api-keys"
        return None


def _service(environ: Mapping[str, str], name: str) -> Path | None:
    """Return the first of the directories that systemd made for the service."""
    given = environ.get(name)
    return Path(given.partition(":")[0]) if given else None


def _own(environ: Mapping[str, str], name: str, usual: str) -> Path | None:
    """Return infd's directory within one of the XDG base directories, which ignore a path that is not absolute."""
    if (given := Path(environ.get(name, ""))).is_absolute():
        return given / "infd"
    home = Path(environ.get("HOME", ""))
    return home / usual / "infd" if home.is_absolute() else None
