"""Rewrite `contains` into alternatives by the positions of matching items, and `uniqueItems` into an enum of arrays."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

from infd.grammar.schema.algebra import ALTERNATIVES
from infd.grammar.schema.refusals import failed
from infd.grammar.schema.shapes import ALL, key, names_of, parts_of

if TYPE_CHECKING:
    from infd.grammar.schema.negation import Negation
    from infd.grammar.schema.refusals import Path
    from infd.grammar.schema.shapes import Schema

_ARRANGEMENTS = 2000  # most arrays that uniqueItems may list


class Arrays:
    """Rewrites `contains` and `uniqueItems`."""

    def __init__(self, negation: Negation) -> None:
        self._negation = negation
        self._algebra = negation.algebra

    def containing(self, wanted: Schema, bounds: tuple[int, int | None], beside: Schema, path: Path) -> list[Schema]:
        """Return the schemas that `contains` adds to a conjunction: arrays must contain items that `wanted` accepts.

        bounds  least and most number of items that `wanted` accepts; None: no bound
        beside  the conjunction so far

        Raises Inexpressible, and GrammarFailed at `path`.
        """
        least, most = bounds
        if (least == 0 and most is None) or "array" not in self._algebra.atoms(beside):
            return []
        leaf = next((p for p in parts_of(beside) if "maxItems" in p or p.get("items") is False), {})
        length = leaf.get("maxItems", len(leaf.get("prefixItems", ())) if leaf.get("items") is False else None)
        if wanted is True:
            return [{k: v for k, v in (("minItems", least), ("maxItems", most)) if v is not None}]
        if least == 0 and most == 0:
            return [{"items": self._algebra.disjunction(self._negation.of(wanted, True))}]
        if length is None:
            raise failed(path, "contains is kept only beside maxItems: add maxItems, or leave contains out")
        rest = self._algebra.atoms(beside) - {"array"}
        others = [{"type": names_of(rest)}] if rest else []
        if most is None:
            if length > ALTERNATIVES or math.comb(length, least) > ALTERNATIVES:
                raise failed(path, "contains has too many positions to choose from", "grammar_too_large")
            chosen = itertools.combinations(range(length), least) if least <= length else ()
            return [self._algebra.disjunction([*others, *(_with(c, wanted, True, c[-1] + 1) for c in chosen)])]
        if length > ALTERNATIVES or 2**length > ALTERNATIVES:
            raise failed(path, "contains has too many positions to choose from", "grammar_too_large")
        unwanted = self._algebra.disjunction(self._negation.of(wanted, True))
        arrays = (
            _with(c, wanted, unwanted, (c[-1] + 1) if c else 0)
            for n in range(least, min(most, length) + 1)
            for c in itertools.combinations(range(length), n)
        )
        return [self._algebra.disjunction([*others, *arrays])]

    def unique(self, parts: list[Schema], path: Path) -> list[Schema]:
        """Return the conjunction `parts`, limited to arrays without equal items. Raises GrammarFailed at `path`."""
        beside = self._algebra.conjunction(parts)
        if "array" not in self._algebra.atoms(beside):
            return parts
        leaves = [p for p in parts_of(beside) if p.keys() & {"items", "prefixItems", "maxItems", "minItems", "enum"}]
        most = min((p["maxItems"] for p in leaves if "maxItems" in p), default=None)
        least = max((p.get("minItems", 0) for p in leaves), default=0)
        if most is not None and most <= 1:
            return parts
        for leaf in leaves:
            if "enum" in leaf:
                arrays = [v for v in leaf["enum"] if not isinstance(v, list) or len({key(e) for e in v}) == len(v)]
                return [*parts, {"enum": arrays} if arrays else False]
            prefix = leaf.get("prefixItems", [])
            pairs = itertools.combinations(prefix, 2)
            if leaf.get("items") is False and all(self._algebra.disjoint(a, b) for a, b in pairs):
                return parts
        known = (self._algebra.values(p.get("items", True)) for p in leaves if "prefixItems" not in p)
        values = next((v for v in known if v), None)
        if values is None:
            advice = "list them in items with enum, or leave uniqueItems out"
            raise failed(path, f"uniqueItems is kept only for at most six enumerated items: {advice}")
        listed = self._arranged(values, beside, (least, most), path)
        rest = self._algebra.atoms(beside) - {"array"}
        others = self._algebra.conjunction([{"type": names_of(rest or ALL)}, *parts])
        return [self._algebra.disjunction([{"enum": listed} if listed else False, *([others] if rest else [])])]

    def _arranged(
        self, values: list[Any], beside: Schema, bounds: tuple[int, int | None], path: Path
    ) -> list[list[Any]]:
        """Return the arrays that `beside` accepts among arrays of distinct `values` with a length within `bounds`."""
        least, most = bounds
        most = len(values) if most is None else min(most, len(values))
        sizes = range(min(least, 7), min(most, 7) + 1)  # 7 items alone have 5,040 arrangements, which are too many
        if len(values) > _ARRANGEMENTS or sum(math.perm(len(values), n) for n in sizes) > _ARRANGEMENTS:
            raise failed(path, f"uniqueItems of {len(values)} items has too many arrangements", "grammar_too_large")
        arrays = [list(a) for n in range(least, most + 1) for a in itertools.permutations(values, n)]
        accepted = [(a, self._algebra.accepts(beside, a)) for a in arrays]
        if any(yes is None for _, yes in accepted):
            raise failed(path, "uniqueItems beside other keywords for items is not kept")
        return [a for a, yes in accepted if yes]


def _with(chosen: tuple[int, ...], wanted: Schema, unwanted: Schema, least: int) -> Schema:
    """Return a schema of arrays of `least` or more items: `wanted` at the chosen positions, `unwanted` elsewhere."""
    prefix = [wanted if i in chosen else unwanted for i in range(least)]
    leaf: dict[str, Any] = {"type": ["array"], "prefixItems": prefix, "minItems": least}
    return {**leaf, "items": unwanted} if unwanted is not True else leaf
