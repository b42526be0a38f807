"""The weights that a model declares before memory is allocated for them.

A parameter names the checkpoint tensors that fill its rows; `weights/` loads them. Layers declare their parameters on
a Blueprint (`blueprint.py`) while the model is built, so the list is complete once the last layer exists.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from msgspec import Struct

from infd.kernels.families.inputs import Rounding
from infd.kernels.families.matrices import Grouped, Packable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from infd.groups import GroupedRows, Groups
    from infd.input_scheme import InputScheme
    from infd.kernels.families.inputs import Inputs
    from infd.kernels.families.matrices import Form, Packing


class View(Struct, frozen=True):
    """Some rows of one matrix, or some elements of one vector, of a checkpoint's stack of them [experts, ...].

    index   of the matrix
    first   row
    step    between rows: 2 where rows of two matrices alternate
    turned  whether the stored matrix is transposed, so that rows are its columns
    """

    index: int
    count: int
    first: int = 0
    step: int = 1
    turned: bool = False


class Source(Struct, frozen=True):
    """A checkpoint tensor of `shape`, and the first row of the parameter that it fills.

    view  the rows that fill the parameter; None: all
    """

    name: str
    shape: tuple[int, ...]
    row: int = 0
    view: View | None = None

    @property
    def rows(self) -> int:
        """Number of the parameter's rows that the tensor fills."""
        if self.view is not None:
            return self.view.count
        return self.shape[0] if self.shape else 1


class RoundedInputs:
    """The rounding of a product's inputs.

    stored       whether the checkpoint's scheme says so; if not, how weights are quantized while loading
    scale, zero  [1] float32, on the device, at a fixed address; None: the scheme computes them. If stacked matrices
                 have different scales, the numbers represent the union of their ranges
    """

    def __init__(self, kernel: Inputs, scheme: InputScheme, device: torch.device, *, stored: bool = True) -> None:
        self._kernel, self.scheme, self.stored = kernel, scheme, stored
        self._scales: dict[int, tuple[float, float]] = {}
        self.scale = torch.ones(1, device=device) if scheme.static else None
        self.zero = torch.zeros(1, device=device) if scheme.static and scheme.zeros else None

    def place(self, row: int, scale: float, zero: float) -> None:
        """Store the scale and zero point of the stacked matrix whose first row is `row`. Raises ValueError."""
        if not 0 < scale < float("inf"):
            raise ValueError(f"a scale of inputs cannot be {scale}")
        self._scales[row] = scale, zero
        assert self.scale is not None
        found = set(self._scales.values())
        if len(found) > 1 and self.zero is None:
            scale = max(found)[0]
        elif len(found) > 1:
            least = min((-128 - offset) * each for each, offset in found)
            most = max((127 - offset) * each for each, offset in found)
            scale = (most - least) / 255
            zero = round(-128 - least / scale)
        self.scale.fill_(scale)
        if self.zero is not None:
            self.zero.fill_(zero)

    def recipe(self) -> Rounding:
        return Rounding(self._kernel, self.scheme, self.scale, self.zero)


class Parameter:
    """One tensor of the model, in the checkpoint's row order.

    `tensor` is set when the weights are loaded; reading it earlier raises AttributeError.
    """

    __slots__ = ("dtype", "shape", "sources", "tensor")

    kept = False
    refused = ""
    inputs: RoundedInputs | None = None

    tensor: torch.Tensor

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, sources: tuple[Source, ...]) -> None:
        self.shape = shape
        self.dtype = dtype
        self.sources = sources

    @property
    def input_scheme(self) -> InputScheme | None:
        """See weights/load.py Parameter."""
        return None

    def rows(self, first: int, count: int) -> torch.Tensor | None:
        """See weights/load.py Parameter."""
        return self.tensor.narrow(0, first, count) if self.shape else self.tensor

    def packing(self, first: int, dtype: torch.dtype | str) -> tuple[Packing, int] | None:
        """See weights/load.py Parameter."""
        return None

    def groups(self) -> Groups | None:
        """See weights/load.py Parameter."""
        return None

    def place_groups(self, first: int, rows: GroupedRows) -> None:
        """See weights/load.py Parameter."""
        raise TypeError(self)

    def place(self, first: int, rows: torch.Tensor) -> None:
        """See weights/load.py Parameter."""
        self.tensor.narrow(0, first, rows.shape[0]).copy_(rows)


class Matrix(Parameter):
    """A weight matrix [out, in]; `form` defines its storage and its products.

    kept, refused, inputs  see weights/load.py Parameter
    rounding               how inputs are rounded before the product; None: they are not, or the form quantizes them
    """

    __slots__ = ("form", "inputs", "kept", "refused", "rounding")

    def __init__(
        self,
        form: Form,
        sources: tuple[Source, ...],
        *,
        kept: bool = False,
        refused: str = "",
        inputs: RoundedInputs | None = None,
    ) -> None:
        super().__init__(form.shape, form.dtype, sources)
        self.form, self.kept, self.refused, self.inputs = form, kept, refused, inputs
        itself = inputs is not None and form.quantizes == inputs.scheme
        self.rounding = None if inputs is None or itself else inputs.recipe()

    @property
    def input_scheme(self) -> InputScheme | None:
        """See weights/load.py Parameter."""
        if self.inputs is not None:
            return self.inputs.scheme
        return self.form.quantizes

    def rows(self, first: int, count: int) -> torch.Tensor | None:
        return self.form.rows(self.tensor, first, count)

    def packing(self, first: int, dtype: torch.dtype | str) -> tuple[Packing, int] | None:
        packing = self.form.packing(self.tensor, dtype) if isinstance(self.form, Packable) else None
        return None if packing is None else (packing, first)

    def groups(self) -> Groups | None:
        return self.form.groups if isinstance(self.form, Grouped) else None

    def place_groups(self, first: int, rows: GroupedRows) -> None:
        assert isinstance(self.form, Grouped)
        self.form.place_groups(self.tensor, first, rows)

    def place(self, first: int, rows: torch.Tensor) -> None:
        self.form.place(self.tensor, first, rows)

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None = None, *, wide: bool = False) -> torch.Tensor:
        """See Form.multiply; x is rounded first if the checkpoint's scheme quantizes it."""
        if self.rounding is not None:
            kernel, scheme, scale, zero = self.rounding
            x = kernel.round(x, scheme, scale, zero)
        return self.form.multiply(x, self.tensor, bias, wide=wide)

    def look_up(self, tokens: torch.Tensor) -> torch.Tensor:
        """See Form.look_up."""
        return self.form.look_up(tokens, self.tensor)


class MatrixStack(Parameter):
    """A weight matrix [out, in] for each expert, all of one form. Rows are counted through all matrices.

    A source fills rows of one matrix.

    tensor         [experts, *form.shape]: `tensor[e]` stores the matrix of expert e
    kept, refused  see weights/load.py Parameter
    """

    __slots__ = ("_packings", "form", "kept", "outputs", "refused")

    def __init__(
        self,
        form: Form,
        count: int,
        outputs: int,
        sources: tuple[Source, ...],
        *,
        kept: bool = False,
        refused: str = "",
    ) -> None:
        super().__init__((count, *form.shape), form.dtype, sources)
        self.form, self.outputs, self.kept, self.refused = form, outputs, kept, refused
        # By the matrix's address and the stored dtype. Cached, because a model has tens of thousands of experts'
        # sources, and asking a form for its packing takes as long as reading a small one.
        self._packings: dict[tuple[int, torch.dtype | str], Packing | None] = {}

    @property
    def input_scheme(self) -> InputScheme | None:
        """See weights/load.py Parameter."""
        return self.form.quantizes

    def rows(self, first: int, count: int) -> torch.Tensor | None:
        expert, row = divmod(first, self.outputs)
        return self.form.rows(self.tensor[expert], row, count)

    def packing(self, first: int, dtype: torch.dtype | str) -> tuple[Packing, int] | None:
        expert, row = divmod(first, self.outputs)
        key = self.tensor.data_ptr(), dtype
        if key not in self._packings:
            found = self.form.packing(self.tensor[0], dtype) if isinstance(self.form, Packable) else None
            self._packings[key] = found
        if (packing := self._packings[key]) is None:
            return None
        return packing._replace(place=packing.place + expert * self.tensor.stride(0) * self.dtype.itemsize), row

    def groups(self) -> Groups | None:
        return self.form.groups if isinstance(self.form, Grouped) else None

    def place_groups(self, first: int, rows: GroupedRows) -> None:
        assert isinstance(self.form, Grouped)
        expert, row = divmod(first, self.outputs)
        self.form.place_groups(self.tensor[expert], row, rows)

    def place(self, first: int, rows: torch.Tensor) -> None:
        expert, row = divmod(first, self.outputs)
        self.form.place(self.tensor[expert], row, rows)


class Target(Struct, frozen=True, eq=False):
    """A weight matrix, or the embedding table, that adapters may change.

    modules  number of outputs of each stacked checkpoint module, by name, in stacking order
    inputs   columns of the weight matrix, or rows of the embedding table
    table    whether this is the embedding table, whose rows are looked up by token
    whole    whether this is a layer after pooling, for which an adapter may have a weight and a bias of its own
    bias     whether such a layer has a bias
    experts  number of experts, each of which has such a matrix: in names of modules {} stands for an expert's index;
             0: this is one matrix
    stacked  of experts, the names of the parameter that stacks all matrices, in checkpoints and in transformers
    alternating  whether the rows of two modules alternate in that parameter
    transposed   whether transformers stores the matrices of that parameter as [inputs, outputs]
    """

    modules: Mapping[str, int]
    inputs: int
    table: bool = False
    whole: bool = False
    bias: bool = False
    experts: int = 0
    stacked: tuple[str, ...] = ()
    alternating: bool = False
    transposed: bool = False
