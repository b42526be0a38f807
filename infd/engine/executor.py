"""The seam between the step loop and whatever computes.

An executor runs plans strictly in the order given. `forward` and `sample` are
two halves so that a mask that depends on the previous step can be made while
the forward pass already runs; a result arrives only after `sample`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from asyncio import Future
    from collections.abc import Callable, Collection

    from infd.errors import DeviceLost
    from infd.memory import Memory, Part
    from infd.request import Adapter, AdapterFacts
    from infd.scheduler.layout import Capacity
    from infd.scheduler.plan import StepPlan, StepResult


class Step(Protocol):
    """A forward pass that was issued."""

    def sample(self, mask: Any | None = None) -> Future[StepResult]:
        """Let the step sample, and return what resolves to its result on the event loop.

        Called exactly once per step. Where the step raises, the future raises;
        the steps in flight behind it then fail too, with the same error, and do
        not run. The future is never cancelled.
        """


class Executor(Protocol):
    """Where plans are computed: a thread with a device, a null device, later a pipeline of processes."""

    depth: int  # steps to keep in flight

    @property
    def memory(self) -> Memory:
        """What is in memory. No step is issued while it is not whole."""

    @property
    def sleepless(self) -> str:
        """Why memory cannot be given back; empty where it can."""

    async def load(self, lost: Callable[[DeviceLost], None] | None = None) -> Capacity:
        """Load the model and make the cache. Raises StartError. Called once, on the event loop.

        lost  called on the event loop if the device is lost later, also while nothing runs
        """

    def forward(self, plan: StepPlan) -> Step:
        """Issue a step without waiting for it. Never raises: errors come through `Step.sample`."""

    def gives_back(self, level: int) -> frozenset[Part]:
        """Return what a sleep of that level gives back."""

    async def sleep(self, level: int) -> int:
        """Give the cache's memory back behind the steps issued so far, at level 2 the weights' too.

        At level 1 a GPU's weights move to the host, if that has room for them. Returns by how many bytes the device's
        memory, on a CPU the process, shrank.
        """

    async def wake(self, parts: Collection[Part]) -> None:
        """Take these parts back: the cache empty, the weights read again from where they came.

        Raises StartError where that fails; then nothing more is held than before, and it may be tried again.
        """

    async def load_weights(self, path: str) -> None:
        """Put the weights of another checkpoint of this model in place; it lies beneath model.weights_root.

        Raises StartError; if reading fails midway, `memory.weights` is invalid.
        """

    async def read_adapter(self, adapter: Adapter, root: str | None, room: int) -> AdapterFacts:
        """Read the adapter at `adapter.path`, off the device and off the loop; check that it fits the loaded model.

        Its weights are held in the host's memory until `forget_adapter`; plans issued from now on may load them.

        root  the directory that must contain it; None: any directory
        room  the bytes of memory that it may take

        Raises CheckpointError, AdapterTooLarge.
        """

    def forget_adapter(self, adapter: Adapter, slot: int | None) -> None:
        """Free an adapter that no later step names, and its slot, behind the steps issued so far."""

    def describe(self) -> dict[str, Any]:
        """Return what operators ask for: device, dtype, weights_bytes, cache_bytes, threads, load_s.

        dtype is that of activations; quantization says what weights were made, vocabulary what the embedding and the
        head are, if something else, cache_dtype what is cached.
        Key "ops" holds the kernel selection, one {family, chosen, refused: {name: reason}} each. On a GPU
        "kernels" says how many were compiled and how many found, "graphs" which sizes of decoding steps are captured.
        "resident" says, while memory is given back, what stayed on the device, in bytes by what it is.
        """

    def pulse(self) -> int:
        """Return a count that moves whenever the device makes progress; safe from any thread."""

    async def close(self) -> None:
        """Stop and free everything. Idempotent."""
