"""The page of what of JSON Schema is kept, made of what the tests find.

python -m tests.grammar.schema_page      write it
"""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[2] / "infd" / "grammar" / "SCHEMAS.md"
REFUSED = 23  # of the 500 real-world schemas

HEAD = """# What of JSON Schema is kept

`schema/` rewrites a schema into keywords that the engine keeps exactly, or refuses it by the path of a keyword. Each
finished answer then validates, and each document that validates can be the answer, with its members in the schema's
order and its numbers in their shortest spelling. `python -m tests.grammar.schema_page` writes this page from the tests.

A refusal is a 400 before any token is generated, with the code `unsupported_grammar`, and names the keyword by its path
in the schema: `the schema at #/properties/tags/uniqueItems: ...`. Do what the message says, or leave out the keyword at
that path and check it in your program. If the schema is too large or malformed, the code says so. "Kept" below means
that every finished answer satisfies the keyword.

- Drafts 4, 6, 7, 2019-09 and 2020-12, by `$schema`; without it 2020-12. Unknown keywords are ignored, as the drafts
  say; `dependencies` is kept in all of them.
- `$ref` within the schema; nothing is fetched. A schema inside another with an identifier of its own and references is
  refused.
- Formats date-time, time, date, duration, email, hostname, ipv4, ipv6, uri and uuid are kept; others are annotations.
- Members come in the order of the schema: `properties` first, then names that patterns or `additionalProperties` allow.
- Bounds from 2**53 on are tightened to the next double.
- A name of `properties` comes at most once. Another name may repeat: the document validates whether a parser keeps the
  first value or the last.
- A name is not spelled with escapes, so that none evades its property.
- Patterns are regular expressions without look-around, back-references and word boundaries; `^(?!literal)` is kept,
  and `\\b` between two classes at the end. A negated class that excludes a quote or a backslash excludes U+0000 too.
- `oneOf`, `not`, `if`, the dependencies: kept if the opposite of each overlapping alternative is one of types, values,
  bounds, lengths and present or absent properties. The opposite of a pattern, of `multipleOf`, of `items` is refused.
  Patterns overlap unless it is proved within a bounded time that no string matches both.
- `uniqueItems` of at most six enumerated items, `contains` beside `maxItems`, `minProperties` of listed properties.

## JSON-Schema-Test-Suite

Of each file of the required part, over all five drafts. *Order*: valid and accepted in the schema's order of members.
*Spelling*: valid and accepted with 1 for 1.0. *Annotation*: rejected by a keyword that only annotates there: a format,
or one that the metaschema leaves out. *Refused*: the schema is refused by name. No test is accepted though invalid, and
no other is rejected though valid.

"""


def page(judged: list[tuple[str, str, str]], refused: dict[int, str], real: list[dict[str, Any]]) -> str:
    """Return the page.

    judged   (draft, file, outcome) of each test of the suite
    refused  number -> message
    real     the 500 schemas
    """
    files: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for _, file, outcome in judged:
        files[file][outcome] += 1
        files["all"][outcome] += 1
    columns = ("right", "order", "spelling", "annotation", "refused")
    rows = [f"| | {' | '.join(columns)} |", "|---|" + "---|" * len(columns)]
    rows += [
        f"| {file} | " + " | ".join(str(files[file][c] or "") for c in columns) + " |"
        for file in sorted(files, key=lambda f: (f == "all", f))
    ]
    kept = len(real) - len(refused)
    rows += [
        "",
        "## Real-world schemas",
        "",
        f"Of 500 real-world schemas, half of them above 2 KB (tests/grammar/SCHEMAS.md), {kept} are kept:",
        f"{kept / 5:.1f} %. llguidance 1.9.1 without the rewriting keeps 403: 80.6 %.",
        "",
        "| number | family | refused because |",
        "|---|---|---|",
    ]
    rows += [f"| {n} | {real[n]['family']} | {_cell(m)} |" for n, m in sorted(refused.items())]
    return HEAD + "\n".join(rows) + "\n"


def _cell(message: str) -> str:
    return message[:200].replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    from tests.grammar import test_json_schema as tests

    FILE.write_text(page(tests.judged(), tests.refused(), tests.real()))
