"""The interface between the engine and the device.

An executor runs plans strictly in the order given. A step has two halves,
`forward` and `sample`. So a mask that depends on the previous step can be
computed during the forward pass. The result arrives only after `sample`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from asyncio import Future
    from collections.abc import Callable, Collection

    from infd.errors import DeviceLost
    from infd.memory import Memory, MemoryPart
    from infd.request import Adapter, AdapterFacts
    from infd.scheduler.layout import Capacity
    from infd.scheduler.plan import StepPlan, StepResult


class Step(Protocol):
    """An issued forward pass."""

    def sample(self, mask: Any | None = None) -> Future[StepResult]:
        """Permit the step to sample; return a future of its result, resolved on the event loop.

        Called exactly once per step. If the step fails, the future raises the
        error, and all later steps in flight fail with that error without running.
        The future is never cancelled.
        """


class Executor(Protocol):
    """Computes plans: on a device thread, in another process, or on a null device."""

    depth: int  # steps to keep in flight
    decoding_depth: int  # steps to keep in flight while Scheduler.may_plan_ahead; at least `depth`

    @property
    def memory(self) -> Memory:
        """Residency of weights and cache. No step is issued unless both are loaded."""

    @property
    def sleep_refusal(self) -> str:
        """Reason why memory cannot be released; empty if `sleep` is possible."""

    async def load(self, lost: Callable[[DeviceLost], None] | None = None) -> Capacity:
        """Load the model and allocate the cache. Raises StartError. Called once, on the event loop.

        lost  called on the event loop if the device is lost later, even while no step is in flight
        """

    def forward(self, plan: StepPlan) -> Step:
        """Issue a step without waiting for it. Never raises: errors are set on the future of `Step.sample`."""

    def released_by(self, level: int) -> frozenset[MemoryPart]:
        """Return the parts of memory that a sleep of this level releases."""

    async def sleep(self, level: int) -> int:
        """Release the cache's memory once the steps issued so far have run; at level 2 also the weights' memory.

        At level 1 a GPU's weights move to host memory; weights that do not fit there are released as at level 2.
        Returns the bytes freed: of device memory or, on a CPU, of the process's memory.
        """

    async def wake(self, parts: Collection[MemoryPart]) -> None:
        """Restore `parts`: the cache empty, the weights from host memory or their files.

        After a StartError no part is restored, and `wake` may be called again.
        """

    async def load_weights(self, path: str, root: str = "") -> None:
        """Load the weights of another checkpoint of this model.

        root  directory that must contain `path` (model.weights_root); empty: the parent of the configured checkpoint

        Raises StartError; if reading fails midway, `memory.weights` is INVALID.
        """

    async def read_adapter(self, adapter: Adapter, root: str | None, room: int) -> AdapterFacts:
        """Read the adapter at `adapter.path` in another thread, and check it against the loaded model.

        The adapter's weights stay in host memory until `forget_adapter`; later plans may load the weights into a slot.

        root  directory that must contain `adapter.path`; None: no restriction
        room  most bytes of host memory that the adapter may take

        Raises CheckpointError, AdapterTooLarge.
        """

    def forget_adapter(self, adapter: Adapter, slot: int | None) -> None:
        """Free an adapter and its slot once the steps issued so far have run. No later step may name the adapter."""

    def describe(self) -> dict[str, Any]:
        """Return facts for operators.

        device, weights_bytes, cache_bytes, threads, load_s
        dtype         of activations
        quantization  the form of the weights
        stored        number of encoded matrices in the checkpoint, by encoding
        vocabulary    the form of embedding and head, if it differs from `quantization`
        cache_dtype   of cached keys and values
        ops           the selected kernels: a dict {family, chosen, refused: {name: reason}} for each family
        kernels       on a GPU: numbers of kernels compiled, and read from the cache of compiled kernels
        graphs        on a GPU: the captured sizes of decoding steps
        resident      while memory is released: bytes that remain on the device, by use
        native_missing  on a CPU: why native kernels are not used, if they are not
        """

    def pulse(self) -> int:
        """Return a count that changes whenever the device makes progress. Safe from any thread."""

    async def close(self) -> None:
        """Stop and free everything. Idempotent."""
