"""infd/http/README.md: each request field of each route, made of the schema's Structs and of what other servers know.

python -m tests.http.field_page      write it
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import msgspec

from infd.http.openapi.operations import OPERATIONS
from infd.http.schema.unsupported import ABSENT
from tests.http import openai_surface

FILE = Path(__file__).parents[2] / "infd" / "http" / "README.md"
KNOWN = Path(__file__).with_name("known_fields.toml")
NAMES = {
    "openai": "OpenAI",
    "anthropic": "Anthropic",
    "vllm": "vLLM",
    "sglang": "SGLang",
    "llamacpp": "llama.cpp",
    "tei": "text-embeddings-inference",
}
GENERATING = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
    "/v1/responses/input_tokens": "input_tokens",
    "/v1/messages": "messages",
    "/v1/messages/count_tokens": "count_tokens",
    "/infill": "infill",
    "/tokenize": "tokenize",
    "/detokenize": "detokenize",
    "/v1/conversations": "conversations",
    "/v1/conversations/{id}": "conversation",
    "/v1/conversations/{id}/items": "items",
}
POOLING = {
    "/v1/embeddings": "embeddings",
    "/pooling": "pooling",
    "/classify": "classify",
    "/score": "score",
    "/rerank": "rerank",
    "/embed": "embed",
    "/embed_all": "embed_all",
    "/embed_sparse": "embed_sparse",
    "/predict": "predict",
    "/similarity": "similarity",
}
COLUMNS = GENERATING | POOLING

HEAD = """# The HTTP API, field by field

`python -m tests.http.field_page` writes this page from `schema/`, the types of the `openai` package and the fields that
other servers know (tests/http/known_fields.toml); a test keeps it current. /openapi.json has types, bounds and answers.

- **yes**: served.
- **400**: refused by name, because infd does not serve it. Null is accepted, and the values that change no answer.
- **ignored**: read and ignored, because it cannot change an answer.
- Empty: no API has the field there. Unknown fields are ignored.

The columns are routes: `chat`, `completions` and `messages` also without /v1 and with /render, `input_tokens` is
/v1/responses/input_tokens, `count_tokens` is /v1/messages/count_tokens, `conversations` is POST /v1/conversations,
`conversation` is POST /v1/conversations/{id}, `items` is POST /v1/conversations/{id}/items. Routes that count or render
tokens check the fields of sampling, and do not use them.

With `use_beam_search` the likeliest texts are searched and none is drawn: `temperature`, `top_p`, `top_k`, `min_p` and
`seed` have no effect.

With `return_routed_experts` a choice has `routed_experts`, in a stream the choice's last event: `{"dtype": "int16",
"shape": [tokens, layers, chosen], "data": "..."}`. `data` is base64 of little-endian numbers: for each token of
prompt and answer but the last, which is not computed, and for each layer with experts, the experts in the order in
which the router chose them. A choice that is cut by a stop string or a limit, or that was preempted, has those of its
own tokens. The prompt is computed without cached pages, for each choice. A model without experts, or whose experts
transformers' code computes, answers 400, and so does /infill; `limits.routed_experts_bytes` bounds the part of the
prompt.

"""
POOLED_HEAD = """
## Embeddings, labels and scores

`embeddings` is /v1/embeddings and /embeddings, `score` is /score and /v1/score, `rerank` is /rerank, /v1/rerank and
/v2/rerank. `embed` to `similarity` are routes of text-embeddings-inference, whose /rerank is known by its `texts`.

"""


def requests() -> dict[str, Any]:
    """Return the Struct of each route's body."""
    found = {each.path: each.request for each in OPERATIONS if each.request is not None}
    return {path: found[path] for path in COLUMNS}


def known() -> dict[str, dict[str, set[str]]]:
    """Return the fields that other servers know: server -> route -> fields."""
    read: dict[str, dict[str, list[str]]] = tomllib.loads(KNOWN.read_text(encoding="utf-8"))
    others = {name: {path: set(fields) for path, fields in routes.items()} for name, routes in read.items()}
    return {"openai": openai_surface.body_fields(), **others}


def states(request: Any) -> dict[str, str]:
    """Return whether each field is served, refused or ignored."""
    refused = dict.fromkeys(refusals(request), "400")
    ignored = dict.fromkeys(getattr(request, "IGNORED", ()), "ignored")
    return dict.fromkeys(request.__struct_fields__, "yes") | ignored | refused


def refusals(request: Any) -> dict[str, tuple[Any, ...]]:
    """Return the fields that are refused, and the values with which they are accepted."""
    supported = getattr(request, "SUPPORTED", ())
    fields = msgspec.structs.fields(request)
    names = [field.name for field in fields if field.default is ABSENT and field.name not in supported]
    return {name: request.NEUTRAL.get(name, ()) for name in names}


def page() -> str:
    head = [HEAD + _table(GENERATING), POOLED_HEAD + _table(POOLING)]
    return "\n".join([*head, "", *_openai(), ""])


def _table(columns: dict[str, str]) -> str:
    """Return the table of the fields of some routes."""
    structs = {path: struct for path, struct in requests().items() if path in columns}
    by_route = {path: states(struct) for path, struct in structs.items()}
    neutral = {name: values for struct in structs.values() for name, values in refusals(struct).items() if values}
    rows = [f"| field | {' | '.join(columns.values())} | also of | accepted where refused |"]
    rows.append("|---|" + "---|" * (len(columns) + 2))
    others = {peer: [routes[path] for path in columns if path in routes] for peer, routes in known().items()}
    for name in sorted({name for found in by_route.values() for name in found}):
        cells = [found.get(name, "") for found in by_route.values()]
        peers = [NAMES[peer] for peer, routes in others.items() if any(name in fields for fields in routes)]
        values = ", ".join(f"`{json.dumps(value)}`" for value in neutral.get(name, ()))
        rows.append(f"| `{name}` | {' | '.join(cells)} | {', '.join(peers)} | {values} |")
    return "\n".join(rows)


def _openai() -> list[str]:
    lines = [
        "## What of OpenAI's API is not served",
        "",
        "From the `openai` package; without its parts for accounts, and for products that are not models.",
        "",
        "Routes:",
        "",
        *(f"- `{route}`" for route in openai_surface.missing_routes()),
        "",
        "Fields that infd's answers never have:",
        "",
    ]
    fields = openai_surface.missing_answers().items()
    return lines + [f"- `{name}`: {', '.join(f'`{field}`' for field in missing)}" for name, missing in fields]


if __name__ == "__main__":
    FILE.write_text(page(), encoding="utf-8")
