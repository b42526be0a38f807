"""What each API key has used since the start."""

from __future__ import annotations

from msgspec import Struct


class Usage(Struct, kw_only=True):
    """Sums over the inference requests of one API key: those for generated text, embeddings, labels and scores.

    requests   requests that found room in the queue; those refused because of a rate too
    limited    requests refused because a rate was used up
    refused    requests refused because of load or the daemon's state (queue_full, key_in_flight, draining ...); they
               count in `requests` too if there was room until their bodies were read
    answered   requests that were queued and have ended
    prompt     prompt tokens; a prompt counts once for all its choices
    cached     prompt tokens found in the cache
    generated  tokens delivered
    """

    tenant: str = ""
    requests: int = 0
    limited: int = 0
    refused: int = 0
    answered: int = 0
    prompt: int = 0
    cached: int = 0
    generated: int = 0
