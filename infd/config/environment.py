"""Read environment variables, except settings (INFD_SECTION__KEY), which loading.py reads."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping

    from infd.config.tree import Config


# Fixed, unlike $TMPDIR, so that a daemon and an `infdctl` in different sessions of a user agree on the path.
TEMPORARY = Path("/tmp")  # noqa: S108 (accessible_to_others checks the directory, see `private`)


class HubAccess(Struct, frozen=True, kw_only=True):
    """Access to the Hugging Face hub. Where a field is None, huggingface_hub's default applies.

    endpoint  URL of the hub or a mirror
    token     access token
    cache     directory of fetched files
    offline   use cached files only
    """

    endpoint: str | None = None
    token: str | None = None
    cache: Path | None = None
    offline: bool = False

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> HubAccess:
        """Interpret the HF_* variables."""
        hf_home = environ.get("HF_HOME")
        cache = environ.get("HF_HUB_CACHE") or (Path(hf_home).expanduser() / "hub" if hf_home else None)
        return cls(
            endpoint=(environ.get("HF_ENDPOINT") or "").rstrip("/") or None,
            token=environ.get("HF_TOKEN") or None,
            cache=None if cache is None else Path(cache),
            offline=environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"),
        )


def limit_thread_spinning(environ: MutableMapping[str, str]) -> None:
    """Set variables that shorten the spinning of OpenMP's threads and restrict OpenBLAS and tokenizers to one thread.

    Variables that the user has set stay unchanged. OpenMP's threads share cores with the event loop. On two busy cores,
    libgomp's default spin made a token take 4 times as long; on an idle machine, the short spin slows a tiny model by
    about a tenth. OpenBLAS, which infd does not call, would start spinning threads when numpy is imported.
    The tokenizers library would pass each text to a thread of its pool and wait, although infd encodes texts in turn.
    Call this function before torch is imported, because the libraries read the variables when they are loaded.
    """
    environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if "OMP_WAIT_POLICY" not in environ:
        environ.setdefault("GOMP_SPINCOUNT", "1000")


class Environment(Struct, frozen=True, kw_only=True):
    """The values of environment variables other than settings.

    notify_socket    address of systemd's notification socket; empty: none
    watchdog_s       longest interval that systemd accepts between two watchdog pings; None: no watchdog
    journal_stream   device:inode of the stream connected to the journal; empty: none
    api_key          API key for all clients; empty: none
    admin            the admin socket's path, for the daemon and for infdctl; None: in a runtime directory
    credentials      directory in which systemd stored decrypted credentials; None: none
    runtime          candidate directories for sockets, preferred first
    private          the candidate in /tmp, trusted only if no other user may enter the directory; None: none, for root
    hub              access to the Hugging Face hub
    state            directory for persistent state, such as chat history; None: none
    cache            directory for files that can be recreated; None: none
    inherited        number of listening sockets that systemd passed; their file descriptors begin at 3
    """

    notify_socket: str = ""
    watchdog_s: float | None = None
    journal_stream: str = ""
    api_key: str = ""
    admin: Path | None = None
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
        # Variables addressed to the parent process are ignored: LISTEN_PID and WATCHDOG_PID name the addressee.
        listen_fds = environ.get("LISTEN_FDS", "") if environ.get("LISTEN_PID") == str(pid) else ""
        watched = environ.get("WATCHDOG_PID", str(pid)) == str(pid)
        watchdog_us = environ.get("WATCHDOG_USEC", "") if watched else ""
        credentials, admin = environ.get("CREDENTIALS_DIRECTORY"), environ.get("INFD_ADMIN_SOCKET")
        runtime = []
        if service := _service_directory(environ, "RUNTIME_DIRECTORY"):
            runtime.append(service)
        if session := environ.get("XDG_RUNTIME_DIR"):
            runtime.append(Path(session, "infd"))
        private = TEMPORARY / f"infd-{uid}" if uid else None  # under cron, often the only writable candidate
        if private is not None:
            runtime.append(private)
        return cls(
            notify_socket=environ.get("NOTIFY_SOCKET", ""),
            watchdog_s=int(watchdog_us) / 1e6 if watchdog_us.isdecimal() else None,
            journal_stream=environ.get("JOURNAL_STREAM", ""),
            api_key=environ.get("INFD_API_KEY", ""),
            admin=Path(admin) if admin else None,
            credentials=Path(credentials) if credentials else None,
            runtime=(*runtime, Path("/run/infd")),
            private=private,
            hub=HubAccess.read(environ),
            state=_xdg_directory(environ, "XDG_STATE_HOME", ".local/state"),
            cache=_service_directory(environ, "CACHE_DIRECTORY") or _xdg_directory(environ, "XDG_CACHE_HOME", ".cache"),
            inherited=int(listen_fds) if listen_fds.isdecimal() else 0,
        )

    def admin_socket(self, config: Config) -> Path:
        """Return the admin socket's path: configured, else of the environment, else in the first runtime directory."""
        return Path(config.admin.socket) if config.admin.socket else self.admin or self.runtime[0] / "admin.sock"

    def kernel_cache(self, config: Config) -> Path | None:
        """Return the directory of compiled kernels; None: the compiler's default."""
        if config.device.kernel_cache:
            return Path(config.device.kernel_cache)
        return None if self.cache is None else self.cache / "kernels"

    @property
    def models(self) -> Path | None:
        """Return the directory of models that were fetched from elsewhere than a hub; None: there is none."""
        return None if self.cache is None else self.cache / "models"

    def api_key_file(self, config: Config) -> Path | None:
        """Return the file of API keys: the configured file, else the credential `api-keys`; None: no file."""
        if config.server.api_key_file:
            return Path(config.server.api_key_file)
        if self.credentials is not None and (self.credentials / "api-keys").exists():
            return self.credentials / "api-keys"
        return None


def _service_directory(environ: Mapping[str, str], name: str) -> Path | None:
    """Return the first directory in a variable that systemd sets for a service; None if the variable is not set."""
    directories = environ.get(name)
    return Path(directories.partition(":")[0]) if directories else None


def _xdg_directory(environ: Mapping[str, str], name: str, usual: str) -> Path | None:
    """Return infd's directory in an XDG base directory; None without a base directory.

    Relative paths are ignored, as the XDG specification requires.
    """
    if (base := Path(environ.get(name, ""))).is_absolute():
        return base / "infd"
    home = Path(environ.get("HOME", ""))
    return home / usual / "infd" if home.is_absolute() else None
