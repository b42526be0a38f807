"""What FlashInfer computes with on one device: its space, its wrappers, and its kernel that needs no plan.

That kernel (XQA) reads lengths and page tables where they lie, so the host does nothing for it from step to step, and
what was captured stays right. It takes one query of each sequence, pages of some sizes, and no cap on scores. Over
8-bit floats it would make such of queries and weights too, which the others do not.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from infd.kernels.flashinfer.wrappers import Asked, Wrapper, Wrappers

if TYPE_CHECKING:
    from torch import Tensor

    from infd.kernels.families.attention import KeyValuePages
    from infd.kernels.flashinfer.left import Left

PARTIAL = 128 * 2**20  # bytes for the results of parts; all wrappers share them, since steps follow one another
SCRATCH = 32 * 2**20  # the same of XQA, whose parts are no more than the device has multiprocessors
SEMAPHORES = 2**18  # of XQA: one for each head of keys of each sequence, at 0 whenever it is not running
BYTES = 4 * SEMAPHORES + PARTIAL + SCRATCH
GENERATIONS = (9, 10, 12)  # of NVIDIA's GPUs, that XQA is compiled for
PAGES = (16, 32, 64, 128)  # tokens of a page that XQA takes
SHARING = 32  # heads that share one of keys, at most, for XQA


class Space:
    """Made once. Its memory stays where it is: graphs were captured with it."""

    def __init__(
        self, package: Any, device: torch.device, left: Left, memory: Tensor | None, *, backend: str, planned: bool
    ) -> None:
        """Set up; see PagedAttention.

        memory  [BYTES] uint8, zeros; None: it takes its own
        """
        self.package = package
        self.left = left
        if memory is None:
            memory = torch.zeros(BYTES, dtype=torch.uint8, device=device)
        semaphores, self._partial, self._scratch = memory.split((4 * SEMAPHORES, PARTIAL, SCRATCH))
        self._semaphores = semaphores.view(torch.uint32)
        self._unplanned = not planned and package.utils.get_compute_capability(device)[0] in GENERATIONS
        self._most: dict[int, int] = {}
        self._pages: dict[tuple[int, Asked], Tensor] = {}
        self._wholes: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]] = {}
        self.prompts = Wrappers(
            lambda: package.BatchPrefillWithPagedKVCacheWrapper(self._partial, kv_layout="HND", backend=backend)
        )
        self.decoding = {cores: Wrappers(partial(self._decoder, cores)) for cores in (False, True)}

    def _decoder(self, cores: bool) -> Wrapper:
        wrapper: Wrapper = self.package.BatchDecodeWithPagedKVCacheWrapper(
            self._partial, kv_layout="HND", use_tensor_cores=cores
        )
        return wrapper

    def lasting_decoder(self, cores: bool, first: Tensor, pages: Tensor, last: Tensor, planned: Tensor) -> Wrapper:
        """Return a wrapper for steps of one size, which are captured.

        first, pages, last  as `Keys`; they stay where they are, as does `planned`, bytes for what a plan says
        """
        wrapper = self.package.BatchDecodeWithPagedKVCacheWrapper(
            self._partial,
            kv_layout="HND",
            use_cuda_graph=True,
            use_tensor_cores=cores,
            paged_kv_indptr_buffer=first,
            paged_kv_indices_buffer=pages,
            paged_kv_last_page_len_buffer=last,
        )
        wrapper.reset_workspace_buffer(self._partial, planned)  # its own is much larger, and pinned once more
        made: Wrapper = wrapper
        return made

    def expect(self, table: Tensor) -> None:
        """Be told of a table [S, width] of steps that are captured; those of smaller ones are the front of it."""
        self._most[table.data_ptr()] = max(table.numel(), self._most.get(table.data_ptr(), 0))

    def pages(self, table: Tensor, asked: Asked) -> Tensor:
        """Return where the pages of such steps stand, [S * width] int32 at least: steps of all sizes share it."""
        most, key = self._most[table.data_ptr()], (table.data_ptr(), asked)
        if key not in self._pages or len(self._pages[key]) < most:
            self._pages[key] = torch.zeros(most, dtype=torch.int32, device=table.device)
        return self._pages[key]

    def needs_no_plan(self, asked: Asked, page_tokens: int) -> bool:
        """Say whether `decode` takes such layers."""
        few = asked.heads // asked.kv_heads <= SHARING
        plain = asked.softcap is None and asked.kept is asked.dtype
        return self._unplanned and page_tokens in PAGES and plain and few

    def decode(
        self,
        q: Tensor,
        pages: KeyValuePages,
        table: Tensor,
        lengths: Tensor,
        asked: Asked,
        window: int | None,
        sinks: Tensor | None,
        out: Tensor,
    ) -> None:
        """Attend q [S, H, D] to `lengths` [S] uint32 keys each, whose pages stand in table [S, pages], into out."""
        self.package.xqa(
            q.unsqueeze(1),
            pages.k,
            pages.v,
            table,
            lengths.unsqueeze(1),
            out.unsqueeze(1),
            self._scratch,
            self._semaphores,
            asked.kv_heads,
            pages.k.shape[2],
            sinks=None if sinks is None else sinks.view(asked.kv_heads, -1),
            q_scale=asked.scale * asked.head**0.5,  # it divides by the root itself
            sliding_win_size=window or 0,
            kv_layout="HND",
        )

    def append(self, k: Tensor, v: Tensor, pages: KeyValuePages, slots: Tensor, nobody: Tensor) -> None:
        """Put k and v [T, K, D] where slots [T] int32 say.

        It is told of one sequence that holds every page in order, so that a slot is a position in it.

        nobody  [T] int32: zeros, the number of that sequence
        """
        every, bounds, last = self._whole(pages)
        self.package.append_paged_kv_cache(
            k, v, nobody, slots, (pages.k, pages.v), every, bounds, last, kv_layout="HND"
        )

    def _whole(self, pages: KeyValuePages) -> tuple[Tensor, Tensor, Tensor]:
        """Return all pages' ids, where they begin and end, and how many tokens the last one holds."""
        (count, _, size, _), device = pages.k.shape, pages.k.device
        if (count, size) not in self._wholes:
            every = torch.arange(count, dtype=torch.int32, device=device)
            bounds = torch.tensor([0, count], dtype=torch.int32).to(device)
            self._wholes[count, size] = every, bounds, torch.full((1,), size, dtype=torch.int32, device=device)
        return self._wholes[count, size]
