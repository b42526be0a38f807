"""Capture work as CUDA graphs that share a memory pool."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakSet

import torch

from infd.runner.faults import free_tensors, lacks_memory

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger("infd.runner")


class Graphs(Protocol):
    """Captures work on a device."""

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Return a function that repeats `work` on the same memory. Capturing may call `work` several times."""


class CudaGraphs:
    """Implements Graphs with CUDA graphs. Other threads may call CUDA during a capture.

    torch.cuda.graph is not used, because before each capture it synchronizes with the device, which delays responses,
    and empties torch's caches, so that the next prompt allocates memory again. CudaGraphs empties the caches only if
    memory runs out.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool: Any = None
        self._made: WeakSet[torch.cuda.CUDAGraph] = WeakSet()  # graphs that share the pool
        # Graphs of failed captures. Kept alive, because torch's allocator of pinned memory continues to query them.
        self._broken: list[torch.cuda.CUDAGraph] = []
        self._nothing = torch.zeros(1, device=device)

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        try:
            return self._capture(work)
        except Exception as error:
            if not lacks_memory(error):
                raise
            free_tensors(error)
        return self._capture(work)

    def _capture(self, work: Callable[[], None]) -> Callable[[], None]:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            work()  # uncaptured: libraries initialize on first use, which cannot be captured
            current.wait_stream(self._stream)
            if not self._made:  # a new pool, because torch rejects a pool whose graphs are all freed
                self._pool = torch.cuda.graph_pool_handle()
            graph = self._record(work)
        self._made.add(graph)
        replay: Callable[[], None] = graph.replay
        return replay

    def _record(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Capture `work` on the current stream. Its tensors are allocated in the pool."""
        graph, ended = torch.cuda.CUDAGraph(), False
        try:
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
                ended = True
        except BaseException:
            if not ended:
                self._abandon(graph)
            raise
        return graph

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a failed capture in torch's allocators, which would otherwise treat the capture as in progress."""
        self._broken.append(graph)
        with suppress(RuntimeError):  # raised if the allocators have already ended the capture
            torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
            torch._C._cuda_releasePool(self._device.index, self._pool)
        self._made.clear()
        # Before torch 2.13, the random number generator treats a failed capture as in progress until another one ends.
        repair = torch.cuda.CUDAGraph()
        try:
            repair.capture_begin(pool=torch.cuda.graph_pool_handle(), capture_error_mode="thread_local")
            self._nothing.zero_()  # torch warns of empty graphs
            repair.capture_end()
        except RuntimeError as error:
            self._broken.append(repair)
            log.warning("torch's random numbers may fail on %s from now on: %s", self._device, error)
