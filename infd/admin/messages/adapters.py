"""LoRA adapters."""

from __future__ import annotations

from msgspec import Struct

from infd.admin.messages.exchange import Seconds


class LoadLora(Struct, forbid_unknown_fields=True):
    """Serve the adapter in directory `path`, beneath lora.root, as `name`.

    in_place  replace an adapter already loaded under the name
    wait_s    maximum seconds for which the answer, after loading, waits until no request uses the replaced adapter;
              null: no limit
    """

    name: str
    path: str
    in_place: bool = False
    wait_s: Seconds | None = 0.0


class UnloadLora(Struct, forbid_unknown_fields=True):
    """Stop serving adapter `name`.

    wait_s  maximum seconds for which the answer waits until no request uses the adapter; null: no limit
    """

    name: str
    wait_s: Seconds | None = 0.0


class LoraRow(Struct):
    """An adapter.

    state       ready; stored: not in memory, read again for the next request; leaving: replaced or unloaded, but in use
    base        base model named in the adapter's config
    bytes       host memory that the weights occupy now
    generation  number that is unique for each load
    requests    choices, and requests in preparation, that use the adapter
    """

    name: str
    state: str
    path: str
    base: str
    rank: int
    bytes: int
    generation: int
    requests: int


class Loras(Struct):
    """Loaded adapters. Their weights occupy `bytes` of host memory; the limit is `host_bytes`."""

    loras: list[LoraRow]
    bytes: int
    host_bytes: int


class LoraChanged(Struct):
    """Result of a load or unload.

    changed   false if the adapter was loaded, or unloaded, already
    done      whether no replaced or unloaded adapter of this name is in use any more; infd has then freed them all
    requests  number of choices that still use such adapters
    took_s    seconds from the verb's arrival to the answer
    generation, rank, bytes  properties of the adapter now loaded under the name; 0: no adapter
    """

    name: str
    changed: bool
    done: bool
    requests: int
    took_s: float
    generation: int = 0
    rank: int = 0
    bytes: int = 0
