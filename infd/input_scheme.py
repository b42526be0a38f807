"""How the inputs of a product are quantized."""

from __future__ import annotations

from typing import Final, NamedTuple


class InputScheme(NamedTuple):
    """How the inputs of a product are quantized: as numbers that share a scale.

    numbers  "int8", "e4m3", "e2m1", or the name of numbers to which no kernel of infd rounds
    inputs   of a token that share a scale; 0: all inputs of a token
    static   whether the checkpoint stores one scale for all tokens; if not, the largest magnitude determines a scale.
             If groups of inputs share a scale: each group's scale is a number of E4M3 times the stored scale
    zeros    whether integers also have a zero point
    powers   whether scales are powers of two
    """

    numbers: str
    inputs: int = 0
    static: bool = False
    zeros: bool = False
    powers: bool = False

    def __str__(self) -> str:
        kind = {"e4m3": "fp8", "e2m1": "fp4"}.get(self.numbers, self.numbers)
        if self.static and not self.inputs:
            return f"{kind} with a stored scale"
        return f"{kind} in groups of {self.inputs}" if self.inputs else f"{kind} by token"

    def before(self, form: InputScheme | None) -> bool:
        """Return whether inputs are rounded by this scheme before the product.

        form  how the product's form quantizes inputs itself; None: it does not. It may do so after rounding to floats,
              which it represents more exactly than they represent the inputs, but not after rounding to integers
        """
        return form is None or self.numbers != "int8"

    def replaceable(self, form: InputScheme | None) -> bool:
        """Return whether a form that quantizes inputs by `form` may compute products of a checkpoint with this scheme.

        Integers with a scale for each token may be replaced by others; stored scales may not.
        """
        return self == form or self.before(form) or not (self.static or self.zeros)


INT8_BY_TOKEN: Final = InputScheme("int8")
