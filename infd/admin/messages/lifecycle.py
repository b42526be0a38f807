"""Drain, pause, sleep and wake; other weights; the prefix cache."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from infd.admin.messages.exchange import Seconds
from infd.memory import MemoryPart


class Draining(Struct):
    """The daemon admits no more requests, and exits after the requests in flight. `running`, `waiting`: choices."""

    pid: int
    running: int
    waiting: int


class Pause(Struct, forbid_unknown_fields=True):
    """Stop steps until resume.

    mode    "abort" ends the requests in flight, "wait" lets them finish, "keep" freezes them
    new     "hold" queues new requests within the queue's bounds, "reject" answers them with 503; null: "reject" with
            mode "abort", else "hold"
    wait_s  maximum seconds for which the answer waits for the transition's end; null: no limit
    """

    mode: Literal["abort", "wait", "keep"] = "wait"
    new: Literal["hold", "reject"] | None = None
    wait_s: Seconds | None = None


class Sleep(Struct, forbid_unknown_fields=True):
    """Pause, then release memory. Frozen requests are recomputed after wake.

    mode    as in `Pause`
    level   1: release the cache, and move a GPU's weights to host memory; 2: release cache and weights, so that wake
            reads the weights from disk
    wait_s  as in `Pause`
    """

    mode: Literal["abort", "wait", "keep"] = "wait"
    level: Literal[1, 2] = 1
    wait_s: Seconds | None = None


class Wake(Struct, forbid_unknown_fields=True):
    """Arguments of wake (return to the state before sleep) and of resume (become ready).

    tags    parts of memory to restore; null: all. The daemon sleeps until all are restored.
    wait_s  as in `Pause`
    """

    tags: frozenset[MemoryPart] | None = None
    wait_s: Seconds | None = None


class TransitionResult(Struct):
    """Progress or result of a lifecycle transition.

    done         whether the transition has ended; if not, it continues
    took_s       seconds from the verb's arrival to the transition's end; None before the end
    aborted      choices that the transition aborted
    frozen       choices frozen until resume
    freed_bytes  decrease of GPU memory in use; on a CPU, of resident memory
    Other fields as in `Status`.
    """

    state: str
    reason: str
    done: bool
    took_s: float | None
    aborted: int
    frozen: int
    freed_bytes: int
    weights: str
    kv_cache: str
    running: int
    waiting: int
    held: int


class LoadWeights(Struct, forbid_unknown_fields=True):
    """Load the weights of another checkpoint of this model, while no step runs.

    path    directory beneath model.weights_root; a relative path starts there
    wait_s  as in `Pause`
    """

    path: Annotated[str, Meta(min_length=1)]
    wait_s: Seconds | None = None


class ResetPrefixCache(Struct, forbid_unknown_fields=True):
    """Drop cached prefixes. `running`: also recompute running requests; else running requests keep their pages."""

    running: bool = False


class PrefixCacheReset(Struct):
    """The numbers of pages dropped from the prefix cache, and of running choices that are recomputed."""

    pages: int
    preempted: int
