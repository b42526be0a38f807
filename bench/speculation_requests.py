"""Requests of bench/speculation.jsonl: the entries that a run takes, and the chat request of one."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection

CORPUS = Path(__file__).with_name("speculation.jsonl")


def taken(kinds: Collection[str] | None, take: int, skip: int) -> dict[str, list[dict[str, Any]]]:
    """Return the corpus's entries by kind: of each kind `take` at most, without the first `skip` of these.

    kinds  None: all
    """
    entries: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for entry in map(json.loads, CORPUS.read_text(encoding="utf-8").splitlines()):
        if kinds is None or entry["kind"] in kinds:
            entries[entry["kind"]].append(entry)
    # Spread over the kind, whose neighbouring requests may share a text.
    return {kind: each[:: max(1, len(each) // take)][:take][skip:] for kind, each in entries.items()}


def asked(entry: dict[str, Any], tokens: int) -> dict[str, Any]:
    """Return a chat request that the model answers itself."""
    body = {"messages": [{"role": "user", "content": entry["prompt"]}], "max_tokens": tokens, "temperature": 0}
    body["return_token_ids"] = True
    if "schema" in entry:
        named = {"name": "orders", "schema": entry["schema"], "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": named}
    return body
