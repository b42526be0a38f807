"""Tables of sequence breakers on the device, shared by the rows whose breakers are equal."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    import numpy.typing as npt
    from torch import Tensor

    from infd.request import Breakers

MOST: Final = 16  # tables kept; each has four bytes per token of the vocabulary


class Table(NamedTuple):
    """Breakers as families.draw.Repeats has them."""

    heads: Tensor
    tails: Tensor


class BreakerTables:
    """Creates tables, and caches the MOST most recently used."""

    def __init__(self, vocab_size: int, upload: Callable[[npt.NDArray[Any]], Tensor]) -> None:
        self._vocab_size = vocab_size
        self._upload = upload
        self._tables: OrderedDict[Breakers, Table] = OrderedDict()

    def of(self, breakers: Breakers) -> Table:
        """Return the table of `breakers`."""
        if breakers not in self._tables:
            self._tables[breakers] = self._make(breakers)
            if len(self._tables) > MOST:
                self._tables.popitem(last=False)
        self._tables.move_to_end(breakers)
        return self._tables[breakers]

    def _make(self, breakers: Breakers) -> Table:
        heads = np.zeros(self._vocab_size, np.uint32)
        for bit, ids in enumerate(breakers.heads):
            known = np.frombuffer(ids, "<i4")
            heads[known[known < self._vocab_size]] |= np.uint32(1 << bit)  # the tokenizer may have more than the logits
        tails = np.full((len(breakers.tails), max(map(len, breakers.tails), default=1)), -1, np.int32)
        for row, tail in zip(tails, breakers.tails, strict=True):
            row[: len(tail)] = tail
        # Copied: the staging buffer that an upload returns a view of is used again.
        return Table(self._upload(heads.view(np.int32)).clone(), self._upload(tails).clone())
