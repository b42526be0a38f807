"""Progress bars, for a hub's library, that call a function and draw nothing."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from huggingface_hub.utils.tqdm import tqdm

if TYPE_CHECKING:
    from infd.hub.fetch import Progress


def reporting(progress: Progress | None) -> type[tqdm]:
    """Return a class of progress bars that call `progress` with (bytes done, bytes total)."""

    class Bar(tqdm):
        monitor_interval = 0  # 0: tqdm starts no thread that redraws bars

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "file": io.StringIO(), "disable": False})  # type: ignore[no-untyped-call]

        def display(self, *_: Any, **__: Any) -> None:
            # Bars that count files are ignored. A library may use two bars for bytes: one counts bytes received, the
            # other bytes written.
            if progress is not None and self.unit == "B" and self.n and self.total:
                progress(int(self.n), int(self.total))

    return Bar
