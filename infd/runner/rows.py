"""The persistent batch: on the device, one row per running sequence.

The host writes a row when a sequence joins the batch, and when the sequence is granted pages; the sampler appends
sampled tokens. All joins of a plan are gathered on the host and written together, then all its grants. The next plan
may assign a row to another sequence before a step's results are read, so results are never read from rows.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from infd.kernels.families.rows import BatchState
from infd.kernels.reference.rows import RowKernels as Reference
from infd.request import Pool, pick
from infd.rounding import ceil_div
from infd.runner.arenas.arena import zeros
from infd.runner.row_sampling import UNSAMPLED, Float, Integer, columns, row_sampling

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    from torch import Tensor

    from infd.kernels.families.rows import DecodeInputs, RowKernels, TokenPlaces
    from infd.runner.row_sampling import RowSampling
    from infd.runner.staging import Staging
    from infd.scheduler.plan import Draft, Grant, Join

    Array = npt.NDArray[Any]


class HostRows(NamedTuple):
    """Rows on a CPU, read and written without torch, whose calls give the interpreter's lock to other threads.

    cells  memory views of tokens, length and Rows.least: single numbers are read and written faster than in arrays
    """

    tokens: Array  # see Rows
    tables: Array
    cells: tuple[memoryview, memoryview, memoryview]

    def last_known(self, row: Array, end: Array) -> list[int]:
        """Return the token before position `end` of each row."""
        known: list[int] = self.tokens[row, end - 1].tolist()
        return known

    def draft(self, drafts: Sequence[Draft]) -> None:
        """See Rows._draft."""
        tokens, length, least = self.cells
        for each in drafts:
            row, start = each.row, each.start
            least[row] = max(least[row], start)
            for place in range(max(start, length[row]), start + len(each.tokens)):
                tokens[row, place] = each.tokens[place - start]


class Rows:
    """One row per sequence, and a last row, `scratch`, for padding. The page tables of `scratch` contain page 0 only.

    tokens    [R + 1, max_len] int32: all known tokens, prompt and sampled; then drafts, and tokens that were not kept
    length    [R + 1] int64: number of known tokens; a plan may assume more
    tables    [R + 1, G, pages] int32: page ids by group and page index; 0: no page
    state     tokens, length and tables, as the kernels' argument
    slots     [R + 1] uint16, on the host: slot of each row's adapter; 0: the model without adapter
    regimes   [R + 1] int64, on the host: regime of each row's rotary angles, see Regimes
    floats    [R + 1, len(Float)] float32: sampling parameters
    integers  [R + 1, len(Integer)] int32: sampling parameters
    stages    [R + 1] uint16, on the host: Stage flags of each row
    least     [R + 1] int64, on the host: lower bound of `length`; equal to it if the row never had drafts
    sampling  on the host: by row, the sampling parameters that `floats` and `integers` do not contain
    """

    def __init__(
        self,
        *,
        rows: int,
        max_len: int,
        page_tokens: Sequence[int],
        vocab_size: int,
        staging: Staging,
        kernels: RowKernels | None = None,
    ) -> None:
        """Allocate `rows` rows and the scratch row.

        max_len      most tokens of a sequence
        page_tokens  tokens per page, by page group
        staging      copies to the device of the rows
        kernels      None: the reference implementation
        """
        self.staging = staging
        self.device = device = staging.device
        self._kernels = kernels or Reference()
        self.max_len = max_len
        self.vocab_size = vocab_size
        self.scratch = rows
        pages = max((ceil_div(max_len, size) for size in page_tokens), default=0)
        self.tokens = zeros((rows + 1, max_len), torch.int32, device)
        self.length = torch.ones(rows + 1, dtype=torch.int64, device=device)
        self.tables = torch.zeros((rows + 1, len(page_tokens), pages), dtype=torch.int32, device=device)
        self.state = BatchState(self.tokens, self.length, self.tables)
        self.floats = torch.zeros((rows + 1, len(Float)), dtype=torch.float32, device=device)
        self.integers = torch.zeros((rows + 1, len(Integer)), dtype=torch.int32, device=device)
        self.stages = np.zeros(rows + 1, dtype=np.uint16)
        self.slots = np.zeros(rows + 1, dtype=np.uint16)
        self.regimes = np.zeros(rows + 1, dtype=np.int64)
        self.least = np.zeros(rows + 1, dtype=np.int64)
        self.sampling: list[RowSampling] = [UNSAMPLED] * (rows + 1)

    def stage(self, joins: Sequence[Join], grants: Sequence[Grant], drafts: Sequence[Draft] = ()) -> None:
        """Write a plan's joins, grants and drafts, in this order.

        Raises ValueError or OverflowError for an invalid join.
        """
        for join in joins:
            pools = pick(Pool, join.wants) is not None
            self.sampling[join.row] = sampling = UNSAMPLED if pools else row_sampling(join, self.vocab_size)
            self.stages[join.row] = sampling.stages
            self.slots[join.row] = join.slot
            self.regimes[join.row] = join.regime
            self.least[join.row] = len(join.tokens)
        if joins:
            self._join([(join, self.checked(join, np.int32)) for join in joins])
        if grants and self.device.type == "cpu":
            for each in grants:
                self.on_host.tables[each.row, each.group, each.index] = each.page
        elif grants:
            row, group, index, page = self.upload(
                np.array([(g.row, g.group, g.index, g.page) for g in grants], dtype=np.int64).T
            )
            self.tables.index_put_((row, group, index), page.to(torch.int32))
        if drafts:
            self._draft(drafts)

    @cached_property
    def on_host(self) -> HostRows:
        """The rows as arrays, on a CPU."""
        tokens = self.tokens.numpy()
        cells = tokens.data, self.length.numpy().data, self.least.data
        return HostRows(tokens, self.tables.numpy(), cells)

    def sampling_of(self, row_ids: Array) -> list[RowSampling]:
        """Return the entries of `sampling` of some rows."""
        return [self.sampling[row] for row in row_ids]

    def append(self, row: Tensor, end: Tensor, token: Tensor) -> None:
        """Append a sampled token to each row, at position `end`. row, end, token: [N] int64."""
        self._kernels.append(self.state, row, end, token)

    def place_tokens(self, row: Tensor, bound: Tensor, span: Tensor, offset: Tensor) -> TokenPlaces:
        """Locate a step's tokens; see families.rows.RowKernels."""
        return self._kernels.place_tokens(self.state, row, bound, span, offset)

    def place_pages(
        self, group: int, row: Tensor, pages: int, token_row: Tensor, position: Tensor, page_tokens: int
    ) -> tuple[Tensor, Tensor]:
        """Return the pages of spans, and the slots of tokens, in page group `group`; see families.rows.RowKernels."""
        return self._kernels.place_pages(self.tables[:, group], row, pages, token_row, position, page_tokens)

    def gather_inputs(self, inputs: DecodeInputs) -> None:
        """Fill the input buffers of a decoding step with the last known token of each row."""
        self._kernels.gather_inputs(self.state, inputs)

    def upload(self, array: Array) -> Tensor:
        """Copy an array to the device."""
        return self.staging.up(array)

    def checked(self, join: Join, dtype: type[np.signedinteger[Any]]) -> Array:
        """Return the tokens of a join, [n] of `dtype`. Raises ValueError if n or a token id is out of range."""
        tokens = np.array(join.tokens, dtype)
        if not 0 < len(tokens) <= self.max_len:
            raise ValueError(f"a sequence of {len(tokens)} tokens; a row holds 1 to {self.max_len}")
        if np.maximum.reduce(tokens.view(f"u{tokens.itemsize}")) >= self.vocab_size:  # negative ids too
            raise ValueError(f"a token id outside 0..{self.vocab_size - 1}")
        return tokens

    def _join(self, joins: Sequence[tuple[Join, Array]]) -> None:
        """Write the rows of `joins`: pairs of a join and its tokens [n] int32."""
        count, longest = len(joins), max(len(tokens) for _, tokens in joins)
        history = np.zeros((count, longest), dtype=np.int32)
        for i, (_, tokens) in enumerate(joins):
            history[i, : len(tokens)] = tokens
        row = self.upload(np.array([join.row for join, _ in joins], dtype=np.int64))
        self.staging.write(self.tokens, row, history)
        self.staging.write(self.length, row, np.array([len(tokens) for _, tokens in joins], dtype=np.int64))
        if self.tables.numel():
            tables = np.zeros((count, *self.tables.shape[1:]), dtype=np.int32)
            for i, (join, _) in enumerate(joins):
                for group, table in enumerate(join.tables):
                    tables[i, group, : len(table)] = table
            self.staging.write(self.tables, row, tables)
        if any(pick(Pool, join.wants) is None for join, _ in joins):  # rows that are pooled are not sampled
            written = [columns(join, self.vocab_size, self.max_len) for join, _ in joins]
            self.staging.write(self.floats, row, np.array([floats for floats, _ in written]))
            integers = np.array([integers for _, integers in written]).astype(np.int32)
            self.staging.write(self.integers, row, integers)

    def _draft(self, drafts: Sequence[Draft]) -> None:
        """Write drafts behind the known tokens of their rows."""
        if self.device.type == "cpu":
            self.on_host.draft(drafts)
            return
        for each in drafts:
            self.least[each.row] = max(self.least[each.row], each.start)
        row, place, draft = self.upload(
            np.array([(d.row, at, token) for d in drafts for at, token in enumerate(d.tokens, d.start)]).T
        )
        known = self.tokens[row, place]
        self.tokens.index_put_((row, place), torch.where(place < self.length[row], known, draft.to(torch.int32)))
