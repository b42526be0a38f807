"""Fetch models of the Hugging Face hub through `huggingface_hub`, whose cache prevents repeated downloads."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infd.errors import CheckpointError, FetchFailed, StartError
from infd.hub.bars import reporting

if TYPE_CHECKING:
    from collections.abc import Sequence

    from infd.config import HubAccess
    from infd.hub.fetch import Progress


class HuggingFace:
    """One model of the hub."""

    def __init__(self, name: str, revision: str | None, access: HubAccess) -> None:
        self._name = name
        self._revision = revision
        self._access = access

    def snapshot(self, patterns: Sequence[str], progress: Progress | None = None) -> Path:
        import huggingface_hub
        from huggingface_hub import constants, logging

        logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # infd logs its own messages
        # The library's telemetry would send the list of installed packages.
        constants.HF_HUB_DISABLE_TELEMETRY = True
        try:
            return Path(
                huggingface_hub.snapshot_download(
                    self._name,
                    revision=self._revision,
                    allow_patterns=list(patterns),
                    endpoint=self._access.endpoint,
                    token=self._access.token,
                    cache_dir=self._access.cache,
                    local_files_only=self._access.offline,
                    tqdm_class=reporting(progress),
                    library_name="infd",
                )
            )
        except Exception as error:  # the library raises errors of many types; unknown types are reported verbatim
            raise self._explained(error) from error

    def listing(self) -> list[str]:
        from huggingface_hub import HfApi

        if self._access.offline:
            raise self._incomplete()
        api = HfApi(endpoint=self._access.endpoint, token=self._access.token)
        try:
            return api.list_repo_files(self._name, revision=self._revision)
        except Exception as error:
            raise self._explained(error) from error

    @property
    def _cache(self) -> str:
        from huggingface_hub import constants

        return str(self._access.cache or constants.HF_HUB_CACHE)

    def _incomplete(self) -> CheckpointError:
        return CheckpointError(
            f"{self._name} is not complete in {self._cache}, and HF_HUB_OFFLINE forbids fetching it: "
            "start once without HF_HUB_OFFLINE, or give --model a directory"
        )

    def _explained(self, error: Exception) -> StartError:
        """Return the error to report: the cause of `error` and a remedy."""
        from huggingface_hub import constants, errors

        endpoint, cache = self._access.endpoint or constants.ENDPOINT, self._cache
        response: Any = getattr(error, "response", None)
        status = getattr(response, "status_code", None)
        if (number := _os_error(error)) == errno.ENOSPC:
            return FetchFailed(f"{self._name}: no space left for it in {cache}; make room, or set HF_HOME elsewhere")
        if isinstance(error, errors.GatedRepoError) or status == 403:
            return CheckpointError(
                f"{self._name}: {endpoint} refuses access. Accept the model's terms at {endpoint}/{self._name}, "
                "then give a token of that account in HF_TOKEN"
            )
        if isinstance(error, errors.RevisionNotFoundError):
            return CheckpointError(f"{self._name} has no revision {self._revision!r} at {endpoint}")
        if isinstance(error, errors.RepositoryNotFoundError) or status in (401, 404):
            return CheckpointError(
                f"{self._name} is neither a directory here nor a model at {endpoint}, or it is private: "
                "check the name, and give a token in HF_TOKEN if it needs one"
            )
        if isinstance(error, errors.LocalEntryNotFoundError | errors.IncompleteSnapshotError):
            if self._access.offline:
                return self._incomplete()
            reason = error.__cause__ or error
            return FetchFailed(
                f"{self._name} is not in {cache}, and {endpoint} cannot be reached: {_short(reason)}. "
                "Check the network, or give --model a directory"
            )
        if number == errno.EACCES:
            return CheckpointError(f"{self._name}: {cache} is not writable; set HF_HOME to a directory that is")
        return FetchFailed(f"{self._name} cannot be fetched from {endpoint}: {_short(error)}")


def _os_error(error: BaseException | None) -> int | None:
    """Return the first errno of an error and of its causes; None if none has one."""
    while error is not None:
        if isinstance(error, OSError) and error.errno is not None:
            return error.errno
        error = error.__cause__ or error.__context__
    return None


def _short(error: BaseException) -> str:
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return first.rstrip(".")
