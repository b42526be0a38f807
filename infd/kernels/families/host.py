"""The types of the functions with which kernel families copy arrays from the host to the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy.typing as npt
from torch import Tensor

Array = npt.NDArray[Any]
Upload = Callable[[Array], Tensor]  # copies an array to a new tensor on the device
Fill = Callable[[Tensor, Array], None]  # copies an array [n] into a tensor [n] on the device
